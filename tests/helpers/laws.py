"""What must hold in every recorded run, whatever its flags: float64 NumPy, by the definitions of the papers.

Each law takes what traced.record() noted and compares it with what the arguments demand. So a flag that
reaches one of two places breaks a law as soon as its value is not the default.
"""

import numpy as np
import torch


def assert_close(found, expected, what: str, tolerance: float = 2e-4):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, what
    scale = max(1e-3, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what)


# === Environments ===


def as_seen(obs: np.ndarray) -> np.ndarray:
    """Images (..., 36, 36, 1) with their channels first."""
    return np.moveaxis(obs, -1, -3) if obs.shape[-1] == 1 else obs


def trace(run) -> dict[str, np.ndarray]:
    """What all environments saw, were told and answered, side by side (S, N, ...)."""
    names = ("obs", "actions", "rewards", "final_obs", "terminated", "truncated")
    steps = list(zip(*(env.steps for env in run.environments), strict=False))  # those that all have made
    seen = {name: np.array([[env[k] for env in step] for step in steps]) for k, name in enumerate(names)}
    for name in ("obs", "final_obs"):
        seen[name] = as_seen(seen[name])
    return seen | dict(dones=seen["terminated"] | seen["truncated"])


def moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of rows and of 1e-4 rows with mean 0 and variance 1, with which baselines begins."""
    count = len(rows) + 1e-4
    mean = rows.sum(0) / count
    return mean, ((rows**2).sum(0) + 1e-4) / count - mean**2


def seen_by_agent(run) -> dict[str, np.ndarray]:
    """trace(), with observations (S + 1, N, ...) and rewards as the agent gets them."""
    seen = trace(run)
    obs = np.concatenate((seen["obs"], as_seen(np.array([[env.obs for env in run.environments]]))))
    if run.script.SCRIPT == "ppo_atari":
        return seen | dict(obs=obs, rewards=np.sign(seen["rewards"]))
    if not hasattr(run.script, "NormalizedEnvs") or not getattr(run.args, "normalize", True):
        return seen | dict(obs=obs)

    def whiten(x, mean, var):
        return ((x - mean) / np.sqrt(var + 1e-8)).clip(-10, 10)

    obs, final_obs = obs.astype(np.float64), seen["final_obs"].astype(np.float64)
    new_obs, rewards = [whiten(obs[0], *moments(obs[0]))], []
    returns, all_returns = np.zeros(run.args.num_envs), []
    for t, reward in enumerate(seen["rewards"]):
        returns = run.args.gamma * returns + reward
        all_returns = [*all_returns, *returns]
        rewards.append((reward / np.sqrt(moments(np.array(all_returns))[1] + 1e-8)).clip(-10, 10))
        returns = np.where(seen["dones"][t], 0, returns)
        now = moments(obs[: t + 2].reshape(-1, obs.shape[-1]))
        new_obs.append(whiten(obs[t + 1], *now))
        final_obs[t] = whiten(final_obs[t], *now)
    return seen | dict(obs=np.array(new_obs), rewards=np.array(rewards), final_obs=final_obs)


def valid_choices(run, seen) -> np.ndarray | None:
    """Masks (S, N, choices): the environments', or with --no-mask-actions and for bins, everything."""
    space = run.environments[0].action_space
    if run.script.SCRIPT != "ppo_multidiscrete":
        return None
    if hasattr(space, "low"):
        return np.ones((*seen["rewards"].shape, run.args.num_bins * len(space.low)), bool)
    even = trace(run)["obs"][..., 0] % 2 == 0  # the first number is the step
    others = np.ones_like(even)
    masks = np.stack((even, others, even, others, others), -1)
    return masks if run.args.mask_actions else masks | True


def taken(run, actions: np.ndarray) -> np.ndarray:
    """What the environments get of an agent's actions (..., K)."""
    space = run.environments[0].action_space
    if run.script.SCRIPT == "ppo_continuous":
        return np.minimum(np.maximum(actions, space.low), space.high)
    if hasattr(space, "low"):  # the first bin is the lowest action, the last the highest
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        return low + actions / (run.args.num_bins - 1) * (high - low)
    return actions


