"""Never Give Up on R2D2 as loops over single steps and environments, in float64.

Written from the papers: NGU (https://arxiv.org/abs/2002.06038), R2D2
(https://openreview.net/forum?id=r1lyTjAqYX), Retrace (https://arxiv.org/abs/1606.02647) and Adam; and from
the choices that ngu_r2d2.py documents where these say nothing. The caller tells what happened by chance:
actions, policies of episodes, sequences of a batch.

Weights are dictionaries of float64 tensors, named as in a state_dict. PyTorch computes networks and their
gradients, and nothing else.
"""

from collections import deque
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import conv2d

# === Networks ===


def scaled(obs):
    """Pixels from 0 to 1; numbers on a grid as one-hot channels, all those of the first channel first."""
    if obs.ndim == 1:
        return obs.astype(np.float64)
    if min(obs.shape[1:]) >= 36:
        return obs / 255
    return np.moveaxis(np.eye(11)[obs], -1, 1).reshape(-1, *obs.shape[1:])


def encode(weights, prefix, x, ends_with_relu=True):
    """Features (n, size) of scaled observations (n, ...)."""
    x = torch.as_tensor(np.asarray(x))
    names = [name for name in weights if name.startswith(f"{prefix}.") and name.endswith("weight")]
    for name in names:
        w, b = weights[name], weights[name.replace("weight", "bias")]
        x = conv2d(x, w, b, stride={8: 4, 4: 2, 3: 1}[w.shape[-1]]) if w.ndim == 4 else x.flatten(1) @ w.T + b
        x = x.clamp(min=0) if ends_with_relu or name != names[-1] else x
    return x


def action_values(weights, x, state):
    """Rescaled action values of one step by an LSTM cell and two heads, and the state after it."""
    hidden, cell = state
    gates = weights["lstm.weight_ih_l0"] @ x + weights["lstm.bias_ih_l0"]
    gates = gates + weights["lstm.weight_hh_l0"] @ hidden + weights["lstm.bias_hh_l0"]
    write, keep, new, read = gates.chunk(4)
    cell = keep.sigmoid() * cell + write.sigmoid() * new.tanh()
    hidden = read.sigmoid() * cell.tanh()

    def head(name):
        layer = (weights[f"{name}.0.weight"] @ hidden + weights[f"{name}.0.bias"]).clamp(min=0)
        return weights[f"{name}.2.weight"] @ layer + weights[f"{name}.2.bias"]

    advantage = head("advantage")
    return head("value") + advantage - advantage.mean(), (hidden, cell)


class Adam:
    def __init__(self, lr, eps):
        self.lr, self.eps, self.steps, self.m, self.v = lr, eps, 0, {}, {}

    def step(self, weights, gradients):
        self.steps += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g**2
            m, v = self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)
            weights[name] = weights[name] - self.lr * m / (v.sqrt() + self.eps)


def norm_of(gradients):
    return sum(float((g**2).sum()) for g in gradients.values()) ** 0.5


def clipped(gradients, most):
    norm = norm_of(gradients)
    return {name: g * min(1, most / norm) if norm else g for name, g in gradients.items()}


# === Formulas ===


def policy_family(N, beta, gamma_max, gamma_min):
    """[(beta_i, gamma_i), ...], appendix A of NGU. A single policy has beta and gamma_max."""
    family = []
    for i in range(N):
        if i == N - 1:
            weight = beta
        elif i == 0:
            weight = 0.0
        else:
            weight = beta / (1 + np.exp(-10 * (2 * i - (N - 2)) / (N - 2)))
        between = i / (N - 1) if N > 1 else 0
        log = (1 - between) * np.log(1 - gamma_max) + between * np.log(1 - gamma_min)
        family.append((weight, 1 - np.exp(log)))
    return family


def exploration(n, num_envs, epsilon):
    """Share of random actions of environment n, as in Ape-X."""
    return epsilon ** (1 + 7 * n / (num_envs - 1)) if num_envs > 1 else epsilon


def h(x, eps):
    return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x


