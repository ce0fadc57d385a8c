"""IMPALA (Espeholt et al. 2018) as loops over single steps of single environments, in float64.

Each segment is T steps of one environment by one version of the agent. V-trace is the sum of equation 1, not
its recursion; the LSTM is its gates; only the gradient of the loss is left to autograd.
"""

from dataclasses import dataclass

import numpy as np
import torch
from reference.decoupled import convolve, ended, layers, leaves, perceptron, residual_network, was_cut


@dataclass
class Segment:
    trace: object
    begin: int  # its first step in the trace
    version: int  # updates behind the weights that acted
    state: tuple  # of the LSTM before the first step
    logprobs: list  # of the actions, under the policy that acted


class Impala:
    def __init__(self, args, weights, traces, num_updates):
        self.args, self.traces, self.num_updates = args, traces, num_updates
        self.weights = [weights]  # of each version
        self.square_avg = {name: np.ones_like(x) for name, x in weights.items()}  # RMSProp's
        self.m, self.v = {}, {}  # Adam's
        size = weights["lstm.weight_hh_l0"].shape[1] if args.lstm else 0
        self.states = {trace.number: (torch.zeros(size).double(),) * 2 for trace in traces}  # to act on with
        self.acted = {trace.number: 0 for trace in traces}  # steps

    # the agent: one row of one environment at a time

    def row(self, trace, t):
        """Observation, what led to it (action, reward), and whether it begins an episode."""
        if t == 0:
            return trace.obs[0], 0, 0.0, True
        return trace.obs[t], trace.actions[t - 1], trace.rewards[t - 1], ended(trace, t - 1)

    def look(self, weights, row, state, made=None):
        """Log-probabilities of all actions, the value, and the state after the row.

        made: the script's Decisions, of one row.
        """
        obs, last_action, last_reward, begins = row
        network = layers(weights, "network")
        if obs.ndim == 1:
            x = perceptron(network, torch.tensor(obs.astype(np.float64)))
        elif self.args.network == "deep":
            x = residual_network(network, obs[None], made)[0]
        else:
            x = convolve(network, obs[None], (4, 2), made)[0]
        if self.args.lstm:
            one_hot = [float(a == last_action) for a in range(len(weights["actor.bias"]))]
            clipped = min(1.0, max(-1.0, last_reward))
            x = torch.cat((x, torch.tensor([*one_hot, clipped]).double()))
            h, c = (torch.zeros_like(s) for s in state) if begins else state
            of_input, of_hidden, bias_input, bias_hidden = (weights[k] for k in weights if "lstm" in k)
            gates = of_input @ x + bias_input + of_hidden @ h + bias_hidden
            enter, forget, content, leave = gates.chunk(4)
            c = forget.sigmoid() * c + enter.sigmoid() * content.tanh()
            h = leave.sigmoid() * c.tanh()
            x, state = h, (h, c)
        logits = weights["actor.weight"] @ x + weights["actor.bias"]
        value = (weights["critic.weight"] @ x + weights["critic.bias"])[0]
        return logits - logits.exp().sum().log(), value, state

    def act(self, number, begin, version):
        """The segment that starts there, as the weights of a version have made it."""
        assert begin == self.acted[number], "a segment is missing, or is there twice"
        trace, T = self.traces[number], self.args.num_steps
        segment = Segment(trace, begin, version, self.states[number], [])
        weights = {name: torch.tensor(x) for name, x in self.weights[version].items()}
        state = segment.state
        for t in range(begin, begin + T):
            logprobs, _, state = self.look(weights, self.row(trace, t), state)
            segment.logprobs.append(logprobs)
        self.states[number], self.acted[number] = state, begin + T
        return segment

    # the learner

    def reward(self, raw):
        return min(1.0, max(-1.0, raw)) if self.args.rewards == "clip" else raw

    def trajectory(self, weights, segment, made):
        """Of the T steps: log-probabilities of all actions, rewards, discounts; and T + 1 values.

        made: the script's Decisions, each of T + 1 rows.
        """
        trace, state = segment.trace, segment.state
        logprobs, values, rewards, discounts = [], [], [], []
        for t in range(segment.begin, segment.begin + self.args.num_steps + 1):
            of_row = [x[len(values)][None] for x in made]
            logprob, value, state = self.look(weights, self.row(trace, t), state, of_row)
            values.append(value)
            if t == segment.begin + self.args.num_steps:
                return logprobs, rewards, discounts, values
            reward = self.reward(trace.rewards[t])
            if was_cut(trace, t) and self.args.bootstrap_truncated:
                beyond = trace.last_obs[t], trace.actions[t], trace.rewards[t], False
                reward += self.args.gamma * self.look(weights, beyond, state)[1].item()
            logprobs.append(logprob)
            rewards.append(reward)
            discounts.append(0.0 if ended(trace, t) else self.args.gamma)

    def targets(self, ratios, rewards, discounts, values):
        """v_s by equation 1, with the traces of remark 2, and the advantages of section 4.2."""
        T, args = len(ratios), self.args
        if args.correction == "vtrace":
            rho = [min(args.rho_bar, x) for x in ratios]
            c = [args.vtrace_lambda * min(args.c_bar, x) for x in ratios]
        else:
            rho = c = [1.0] * T
        deltas = [rho[t] * (rewards[t] + discounts[t] * values[t + 1] - values[t]) for t in range(T)]
        vs = []
        for s in range(T):
            v = values[s]
            for t in range(s, T):
                weight = 1.0
                for i in range(s, t):
                    weight *= discounts[i] * c[i]
                v += weight * deltas[t]
            vs.append(v)
        vs.append(values[T])
        advantages = [rho[s] * (rewards[s] + discounts[s] * vs[s + 1] - values[s]) for s in range(T)]
        if args.correction == "one-step-is":
            advantages = [min(args.rho_bar, x) * a for x, a in zip(ratios, advantages, strict=True)]
        return vs[:T], advantages

    def learn(self, segments, made):
        """An update on segments. Returns what is logged, by name, and the targets of each segment.

        made: the script's Decisions, each of the T + 1 rows of all segments, (T + 1) * B.
        """
        args, weights = self.args, leaves(self.weights[-1])
        policy_loss = value_loss = entropy = 0.0
        all_ratios, all_targets = [], []
        for b, segment in enumerate(segments):
            of_segment = [x[b :: len(segments)] for x in made]
            logprobs, rewards, discounts, values = self.trajectory(weights, segment, of_segment)
            taken = segment.trace.actions[segment.begin : segment.begin + args.num_steps]
            behavior = [segment.logprobs[t][a].item() for t, a in enumerate(taken)]
            ratios = [np.exp(logprobs[t][a].item() - behavior[t]) for t, a in enumerate(taken)]
            vs, advantages = self.targets(ratios, rewards, discounts, [v.item() for v in values])
            for t, a in enumerate(taken):
                logprob = logprobs[t][a]
                if args.correction == "epsilon":
                    logprob = (logprob.exp() + 1e-6).log()
                policy_loss -= logprob * advantages[t]
                value_loss += 0.5 * (vs[t] - values[t]) ** 2
                entropy -= sum(x.exp() * x for x in logprobs[t])
            all_ratios += ratios
            all_targets.append(vs)
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
        loss.backward()
        self.descend({name: x.grad.numpy() for name, x in weights.items()})
        ratios = np.array(all_ratios)
        losses = dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        losses = {name: x.item() / len(ratios) for name, x in losses.items()}  # per step
        losses |= dict(rho=ratios.mean(), rho_clipped=(ratios > args.rho_bar).mean())
        losses |= dict(approx_kl=(ratios - 1 - np.log(ratios)).mean())
        losses = {f"losses/{name}": x for name, x in losses.items()} | {"losses/grad_norm": self.norm}
        return losses | {"charts/learning_rate": self.lr}, all_targets

    def descend(self, gradients):
        """Clipping of the global norm; Adam, or RMSProp with epsilon inside the root; learning rate to 0."""
        args, version = self.args, len(self.weights) - 1
        self.norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        shrink = min(1.0, args.max_grad_norm / self.norm)
        self.lr = args.learning_rate * (1 - version / self.num_updates if args.anneal_lr else 1)
        new, count = {}, version + 1
        for name, gradient in gradients.items():
            g = shrink * gradient
            if args.optimizer == "adam":
                self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
                self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g**2
                m, v = self.m[name] / (1 - 0.9**count), self.v[name] / (1 - 0.999**count)
                change = m / (np.sqrt(v) + 1e-5)
            else:
                d = args.rmsprop_decay
                self.square_avg[name] = d * self.square_avg[name] + (1 - d) * g**2
                change = g / np.sqrt(self.square_avg[name] + args.rmsprop_eps)
            new[name] = self.weights[-1][name] - self.lr * change
        self.weights.append(new)
