"""Policies of all scripts by the numbers in a checkpoint: in NumPy and float64, LSTMs in loops over steps.

stream: what an environment showed and was given from its first step on, arrays (T, ...): obs, actions,
rewards (raw), starts (true where the agent begins an episode), and masks where it has such.
"""

import re

import numpy as np
import torch
from scipy.special import expit as sigmoid
from scipy.special import softmax
from scipy.stats import norm


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def relu(x):
    return np.maximum(x, 0)


def layers(weights, name):
    """Numbers of the layers of a torch.nn.Sequential."""
    return sorted({int(key.split(".")[1]) for key in weights if re.match(rf"{name}\.\d", key)})


def mlp(weights, name, x, activation=np.tanh, is_last=True):
    """Layers one after another, an activation between them, and behind the last if others come then."""
    for i in layers(weights, name):
        x = linear(weights, f"{name}.{i}", x)
        x = x if is_last and i == layers(weights, name)[-1] else activation(x)
    return x


def convolutions(weights, name, images):
    """Features of pixels (T, C, 84, 84): convolutions, flattened, and a layer, each followed by a ReLU."""
    x = torch.as_tensor(images).float() / 255
    for i in layers(weights, name):
        weight, bias = (torch.as_tensor(weights[f"{name}.{i}.{part}"]).float() for part in ("weight", "bias"))
        if weight.ndim == 4:
            stride = {8: 4, 4: 2, 3: 1}[weight.shape[-1]]  # of the networks for Atari since DQN
            x = torch.nn.functional.conv2d(x, weight, bias, stride).relu()
        else:
            x = torch.nn.functional.linear(x.flatten(1), weight, bias).relu()
    return x.double().numpy()


def lstm(weights, inputs, starts):
    """Outputs (T, size); the state is zero where an episode begins, and is carried on elsewhere."""
    outputs = []
    for x, begins in zip(inputs, starts, strict=True):
        if begins:
            hidden = cell = np.zeros(weights["lstm.weight_hh_l0"].shape[1])
        gates = weights["lstm.weight_ih_l0"] @ x + weights["lstm.bias_ih_l0"]
        gates = gates + weights["lstm.weight_hh_l0"] @ hidden + weights["lstm.bias_hh_l0"]
        i, f, g, o = np.split(gates, 4)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        outputs.append(hidden)
    return np.stack(outputs)


def one_hot(x, size):
    return np.eye(size)[x]


def before(x):
    """What was one step earlier; 0 at first."""
    return np.concatenate((np.zeros_like(x[:1]), x[:-1]))


def features(weights, stream, name="network", activation=np.tanh):
    if stream["obs"].ndim == 4:
        return convolutions(weights, name, stream["obs"])
    return mlp(weights, name, stream["obs"], activation, is_last=False)


def separate(weights, stream):
    """Logits (T, A) of a policy with a network of its own."""
    return mlp(weights, "actor", stream["obs"])


def shared(weights, stream):
    """Logits (T, A) of a policy that is a layer on features."""
    return linear(weights, "actor", features(weights, stream))


def recurrent(weights, stream):
    """Logits (T, A) of a policy that is a layer on an LSTM's outputs."""
    return linear(weights, "actor", lstm(weights, features(weights, stream), stream["starts"]))


def impala(weights, stream):
    """Logits (T, A). The LSTM also sees the last action and reward (clipped), beyond an episode's end too."""
    actions = one_hot(before(stream["actions"]), len(weights["actor.bias"]))
    rewards = before(stream["rewards"]).clip(-1, 1)[:, None]
    x = np.concatenate((features(weights, stream), actions, rewards), -1)
    return linear(weights, "actor", lstm(weights, x, stream["starts"]))


def normalized(statistics, obs):
    mean, var, _ = statistics[:, :-1]  # the last column is of the returns
    return ((obs - mean) / np.sqrt(var + 1e-8)).clip(-10, 10)