def law_of_heartbeats(run):
    """The training loop says that it goes on once before it begins, and as each iteration begins."""
    counts = [count for loop, count in run.heartbeats if loop == "iteration"]
    assert len(counts) == 1 + run.args.num_iterations and counts == sorted(counts)
    if not hasattr(run.args, "num_actors"):  # whose actors may be ahead
        size = run.args.num_envs * run.args.num_steps
        assert counts == [0, *range(0, run.args.num_iterations * size, size)]


def law_of_environments(run):
    """As many as asked for, of the right task; seeds count up, and later episodes have none."""
    assert [env.unwrapped.spec.id for env in run.environments] == [run.args.env_id] * run.args.num_envs
    assert [env.seeds[0] for env in run.environments] == [run.args.seed + n for n in range(run.args.num_envs)]
    assert {seed for env in run.environments for seed in env.seeds[1:]} <= {None}


# === PPO ===


def gae(rewards, values, dones, next_value, gamma, lam):
    """By definition: the sum of (gamma lambda)^k delta_{t+k} up to the end of the episode."""
    deltas = rewards + gamma * (1 - dones) * np.concatenate((values[1:], next_value[None])) - values
    advantages = np.zeros_like(deltas)
    for t, n in np.ndindex(deltas.shape):
        for k in range(t, len(deltas)):
            advantages[t, n] += (gamma * lam) ** (k - t) * deltas[k, n]
            if dones[k, n]:
                break
    return advantages


