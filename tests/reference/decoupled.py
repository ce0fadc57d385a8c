"""What both decoupled algorithms share: traces, networks, and who acts when actors and learner take turns.

A trace has lists with an entry for each step t of one environment: obs[t] (what was acted upon), actions[t],
rewards[t], terminated[t], truncated[t] and last_obs[t] (what the step led to, before a reset). obs has one
more, which is yet to be acted upon. Weights are arrays by name, in the order in which the layers stand.
"""

import torch
from torch.nn import functional as F


def ended(trace, t):
    return trace.terminated[t] or trace.truncated[t]


def was_cut(trace, t):
    """By a time limit, so that there is a value beyond."""
    return trace.truncated[t] and not trace.terminated[t]


def episodes(trace):
    """(last step, return, length) of each episode; of games, which go on after a lost life, whole games."""
    if hasattr(trace, "games"):
        return trace.games
    total, length, found = 0.0, 0, []
    for t, reward in enumerate(trace.rewards):
        total, length = total + reward, length + 1
        if ended(trace, t):
            found.append((t, total, length))
            total, length = 0.0, 0
    return found


def leaves(weights):
    return {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in weights.items()}


def layers(weights, beginning):
    """(weight, bias) of the layers whose names begin so."""
    found = [x for name, x in weights.items() if name.startswith(beginning)]
    return list(zip(found[::2], found[1::2], strict=True))


def perceptron(layers, x, last_is_tanh=True):
    for k, (weight, bias) in enumerate(layers):
        x = x @ weight.T + bias
        x = x.tanh() if last_is_tanh or k + 1 < len(layers) else x
    return x


class Decisions:
    """ReLU and pooling, which decide as the script did, if that is given, where a decision is close.

    Of the millions of an update, some are so close that float32 and float64 differ, and each of them moves
    the gradient: by up to 7 % of an update's change in one array, and Adam's moments remember it.
    """

    def __init__(self, made=None):
        """made: where each ReLU lets through, and which pixel each pooling takes, in their order."""
        self.made = None if made is None else iter(made)

    def relu(self, x):
        if self.made is None:
            return x.relu()
        passes = next(self.made)
        assert (x[(x > 0) != passes].abs() < 1e-5).all(), "a ReLU decided otherwise, and it was not close"
        return x * passes

    def pool(self, x):
        highest = F.max_pool2d(x, 3, stride=2, padding=1)
        if self.made is None:
            return highest
        taken = next(self.made)
        pooled = x.flatten(2).gather(2, taken.flatten(2)).view_as(taken)
        assert (highest - pooled < 1e-5).all(), "pooling took another pixel, and it was not close"
        return pooled


def convolve(layers, obs, strides, made=None):
    """Convolutions with ReLU after each, then one full layer with ReLU; of images of bytes (n, C, H, W)."""
    x, decide = torch.tensor(obs / 255.0), Decisions(made)
    for (weight, bias), stride in zip(layers[:-1], strides, strict=True):
        x = decide.relu(F.conv2d(x, weight, bias, stride=stride))
    weight, bias = layers[-1]
    return decide.relu(x.flatten(1) @ weight.T + bias)


def residual_network(layers, obs, made=None):
    """Three times: convolution, pooling, two residual blocks of two convolutions. Figure 3, right."""
    x, layers, decide = torch.tensor(obs / 255.0), iter(layers), Decisions(made)
    for _ in range(3):
        x = decide.pool(F.conv2d(x, *next(layers), padding=1))
        for _ in range(2):
            inner = F.conv2d(decide.relu(x), *next(layers), padding=1)
            x = x + F.conv2d(decide.relu(inner), *next(layers), padding=1)
    weight, bias = next(layers)
    return decide.relu(decide.relu(x).flatten(1) @ weight.T + bias)


class InTurn:
    """Actors in turn, two groups of environments each; a batch takes groups first in, first out."""

    def __init__(self, num_actors, group_size, num_steps):
        self.num_actors, self.group_size, self.num_steps = num_actors, group_size, num_steps
        self.turns, self.waiting = 0, []

    def collect(self, num_groups, version):
        """(environment, first step, version that acted) of the segments of a batch."""
        while len(self.waiting) < num_groups:
            lap, actor = divmod(self.turns, self.num_actors)
            self.waiting += [(2 * actor + k, lap * self.num_steps, version) for k in range(2)]
            self.turns += 1
        batch, self.waiting = self.waiting[:num_groups], self.waiting[num_groups:]
        N = self.group_size
        return [(n, begin, made) for group, begin, made in batch for n in range(group * N, group * N + N)]