def gaussian(weights, stream, edges):
    """Probabilities (T, K, n) of intervals of each of K actions between edges (K, n - 1)."""
    mean = mlp(weights, "actor", normalized(weights["_extra_state"], stream["obs"]))
    cumulated = norm.cdf((edges - mean[..., None]) / np.exp(weights["log_std"])[:, None])
    return np.diff(np.pad(cumulated, ((0, 0), (0, 0), (1, 1)), constant_values=(0, 1)))


def multi(weights, stream, nvec, is_normalized):
    """Probabilities (T, K, max(nvec)) of the choices of each component; what a mask forbids has none."""
    obs = normalized(weights["_extra_state"], stream["obs"]) if is_normalized else stream["obs"]
    logits = np.where(stream["masks"], mlp(weights, "actor", obs), -np.inf)
    probabilities = np.zeros((len(obs), len(nvec), max(nvec)))
    for k, part in enumerate(np.split(logits, np.cumsum(nvec)[:-1], axis=1)):
        probabilities[:, k, : nvec[k]] = softmax(part, -1)
    return probabilities


def advantages(weights, stream, r_int):
    """Advantages (T, A) of the first policy, by a recurrent dueling network of all policies."""
    goes_on = ~stream["starts"]  # action 0 and rewards of 0 led to a first observation
    actions = one_hot(before(stream["actions"]) * goes_on, len(weights["advantage.2.bias"]))
    r_ext = before(stream["rewards"]) * goes_on
    rewards = np.stack((np.sign(r_ext) * np.log1p(np.abs(r_ext)), r_int), -1)
    seen = np.concatenate((features(weights, stream, "encoder", relu), actions, rewards), -1)
    num_policies = weights["lstm.weight_ih_l0"].shape[1] - seen.shape[1]
    policies = one_hot(np.zeros(len(actions), int), num_policies)
    x = lstm(weights, np.concatenate((seen, policies), -1), stream["starts"])
    return mlp(weights, "advantage", x, relu)


def epsilon_greedy(advantages, epsilon):
    num_actions = advantages.shape[-1]
    return epsilon / num_actions + (1 - epsilon) * one_hot(advantages.argmax(-1), num_actions)


def intrinsic_rewards(weights, stream, args):
    """Novelty (T,) of each observation within its episode, times its life-long novelty; algorithm 1 of NGU.

    All statistics are those of the checkpoint. The first observation of an episode is worth nothing.
    """
    rewards, (total, count) = [], weights["acting_embedding.distances"]
    embedded = mlp(weights, "acting_embedding", stream["obs"], relu, is_last=False)
    usual = 1 / (np.sqrt(args.neighbors * args.kernel_eps / (1 - 0.008 + args.kernel_eps)) + 0.001)
    white = stream["obs"] - weights["whitening.mean"][0]
    white = (white / np.sqrt(weights["whitening.var"][0] + 1e-8)).clip(-5, 5)
    predicted, target = (mlp(weights, f"rnd_{name}", white, relu) for name in ("predictor", "target"))
    errors = ((predicted - target) ** 2).mean(-1)
    alpha = 1 + (errors - weights["errors.mean"]) / np.sqrt(weights["errors.var"])
    alpha = alpha.clip(1, args.rnd_max)
    for t, begins in enumerate(stream["starts"]):
        if begins:
            memory, reward = [embedded[t]], 0.0
        else:
            nearest = sorted(((embedded[t] - x) ** 2).sum() for x in memory)[: args.neighbors]
            distances = np.maximum(np.array(nearest) / (total / count) - 0.008, 0)
            kernel = args.kernel_eps / (distances + args.kernel_eps)
            similarity = np.sqrt(kernel.mean() * args.neighbors) + 0.001  # as if all neighbors were there
            novelty = 1 / similarity if similarity <= 8 else 0
            reward = min(novelty / usual, 1) * alpha[t]  # choice 2: what is as far as usual is worth 1
            memory.append(embedded[t])
        rewards.append(reward)
    return np.array(rewards)