def h_inv(x, eps):
    """Proposition A.2 of Pohlen et al. 2018, to which R2D2 refers."""
    return np.sign(x) * (((np.sqrt(1 + 4 * eps * (abs(x) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1)


def nstep_target(t, steps, rewards, discounts, ends, values, n):
    """n steps from t, fewer where the episode or the sequence ends. Step t has the reward of row t + 1."""
    total, factor = 0.0, 1.0
    for k in range(t, min(t + n, steps)):
        total += factor * rewards[k + 1]
        factor *= discounts[k + 1]
        if ends[k + 1]:
            break
    return total + factor * values[k + 1]


def retrace_target(t, steps, rewards, discounts, ends, expected, taken, traces):
    """Q(t) + sum over s >= t of the TD errors of s, times discounts and traces on the way."""
    total, factor = taken[t], 1.0
    for s in range(t, steps):
        total += factor * (rewards[s + 1] + discounts[s + 1] * expected[s + 1] - taken[s])
        if ends[s + 1] or s + 1 == steps:
            break
        factor *= discounts[s + 1] * traces[s + 1]
    return total


def episodic_novelty(squared_distances, mean, k, eps):
    """Algorithm 1 of NGU by the nearest memories; where they are fewer than k, as if others were alike."""
    kernels = [eps / (max(d / max(mean, 1e-12) - 0.008, 0) + eps) for d in squared_distances]
    similarity = np.sqrt(k * np.mean(kernels)) + 0.001
    return 0.0 if similarity > 8 else 1 / similarity


def rescaled(novelty, all_novelties, bonus):
    """The scales by batch that DI-engine has or discusses."""
    x = np.array(all_novelties)
    deviation = x.std(ddof=1) if len(x) > 1 else 1.0
    scales = {"min-max": (x.min(), x.max() - x.min()), "batch-mean": (0, x.mean())}
    scales |= {"zero-mean": (x.mean(), deviation), "unit-std": (0, deviation)}
    shift, scale = scales.get(bonus, (0, 1))
    return (novelty - shift) / scale


class Moments:
    """Mean and variance of what was seen; what is old counts less when that is more than horizon."""

    def __init__(self, horizon=np.inf):
        self.horizon, self.weight, self.sum, self.squares = horizon, 0.0, 0.0, 0.0

    def update(self, batch):
        for x in batch:
            self.weight, self.sum, self.squares = self.weight + 1, self.sum + x, self.squares + x**2
        if self.weight > self.horizon:
            kept = self.horizon / self.weight
            self.weight, self.sum, self.squares = self.horizon, self.sum * kept, self.squares * kept

    @property
    def mean(self):
        return self.sum / self.weight

    @property
    def var(self):
        return np.maximum(self.squares / self.weight - self.mean**2, 0)


# === Novelty ===


class Embedding:
    """Weights of the embedding at some time, and the mean of the distances that they gave."""

    def __init__(self, weights, previous=None):
        self.weights = {name: x for name, x in weights.items() if name.startswith("embedding.")}
        self.distances = [(1e-6 * previous.mean(), 1e-6)] if previous else []

    def __call__(self, obs):
        return encode(self.weights, "embedding", scaled(obs)[None])[0].numpy()

    def mean(self):
        """By steps: their sums and numbers of distances, the latter 0.99 times as much as the next."""
        ages = range(len(self.distances) - 1, -1, -1)
        sums, numbers = np.array([[0.99**age] for age in ages] * np.array(self.distances)).sum(0)
        return sums / numbers


class Curiosity:
    def __init__(self, args, weights):
        self.args, self.weights, self.learns = args, weights, True
        self.newest = Embedding(weights)
        self.whitening, self.errors, self.novelties = Moments(), Moments(horizon=2000), Moments()

    def begin(self, episode):
        episode.embedding = self.newest
        episode.memory = deque([self.newest(episode.rows[0].obs)], maxlen=self.args.memory_size)

    def whitened(self, obs):
        x = (scaled(obs) - self.whitening.mean) / np.sqrt(self.whitening.var + 1e-8)
        return np.clip(x, -5, 5)

    def prediction_errors(self, observations):
        x = np.stack([self.whitened(obs) for obs in observations])
        predicted = encode(self.weights, "rnd_predictor", x, False)
        return ((predicted - encode(self.weights, "rnd_target", x, False)) ** 2).mean(-1)

    def rewards(self, episodes, arrivals):
        """Intrinsic rewards and alphas of what was arrived at in each environment; and what is logged."""
        args, distances, embedded = self.args, [], []
        for episode, obs in zip(episodes, arrivals, strict=True):
            embedded.append(episode.embedding(obs))
            to_all = sorted(((x - embedded[-1]) ** 2).sum() for x in episode.memory)
            distances.append(to_all[: args.neighbors])
        for embedding in {id(episode.embedding): episode.embedding for episode in episodes}.values():
            users = [i for i, episode in enumerate(episodes) if episode.embedding is embedding]
            found = [d for i in users for d in distances[i]]
            if self.learns:
                embedding.distances.append((sum(found), len(found)))
        means = [episode.embedding.mean() for episode in episodes]
        novelty = [
            episodic_novelty(d, mean, args.neighbors, args.kernel_eps)
            for d, mean in zip(distances, means, strict=True)
        ]
        usual = episodic_novelty([1.0] * args.neighbors, 1.0, args.neighbors, args.kernel_eps)
        if args.bonus == "long-run-mean":
            self.novelties.update(novelty if self.learns else ())
            usual = self.novelties.mean
        novelty = np.array(novelty) / usual
        if args.bonus == "calibrated":
            novelty = np.minimum(novelty, 1)
        for episode, x in zip(episodes, embedded, strict=True):
            episode.memory.append(x)
        logged = dict(novelty=novelty.mean(), distance=np.mean(means))
        logged["memory"] = np.mean([len(episode.rows) + 1 for episode in episodes])
        alphas = np.ones(len(episodes))
        if args.rnd:
            if self.learns:
                self.whitening.update([scaled(obs) for obs in arrivals])
            errors = self.prediction_errors(arrivals).numpy()
            if self.learns:
                self.errors.update(errors)
            alphas = 1 + (errors - self.errors.mean) / np.sqrt(self.errors.var)
            logged |= dict(alpha_at_least=np.mean(alphas <= 1), alpha_at_most=np.mean(alphas >= args.rnd_max))
            alphas = np.minimum(np.maximum(alphas, 1), args.rnd_max)
        logged |= dict(alpha=alphas.mean(), reward=(novelty * alphas).mean())
        return novelty * alphas, alphas, logged

    def loss(self, batch):
        """Inverse dynamics and prediction errors over the last trained steps of the sequences of a batch."""
        steps = [
            step for sequence in batch for step in sequence.trained_steps()[-self.args.auxiliary_steps :]
        ]
        x = [[scaled(row.obs) for row in rows] for rows in zip(*steps, strict=True)]
        embedded = torch.cat([encode(self.weights, "embedding", np.stack(obs)) for obs in x], 1)
        error = self.prediction_errors([after.obs for _, after in steps]).sum()
        inverse, right = 0.0, 0
        for both, (_, after) in zip(embedded, steps, strict=True):
            hidden = (self.weights["inverse.0.weight"] @ both + self.weights["inverse.0.bias"]).clamp(min=0)
            logits = self.weights["inverse.2.weight"] @ hidden + self.weights["inverse.2.bias"]
            inverse = inverse + logits.logsumexp(0) - logits[after.action]
            right += int(logits.argmax()) == after.action
        inverse, error = inverse / len(steps), error / len(steps)
        decayed = [x for name, x in self.weights.items() if name.startswith(("embedding.", "inverse."))]
        penalty = 0.5 * 1e-5 * sum((x**2).sum() for x in decayed)
        logged = dict(inverse_loss=inverse.item(), rnd_loss=error.item(), inverse_accuracy=right / len(steps))
        return inverse + error + penalty, logged


# === Replay ===


class Sequence:
    """Rows start to start + steps of an episode."""

    def __init__(self, args, n, episode, start, steps):
        self.args, self.n, self.episode, self.start, self.steps, self.priority = (
            args,
            n,
            episode,
            start,
            steps,
            None,
        )
        self.rows = episode.rows[start : start + steps + 1]

    def is_trained(self, t):
        """All steps of an episode's first sequence, as it begins with a known state; others burn in."""
        return self.start == 0 or t >= self.args.burn_in

    def trained_steps(self):
        return [self.rows[t : t + 2] for t in range(self.steps) if self.is_trained(t)]

    def extrinsic_rewards(self):
        rewards = [row.r_ext for row in self.rows]
        if self.rows[-1].ends:
            for t in reversed(range(self.steps + 1)):
                if rewards[t]:
                    rewards[t] *= self.args.last_reward_weight
                    break
        return rewards


def cut(args, steps, ended):
    """Starts and lengths of the sequences of an episode of so many steps.

    One begins every period steps. Where the last complete one does not reach the end, the next is short.
    """
    L, found = args.burn_in + args.unroll, []
    for start in range(0, steps, args.period):
        if start + L <= steps:
            found.append((start, L))
        elif ended and (not found or sum(found[-1]) < steps):
            return [*found, (start, steps - start)]
    return found


# === All of it ===


class Reference:
    """weights, curiosity: of the networks at the beginning. obs, policies: of the first episodes."""

    def __init__(self, args, num_actions, weights, curiosity, obs, policies):
        self.args, self.A, self.weights, self.target = args, num_actions, weights, dict(weights)
        self.curiosity = Curiosity(args, curiosity) if args.beta > 0 else None
        self.optimizer = Adam(args.learning_rate, args.adam_eps)
        self.auxiliary = Adam(args.auxiliary_lr, args.adam_eps)
        self.family = policy_family(args.num_policies, args.beta, args.gamma_max, args.gamma_min)
        self.table, self.written, self.steps, self.updates = [], [0] * len(obs), 0, 0
        self.episodes = [None] * len(obs)
        for n, (x, policy) in enumerate(zip(obs, policies, strict=True)):
            self.begin(n, x, policy)

    def begin(self, n, obs, policy):
        zeros = torch.zeros(self.args.hidden_size, dtype=torch.float64)
        row = SimpleNamespace(obs=obs, action=0, r_ext=0.0, r_int=0.0, ends=False, state=(zeros, zeros))
        self.episodes[n] = SimpleNamespace(rows=[row], policy=policy, first=self.written[n], num_cut=0)
        self.written[n] += 1
        if self.curiosity:
            self.curiosity.begin(self.episodes[n])

    def inputs(self, row, policy):
        """What the LSTM sees beside the features of the observation."""
        r_ext = np.sign(row.r_ext) * np.log(1 + abs(row.r_ext)) if self.args.squash_reward else row.r_ext
        seen = np.eye(self.A)[row.action], [r_ext, row.r_int], np.eye(len(self.family))[policy]
        return torch.from_numpy(np.concatenate(seen))

    @torch.no_grad()
    def act(self):
        """What the LSTM sees in each environment, the state before it, and the action values."""
        inputs, states, values = [], [], []
        for episode in self.episodes:
            row = episode.rows[-1]
            features = encode(self.weights, "encoder", scaled(row.obs)[None])[0]
            inputs.append(torch.cat((features, self.inputs(row, episode.policy))))
            states.append(torch.stack(row.state))
            row.q, episode.state = action_values(self.weights, inputs[-1], row.state)
            values.append(row.q)
        return torch.stack(inputs), torch.stack(states, 1), torch.stack(values)

    @torch.no_grad()
    def arrive(self, actions, obs, r_ext, terminated, truncated):
        """A step of each environment; what is logged of novelty. The caller begins anew what has ended."""
        N, logged = len(self.episodes), {}
        r_int, alphas = np.zeros(N), np.ones(N)
        if self.curiosity:
            r_int, alphas, logged = self.curiosity.rewards(self.episodes, obs)
        for n, episode in enumerate(self.episodes):
            is_greedy = actions[n] == int(episode.rows[-1].q.argmax())
            epsilon = exploration(n, N, self.args.epsilon)
            ends = bool(terminated[n] or truncated[n])
            goes_on = not terminated[n] and (self.args.bootstrap_truncated or not truncated[n])
            row = SimpleNamespace(
                obs=obs[n], action=int(actions[n]), r_ext=float(r_ext[n]), r_int=float(r_int[n])
            )
            row.alpha, row.ends, row.goes_on, row.state = float(alphas[n]), ends, goes_on, episode.state
            row.mu = epsilon / self.A + (1 - epsilon) * is_greedy
            episode.rows.append(row)
            self.written[n] += 1
        self.steps += N
        highest = max((sequence.priority for sequence in self.table), default=1.0)
        for n, episode in enumerate(self.episodes):
            found = cut(self.args, len(episode.rows) - 1, episode.rows[-1].ends)
            for start, steps in found[episode.num_cut :]:
                sequence = Sequence(self.args, n, episode, start, steps)
                sequence.priority = highest
                self.table.append(sequence)
            episode.num_cut = len(found)
        return logged

    def forget(self):
        """Sequences leave with their first row, of which an environment has room for so many."""
        room = self.args.replay_steps // self.args.num_envs
        self.table = [x for x in self.table if x.episode.first + x.start >= self.written[x.n] - room]

    def probabilities(self):
        p = np.array([sequence.priority**self.args.priority_exponent for sequence in self.table])
        return p / p.sum()

    def values_of(self, weights, sequence, policy):
        """Action values of a sequence's rows, from its stored state. No gradient reaches the burn-in."""
        features = encode(weights, "encoder", np.stack([scaled(row.obs) for row in sequence.rows]))
        state, values = sequence.rows[0].state, []
        for t, row in enumerate(sequence.rows):
            if t == self.args.burn_in:
                state = tuple(x.detach() for x in state)
            q, state = action_values(weights, torch.cat((features[t], self.inputs(row, policy))), state)
            values.append(q)
        return torch.stack(values)

    def targets(self, sequence, q, target_q, policy, novelties):
        """Of the steps of a sequence, rescaled."""
        args, rows, steps = self.args, sequence.rows, sequence.steps
        beta, gamma = self.family[policy]
        rewards = sequence.extrinsic_rewards()
        for t in range(1, steps + 1):
            rewards[t] += (
                beta * rows[t].alpha * rescaled(rows[t].r_int / rows[t].alpha, novelties, args.bonus)
            )
        discounts = [0] + [gamma * row.goes_on for row in rows[1:]]
        ends = [False] + [row.ends for row in rows[1:]]
        values, greedy = h_inv(target_q, args.h_eps), q.argmax(-1)
        if args.target == "nstep":
            best = [values[t, greedy[t]] for t in range(steps + 1)]
            targets = [
                nstep_target(t, steps, rewards, discounts, ends, best, args.n_step) for t in range(steps)
            ]
        else:
            pi = np.full((steps + 1, self.A), args.eval_epsilon / self.A)
            pi[range(steps + 1), greedy] += 1 - args.eval_epsilon
            expected = (pi * values).sum(-1)
            taken = [values[t, rows[t + 1].action] for t in range(steps)]
            ratios = [pi[t, rows[t + 1].action] / rows[t + 1].mu for t in range(steps)]
            traces = [args.retrace_lambda * min(1, ratio) for ratio in ratios]
            case = steps, rewards, discounts, ends, expected, taken, traces
            targets = [retrace_target(t, *case) for t in range(steps)]
        return h(np.array(targets), args.h_eps)

    def update(self, places, policies):
        """Clipped gradients, action values of each sequence by both networks, and what is logged."""
        args, weights = self.args, {k: x.clone().requires_grad_() for k, x in self.weights.items()}
        batch, p = [self.table[place] for place in places], self.probabilities()[places]
        importance = (len(self.table) * p) ** -args.importance_exponent
        importance /= importance.max()
        novelties = [row.r_int / row.alpha for x in batch for _, row in x.trained_steps()]
        loss, errors, numbers, both = 0.0, [], [], []
        for sequence, policy, weight in zip(batch, policies, importance, strict=True):
            q = self.values_of(weights, sequence, policy)
            with torch.no_grad():
                target_q = self.values_of(self.target, sequence, policy).numpy()
            targets = self.targets(sequence, q.detach().numpy(), target_q, policy, novelties)
            both.append((q.detach(), target_q))
            errors.append([])
            for t in range(sequence.steps):
                if sequence.is_trained(t):
                    row = sequence.rows[t + 1]
                    error = targets[t] - q[t, row.action]
                    loss = loss + weight * 0.5 * error**2 / len(batch)
                    r_int = row.alpha * rescaled(row.r_int / row.alpha, novelties, args.bonus)
                    errors[-1].append(abs(error.item()))
                    numbers.append((0.5 * error.item() ** 2, q[t, row.action].item(), targets[t], r_int))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        gradients = dict(zip(weights, gradients, strict=True))
        for sequence, e in zip(batch, errors, strict=True):
            sequence.priority = args.priority_eta * max(e) + (1 - args.priority_eta) * np.mean(e) + 1e-6
        names = ("td_loss", "q", "target", "intrinsic_reward")
        logged = dict(zip(names, np.mean(numbers, 0), strict=True)) | dict(grad_norm=norm_of(gradients))
        return clipped(gradients, args.max_grad_norm), both, logged, len(numbers)

    def auxiliary_update(self, places):
        """Clipped gradients of what learns of embedding, inverse model and predictor; and what is logged."""
        learning = ("embedding.", "inverse.") if self.args.train_embedding else ()
        learning += ("rnd_predictor.",) if self.args.rnd else ()
        weights = self.curiosity.weights
        for name in weights:
            weights[name] = weights[name].detach().requires_grad_(name.startswith(learning))
        loss, logged = self.curiosity.loss([self.table[place] for place in places])
        names = [name for name in weights if weights[name].requires_grad]
        gradients = torch.autograd.grad(loss, [weights[name] for name in names])
        for name in names:
            weights[name] = weights[name].detach()
        return clipped(dict(zip(names, gradients, strict=True)), self.args.max_grad_norm), logged

    def after_update(self):
        self.updates += 1
        if self.updates % self.args.target_every == 0:
            self.target = dict(self.weights)
        if self.curiosity and self.args.train_embedding and self.updates % self.args.embedding_every == 0:
            self.curiosity.newest = Embedding(self.curiosity.weights, self.curiosity.newest)