def log_prob(dist, actions: np.ndarray) -> np.ndarray:
    """Under Gaussians, or under logits (..., A), or of several components (..., K, A)."""
    if hasattr(dist, "log_std"):
        mean, log_std = (x.detach().numpy().astype(np.float64) for x in (dist.mean, dist.log_std))
        return (-(((actions - mean) / np.exp(log_std)) ** 2) / 2 - log_std - np.log(2 * np.pi) / 2).sum(-1)
    logits, actions = np.asarray(dist.logprobs, np.float64), np.asarray(actions, int)
    found = np.take_along_axis(logits, actions[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
    return found.sum(-1) if type(dist).__name__ == "MultiCategorical" else found


def entropy(dist) -> np.ndarray:
    if hasattr(dist, "log_std"):
        return (dist.log_std.detach().numpy().astype(np.float64) + np.log(2 * np.pi * np.e) / 2).sum()
    p = np.exp(np.asarray(dist.logprobs, np.float64))
    entropies = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
    return entropies.sum(-1) if type(dist).__name__ == "MultiCategorical" else entropies


class Acting:
    """An agent that plays step by step, with its LSTM's state or the masks, if it has them."""

    def __init__(self, run, agent, seen, state):
        self.agent, self.state, self.masks = agent, state, valid_choices(run, seen)
        self.dtype = torch.uint8 if seen["obs"].dtype == np.uint8 else torch.float32

    def __call__(self, obs, t, starts, n=slice(None), keeps=True):
        """Distribution and values (N,) of observations (N, ...) before step t; keeps the state."""
        obs = torch.as_tensor(obs).to(self.dtype)
        if self.state is not None:
            starts = torch.as_tensor(starts)[None]
            dist, value, state = self.agent(obs[None], self.state[:, n], starts)
            dist.logprobs = dist.logprobs[0]
            self.state = state if keeps else self.state
            return dist, value[0].numpy().astype(np.float64)
        mask = () if self.masks is None else (torch.as_tensor(self.masks[min(t, len(self.masks) - 1)][n]),)
        dist, value = self.agent(obs, *mask)
        return dist, value.numpy().astype(np.float64)


@torch.no_grad()
def rollouts(run):
    """Of each iteration: its calls of the loss, and what their minibatches are to be made of, (T, N, ...)."""
    seen, args, T = seen_by_agent(run), run.args, run.args.num_steps
    rows = {name: x.shape for name, x in seen.items()}
    starts = np.concatenate((np.ones((1, args.num_envs), bool), seen["dones"]))
    is_recurrent, state = run.script.SCRIPT == "ppo_lstm", None
    for i, calls in enumerate(run.iterations()):
        acting = Acting(run, calls[0].agent, seen, state)
        if is_recurrent and i == 0:
            acting.state = calls[0].agent.initial_state(args.num_envs)
        before, now = acting.state, range(i * T, (i + 1) * T)
        dists, values, bootstraps = [], np.zeros((T, args.num_envs)), np.zeros((T, args.num_envs))
        for t in now:
            dist, values[t - now.start] = acting(seen["obs"][t], t, starts[t])
            dists.append(dist)
            for n in (seen["truncated"][t] & args.bootstrap_truncated).nonzero()[0]:
                final_obs, only = seen["final_obs"][t, n : n + 1], slice(n, n + 1)
                _, value = acting(final_obs, t, np.zeros(1, bool), only, keeps=False)
                bootstraps[t - now.start, n] = args.gamma * value[0]
        state = acting.state
        _, next_value = acting(seen["obs"][now.stop], now.stop, np.zeros(args.num_envs, bool), keeps=False)
        expected = {name: x[now.start : now.stop] for name, x in seen.items() if rows[name][0]}
        rewards, dones = expected["rewards"] + bootstraps, expected["dones"]
        advantages = gae(rewards, values, dones, next_value, args.gamma, args.gae_lambda)
        expected |= dict(values=values, advantages=advantages, returns=advantages + values)
        expected |= dict(starts=starts[now.start : now.stop], dists=dists, state=before)
        if acting.masks is not None:
            expected["masks"] = acting.masks[now.start : now.stop]
        yield calls, expected


def minibatches(run) -> list[np.ndarray]:
    """Indices of each minibatch of the run, by the orders that were drawn."""
    reuse, sizes = getattr(run.args, "sample_reuse", None), []
    for k, order in enumerate(run.orders):
        share = 1 if reuse is None else min(1, reuse - k % np.ceil(reuse))
        sizes += np.array_split(order[: round(share * len(order))], run.args.num_minibatches)
    return sizes


def law_of_batches(run):
    """Minibatches are what the environments gave, with GAE's advantages, in the order that was drawn."""
    args, is_recurrent, indices = run.args, run.script.SCRIPT == "ppo_lstm", minibatches(run)
    if hasattr(args, "batch_segments") and args.batch_segments != args.num_envs:
        return  # an iteration's segments are not the environments' last steps
    for order in run.orders:
        assert sorted(order) == list(range(run.args.num_envs * (1 if is_recurrent else run.args.num_steps)))
    for calls, expected in rollouts(run):
        drawn, indices = indices[: len(calls)], indices[len(calls) :]
        first, T, N = slice(run.args.num_minibatches), run.args.num_steps, run.args.num_envs
        # the first pass put back in place, (T, N, ...)
        found, places = {}, np.argsort(np.concatenate(drawn[first]))
        for name in calls[0].batch:
            axis = 1 if is_recurrent else 0
            x = np.concatenate([call.batch[name].numpy() for call in calls[first]], axis).take(places, axis)
            found[name] = x if is_recurrent else x.reshape(T, N, *x.shape[1:])
            for call, at in zip(calls, drawn, strict=True):  # other passes have the same, in other orders
                np.testing.assert_array_equal(call.batch[name].numpy(), x.take(at, axis), name)
        assert_close(taken(run, found["actions"]), expected["actions"], "actions")
        logprobs = [log_prob(dist, x) for dist, x in zip(expected["dists"], found["actions"], strict=True)]
        assert_close(found["logprobs"], logprobs, "logprobs")
        for name in found.keys() & expected.keys() - {"actions"}:
            assert_close(found[name], expected[name], name)
    assert not indices


def clip_and_lr(run, call_index: int) -> tuple[float, float]:
    """Clip range and learning rate of a call of the loss, annealed by updates so far."""
    iteration = [k for k, calls in enumerate(run.iterations()) for _ in calls][call_index]
    left, args = 1 - iteration / run.args.num_iterations, run.args
    clip = getattr(args, "clip_coef", np.nan) * (left if getattr(args, "anneal_clip", False) else 1)
    return clip, args.learning_rate * (left if getattr(args, "anneal_lr", False) else 1)


def ppo_numbers(run, k: int) -> dict[str, float]:
    """Loss of the k-th call and its parts."""
    args, call, (clip, _) = run.args, run.losses[k], clip_and_lr(run, k)
    batch = {name: x.numpy().astype(np.float64) for name, x in call.batch.items()}
    recent = batch["recent_logprobs"] if getattr(args, "decoupled", False) else batch["logprobs"]
    logratio, advantages = log_prob(call.dist, batch["actions"]) - recent, batch["advantages"]
    ratio, weight = np.exp(logratio), np.exp(recent - batch["logprobs"])
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    gain = np.where(advantages > 0, np.minimum(ratio, 1 + clip), np.maximum(ratio, 1 - clip)) * advantages
    errors = (call.values - batch["returns"]) ** 2
    if args.clip_vloss:
        moved = np.clip(call.values - batch["values"], -clip, clip)
        errors = np.maximum(errors, (batch["values"] + moved - batch["returns"]) ** 2)
    numbers = dict(policy_loss=-(weight * gain).mean(), value_loss=errors.mean() / 2)
    numbers |= dict(entropy=entropy(call.dist).mean(), old_approx_kl=-logratio.mean())
    numbers["approx_kl"] = (ratio - 1 - logratio).mean()
    if getattr(args, "decoupled", False):
        numbers["behavior_kl"] = (weight - 1 - np.log(weight)).mean()
    numbers["clipped"] = np.abs(ratio - 1) > clip
    numbers["loss"] = numbers["policy_loss"] - args.ent_coef * numbers["entropy"]
    numbers["loss"] += args.vf_coef * numbers["value_loss"]
    return numbers


def law_of_ppo(run):
    """Loss of each minibatch, and how many passes there are: all, or until the KL divergence is too large."""
    args, k = run.args, 0
    epochs = getattr(args, "update_epochs", None) or int(np.ceil(args.sample_reuse))
    for calls in run.iterations():
        passes = 0
        for call in calls:
            numbers, k = ppo_numbers(run, k), k + 1
            assert_close(call.loss, numbers["loss"], "loss")
            if k % args.num_minibatches == 0:
                passes += 1
                if args.target_kl is not None and numbers["approx_kl"] > args.target_kl:
                    break
        assert len(calls) == passes * args.num_minibatches
        assert passes == epochs or args.target_kl is not None and numbers["approx_kl"] > args.target_kl


# === Optimizers ===


def clipped_gradient(run, k: int) -> np.ndarray:
    """Of the k-th call of the loss."""
    call = run.losses[k]
    return call.grad * min(1, run.args.max_grad_norm / call.norm)


def law_of_adam(run):
    """Every step is Adam's (Kingma and Ba, algorithm 1), by the loss's gradient, clipped."""
    args, is_ngu = run.args, run.script.SCRIPT == "ngu_r2d2"
    optimizers = list(dict.fromkeys(id(step.optimizer) for step in run.steps))
    for which, key in enumerate(optimizers):
        steps = [step for step in run.steps if id(step.optimizer) == key]
        m, v = 0, 0
        for t, step in enumerate(steps, 1):
            lr, eps = (args.learning_rate, args.adam_eps) if is_ngu else (clip_and_lr(run, t - 1)[1], 1e-5)
            if which == 0:
                assert_close(step.grad, clipped_gradient(run, t - 1), "gradient")
            else:  # the curiosity's
                lr = args.auxiliary_lr
                assert step.norm < args.max_grad_norm * (1 + 1e-4)
            m, v = 0.9 * m + 0.1 * step.grad, 0.999 * v + 0.001 * step.grad**2
            change = lr * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + eps)
            assert_close(step.after, step.before - change, "parameters", 1e-5)
            largest = np.abs(change).max()
            assert_close(step.before - step.after, change, "change", max(1e-3, 1e-6 / max(largest, 1e-9)))
    assert optimizers or not run.losses


def law_of_rmsprop(run):
    """Every step is TensorFlow's RMSProp: epsilon is in the root, and mean squares begin with 1."""
    args, mean_square = run.args, 1.0
    for k, step in enumerate(run.steps):
        assert_close(step.grad, clipped_gradient(run, k), "gradient")
        mean_square = args.rmsprop_decay * mean_square + (1 - args.rmsprop_decay) * step.grad**2
        change = clip_and_lr(run, k)[1] * step.grad / np.sqrt(mean_square + args.rmsprop_eps)
        assert_close(step.after, step.before - change, "parameters", 1e-5)
        assert_close(step.before - step.after, change, "change", 1e-2)


def law_of_optimizer(run):
    {"adam": law_of_adam, "rmsprop": law_of_rmsprop}[run.args.optimizer](run)


# === IMPALA ===


def law_of_unrolls(run):
    """New unrolls are what the environments gave: T + 1 rows, the last of which begins the next one."""
    args, T = run.args, run.args.num_steps
    seen = {name: x for name, x in trace(run).items()}
    obs = np.concatenate((seen["obs"], as_seen(np.array([[env.obs for env in run.environments]]))))
    nothing = np.zeros((1, args.num_envs))
    rows = dict(obs=obs, last_actions=np.concatenate((nothing, seen["actions"])))
    rows["last_rewards"] = np.concatenate((nothing, seen["rewards"]))
    rows["starts"] = np.concatenate((nothing + 1, seen["dones"]))
    for i, call in enumerate(run.losses):
        for name, x in rows.items():
            found = call.batch[name].numpy()[:, : args.num_envs]
            assert_close(found, x[i * T : (i + 1) * T + 1], name)
        bootstraps = np.zeros((T + 1, args.num_envs))
        cuts = seen["truncated"][i * T : (i + 1) * T] & args.bootstrap_truncated
        for t, n in zip(*cuts.nonzero(), strict=True):
            last = torch.as_tensor(seen["final_obs"][i * T + t, n]).float()[None, None]
            with torch.no_grad():
                _, value, _ = call.agent(dict(obs=last), torch.zeros(2, 1, 0))
            bootstraps[t + 1, n] = args.gamma * value.item()
        assert_close(call.batch["bootstraps"].numpy()[:, : args.num_envs], bootstraps, "bootstraps")


def impala_numbers(run, k: int) -> dict[str, float]:
    """Loss of the k-th call and its parts; V-trace by equation 1 of the paper, sums of products."""
    args, call = run.args, run.losses[k]
    batch = {name: x.numpy() for name, x in call.batch.items()}
    rewards, T = batch["last_rewards"][1:].astype(np.float64), args.num_steps
    rewards = (rewards.clip(-1, 1) if args.rewards == "clip" else rewards) + batch["bootstraps"][1:]
    discounts = args.gamma * (1.0 - batch["starts"][1:])
    dist = type("Dist", (), dict(logprobs=call.dist.logprobs[:-1]))
    logprobs = log_prob(dist, batch["last_actions"][1:])
    logratio = logprobs - batch["logprobs"]
    ratio = np.exp(logratio)
    is_vtrace = args.correction == "vtrace"
    rhos = np.minimum(ratio, args.rho_bar) if is_vtrace else np.ones_like(ratio)
    cs = args.vtrace_lambda * np.minimum(ratio, args.c_bar) if is_vtrace else np.ones_like(ratio)
    values, vs = call.values, call.values.copy()
    deltas = rhos * (rewards + discounts * values[1:] - values[:-1])
    for s in range(T):
        for t in range(s, T):
            vs[s] += np.prod(discounts[s:t] * cs[s:t], axis=0) * deltas[t]
    advantages = rhos * (rewards + discounts * vs[1:] - values[:-1])
    if args.correction == "one-step-is":
        advantages = advantages * np.minimum(ratio, args.rho_bar)
    logs = np.log(np.exp(logprobs) + 1e-6) if args.correction == "epsilon" else logprobs
    numbers = dict(policy_loss=-(logs * advantages).sum(), value_loss=((vs - values)[:-1] ** 2).sum() / 2)
    numbers["entropy"] = entropy(dist).sum()
    loss = numbers["policy_loss"] - args.ent_coef * numbers["entropy"] + args.vf_coef * numbers["value_loss"]
    numbers = {name: x / ratio.size for name, x in numbers.items()}  # logged per step
    numbers |= dict(rho=ratio.mean(), rho_clipped=(ratio > args.rho_bar).mean(), loss=loss)
    return numbers | dict(approx_kl=(ratio - 1 - logratio).mean())


def law_of_impala(run):
    for k, call in enumerate(run.losses):
        assert_close(call.loss, impala_numbers(run, k)["loss"], "loss")


# === NGU ===


def rescale(x, eps):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + eps * x


def unscale(x, eps):
    """By bisection: rescale() grows with x."""
    low, high = np.full_like(x, -1e6), np.full_like(x, 1e6)
    for _ in range(100):
        middle = (low + high) / 2
        is_below = rescale(middle, eps) < x
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return low


def ngu_targets(run, call, batch, rewards, gammas):
    """Targets (L, B) of the actions taken: n-step double Q, or Retrace; each by its definition as a sum."""
    args, (q, target_q) = run.args, call.q
    values = unscale(target_q, args.h_eps)
    discounts, ends, actions = gammas * batch["discounts"][1:], batch["ends"][1:], batch["last_actions"][1:]
    best, num_actions, targets = q.argmax(-1), q.shape[-1], np.zeros(rewards.shape)
    share = args.eval_epsilon
    pi = share / num_actions + (1 - share) * (np.arange(num_actions) == best[..., None])
    for b in range(rewards.shape[1]):
        for t in range(len(rewards)):
            if args.target == "nstep":
                discount = 1.0
                for k in range(t, len(rewards)):
                    targets[t, b] += discount * rewards[k, b]
                    discount *= discounts[k, b]
                    if k == t + args.n_step - 1 or ends[k, b] or k == len(rewards) - 1:
                        targets[t, b] += discount * values[k + 1, b, best[k + 1, b]]
                        break
            else:
                trace, targets[t, b] = 1.0, values[t, b, actions[t, b]]
                for k in range(t, len(rewards)):
                    expected = (pi[k + 1, b] * values[k + 1, b]).sum()
                    delta = rewards[k, b] + discounts[k, b] * expected - values[k, b, actions[k, b]]
                    targets[t, b] += trace * delta
                    if ends[k, b] or k == len(rewards) - 1:
                        break
                    weight = min(1, pi[k + 1, b, actions[k + 1, b]] / batch["mu"][k + 2, b])
                    trace *= discounts[k, b] * args.retrace_lambda * weight
    return rescale(targets, args.h_eps)


def ngu_numbers(run, k: int) -> dict:
    """Loss of the k-th call, priorities, and what is logged."""
    args, call = run.args, run.losses[k]
    batch = {name: x.numpy() for name, x in call.batch.items()}
    betas, gammas = family(args)[:, batch["policies"][0]]
    mask, alpha = batch["mask"], np.maximum(batch["alpha"][1:].astype(np.float64), 1)
    novelty = batch["r_int"][1:] / alpha
    seen = novelty[mask]
    deviation = seen.std(ddof=1) if len(seen) > 1 else 1
    bonus = {"min-max": (novelty - seen.min()) / (seen.max() - seen.min() + 1e-8)}
    bonus |= {"batch-mean": novelty / (seen.mean() + 1e-8), "unit-std": novelty / (deviation + 1e-8)}
    bonus |= {"zero-mean": (novelty - seen.mean()) / (deviation + 1e-8)}
    r_int = bonus.get(args.bonus, novelty) * alpha
    targets = ngu_targets(run, call, batch, batch["rewards"][1:] + betas * r_int, gammas)
    taken = np.take_along_axis(call.q[0][:-1], batch["last_actions"][1:, :, None], -1)[..., 0]
    errors = np.where(mask, targets - taken, 0)
    eta, steps = args.priority_eta, np.maximum(mask.sum(0), 1)
    numbers = dict(priorities=eta * np.abs(errors).max(0) + (1 - eta) * np.abs(errors).sum(0) / steps)
    numbers["loss"] = (batch["weights"] * (errors**2).sum(0) / 2).mean()
    numbers |= dict(td_loss=(errors**2).sum() / 2 / mask.sum(), q=taken[mask].mean())
    return numbers | dict(target=targets[mask].mean(), intrinsic_reward=r_int[mask].mean())


def family(args) -> np.ndarray:
    """Weights and discounts (2, policies), appendix A of NGU; two policies have 0 and beta."""
    N, betas = args.num_policies, []
    for i in range(N):
        is_last = i == N - 1
        betas.append(
            args.beta if is_last else args.beta / (1 + np.exp(-10 * (2 * i - (N - 2)) / max(N - 2, 1)))
        )
        betas[-1] *= is_last or i > 0
    share = np.arange(N) / max(N - 1, 1)
    gammas = 1 - np.exp((1 - share) * np.log(1 - args.gamma_max) + share * np.log(1 - args.gamma_min))
    return np.array((betas, gammas))


def law_of_ngu(run):
    for k, call in enumerate(run.losses):
        numbers = ngu_numbers(run, k)
        assert_close(call.loss, numbers["loss"], "loss", 1e-3)
        assert_close(call.priorities, numbers["priorities"], "priorities", 1e-3)


def law_of_sequences(run):
    """Which steps are trained on, and what the last reward of an episode that is not zero counts."""
    args = run.args
    for call in run.losses:
        batch = {name: x.numpy() for name, x in call.batch.items()}
        assert batch["r_ext"].shape == (args.burn_in + args.unroll + 1, args.batch_sequences)
        for b, length in enumerate(batch["lengths"]):
            first = 0 if batch["starts"][0, b] else args.burn_in
            trained = [first <= t < length for t in range(args.burn_in + args.unroll)]
            np.testing.assert_array_equal(batch["mask"][:, b], trained)
            rewards, found = batch["r_ext"][:, b].copy(), batch["r_ext"][:, b].nonzero()[0]
            if len(found) and batch["ends"][:, b].any():
                rewards[found[-1]] *= args.last_reward_weight
            assert_close(batch["rewards"][:, b], rewards, "rewards")


def law_of_exploration(run):
    """Shares of random actions, from epsilon to its 8th power, give the probabilities of actions."""
    args, num_actions = run.args, 3
    ladder = args.epsilon ** (1 + 7 * np.arange(args.num_envs) / max(args.num_envs - 1, 1))
    allowed = np.concatenate((ladder / num_actions, ladder / num_actions + 1 - ladder))
    for call in run.losses:
        found = call.batch["mu"].numpy()
        found = found[found > 0]
        assert np.isclose(found[:, None], allowed, rtol=1e-5).any(1).all()


PPO_IN_STEP = (law_of_environments, law_of_batches, law_of_ppo, law_of_adam)
LAWS = {
    **dict.fromkeys(("ppo", "ppo_shared", "ppo_atari", "ppo_lstm"), PPO_IN_STEP),
    **dict.fromkeys(("ppo_continuous", "ppo_multidiscrete"), PPO_IN_STEP),
    "ppo_async": PPO_IN_STEP,
    "impala_vtrace": (law_of_environments, law_of_unrolls, law_of_impala, law_of_optimizer),
    "ngu_r2d2": (law_of_environments, law_of_sequences, law_of_ngu, law_of_adam, law_of_exploration),
}


def check(run):
    for law in (law_of_heartbeats, *LAWS[run.script.SCRIPT]):
        law(run)
