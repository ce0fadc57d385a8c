"""Off-policy PPO (Berner et al. 2019; Schulman et al. 2017) sample by sample, in float64.

A segment is T steps of one environment by one version. GAE is the sum of its definition, not its recursion,
and Adam is written out; only the gradient of the loss is left to autograd.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from reference.decoupled import convolve, ended, layers, leaves, perceptron, was_cut


@dataclass
class Segment:
    trace: object
    begin: int  # its first step in the trace
    version: int  # updates behind the weights that acted
    logprobs: list  # of all actions, under the policy that acted
    values: list  # T + 1, by the weights that acted


class OffPolicyPPO:
    def __init__(self, args, weights, traces, num_iterations, reward=lambda raw: raw):
        self.args, self.traces, self.num_iterations, self.reward = args, traces, num_iterations, reward
        self.weights = [weights]  # before each gradient step
        self.versions = [0]  # gradient steps behind each version
        self.m = {name: np.zeros_like(x) for name, x in weights.items()}
        self.v = {name: np.zeros_like(x) for name, x in weights.items()}

    @property
    def version(self):
        """Updates that took place."""
        return len(self.versions) - 1

    def look(self, weights, observations, made=None):
        """(log-probabilities of all actions, value) of each observation. made: the script's Decisions."""
        obs = np.stack(observations)
        x = torch.tensor(obs.astype(np.float64))
        if obs.ndim > 2:
            x = convolve(layers(weights, "network"), obs, (4, 2, 1), made)
        logits = perceptron(layers(weights, "actor"), x, last_is_tanh=False)
        values = perceptron(layers(weights, "critic"), x, last_is_tanh=False)
        return [(z - z.exp().sum().log(), v) for z, v in zip(logits, values[:, 0], strict=True)]

    def without_gradient(self, observations, step=-1):
        """The same by the weights after so many gradient steps."""
        weights = {name: torch.tensor(x) for name, x in self.weights[step].items()}
        return [(logprobs, value.item()) for logprobs, value in self.look(weights, observations)]

    def act(self, number, begin, version):
        """The segment that starts there, as the weights of a version have made it."""
        trace, end = self.traces[number], begin + self.args.num_steps
        seen = self.without_gradient(trace.obs[begin : end + 1], self.versions[version])
        return Segment(trace, begin, version, [x for x, _ in seen[:-1]], [value for _, value in seen])

    @property
    def lr(self):
        """Of the next update: only updates that took place are progress."""
        return self.args.learning_rate * (self.remaining if self.args.anneal_lr else 1)

    @property
    def remaining(self):
        return 1 - self.version / self.num_iterations

    def is_kept(self, made):
        return self.args.max_staleness is None or self.version - made <= self.args.max_staleness

    def advantages(self, segment):
        """A_t, the sum of (gamma lambda)^l delta_{t+l} up to the end of the episode or the segment."""
        args, trace, begin, values = self.args, segment.trace, segment.begin, segment.values
        deltas, advantages = [], []
        for t in range(args.num_steps):
            beyond = 0.0 if ended(trace, begin + t) else values[t + 1]
            if was_cut(trace, begin + t) and args.bootstrap_truncated:
                beyond = self.without_gradient([trace.last_obs[begin + t]])[0][1]
            deltas.append(self.reward(trace.rewards[begin + t]) + args.gamma * beyond - values[t])
        for t in range(args.num_steps):
            total = 0.0
            for later in range(t, args.num_steps):
                total += (args.gamma * args.gae_lambda) ** (later - t) * deltas[later]
                if ended(trace, begin + later):
                    break
            advantages.append(total)
        return advantages, values[:-1]

    def samples(self, segments):
        """{(environment, step): what is known of the sample}."""
        found = {}
        for segment in segments:
            advantages, values = self.advantages(segment)
            recent = self.without_gradient(segment.trace.obs[segment.begin :][: self.args.num_steps])
            for k in range(self.args.num_steps):
                t, action = segment.begin + k, segment.trace.actions[segment.begin + k]
                found[segment.trace.number, t] = dict(
                    obs=segment.trace.obs[t],
                    action=action,
                    logprob=segment.logprobs[k][action].item(),
                    recent=recent[k][0][action].item(),
                    value=values[k],
                    advantage=advantages[k],
                    target=advantages[k] + values[k],
                    staleness=self.version - segment.version,
                )
        return found

    def learn(self, samples, minibatches, decisions):
        """Passes over the samples. minibatches: an iterator over lists of the names of samples, in order.

        decisions: an iterator over what the script decided in each minibatch (Decisions).

        Returns what is logged, and the names that each pass took.
        """
        args = self.args
        clip = args.clip_coef * (self.remaining if args.anneal_clip else 1)
        passes, ages, clipped = [], [], []
        for _ in range(math.ceil(args.sample_reuse)):
            passes.append([next(minibatches) for _ in range(args.num_minibatches)])
            for names in passes[-1]:
                minibatch = [samples[name] for name in names]
                losses, outside = self.step(minibatch, clip, next(decisions))
                ages += [sample["staleness"] for sample in minibatch]
                clipped += outside
            if args.target_kl is not None and losses["losses/approx_kl"] > args.target_kl:
                break
        self.versions.append(len(self.weights) - 1)
        ages, clipped = np.array(ages), np.array(clipped)
        losses |= {"staleness/mean": ages.mean(), "staleness/max": ages.max()}
        for age in set(ages.tolist()):
            losses[f"staleness/clipfrac_{age}"] = clipped[ages == age].mean()
        advantages, targets = (
            np.array([x[key] for x in samples.values()]) for key in ("advantage", "target")
        )
        losses["losses/clipfrac"] = clipped.mean()
        losses["losses/explained_variance"] = 1 - advantages.var() / targets.var()
        losses["charts/sample_reuse"] = len(ages) / (args.batch_segments * args.num_steps)
        return losses, passes

    def step(self, minibatch, clip, made):
        """A gradient step. Returns the losses and whether each sample was outside of the clip range."""
        args, weights, size = self.args, leaves(self.weights[-1]), len(minibatch)
        advantages = np.array([sample["advantage"] for sample in minibatch])
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
        policy_loss = value_loss = entropy = old_kl = kl = behavior_kl = 0.0
        outside = []
        looks = self.look(weights, [sample["obs"] for sample in minibatch], made)
        for sample, advantage, (logprobs, value) in zip(minibatch, advantages, looks, strict=True):
            center = sample["recent"] if args.decoupled else sample["logprob"]
            weight = np.exp(center - sample["logprob"])  # from the policy that acted to the clip's center
            logratio = logprobs[sample["action"]] - center
            ratio = logratio.exp()
            within = ratio.clamp(1 - clip, 1 + clip)
            policy_loss -= weight * torch.minimum(ratio * advantage, within * advantage) / size
            error = (value - sample["target"]) ** 2
            if args.clip_vloss:
                near = sample["value"] + (value - sample["value"]).clamp(-clip, clip)
                error = torch.maximum(error, (near - sample["target"]) ** 2)
            value_loss += 0.5 * error / size
            entropy -= (logprobs.exp() * logprobs).sum() / size
            outside.append(abs(ratio.item() - 1) > clip)
            old_kl -= logratio.item() / size
            kl += (ratio.item() - 1 - logratio.item()) / size
            behavior_kl += (weight - 1 - np.log(weight)) / size
        loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
        loss.backward()
        self.descend({name: x.grad.numpy() for name, x in weights.items()})
        losses = dict(policy_loss=policy_loss.item(), value_loss=value_loss.item(), entropy=entropy.item())
        losses |= dict(old_approx_kl=old_kl, approx_kl=kl, grad_norm=self.norm) | (
            dict(behavior_kl=behavior_kl) if args.decoupled else {}
        )
        return {f"losses/{name}": x for name, x in losses.items()}, outside

    def descend(self, gradients):
        """Clipping of the global norm, then Adam."""
        self.norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        shrink, count, new = min(1.0, self.args.max_grad_norm / self.norm), len(self.weights), {}
        for name, gradient in gradients.items():
            g = shrink * gradient
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
            m, v = self.m[name] / (1 - 0.9**count), self.v[name] / (1 - 0.999**count)
            new[name] = self.weights[-1][name] - self.lr * m / (np.sqrt(v) + 1e-5)
        self.weights.append(new)
