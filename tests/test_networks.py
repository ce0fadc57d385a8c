"""The networks of every script beside plain ones that are written here: shapes, first weights, and results.

A network is a list of layers. The reference takes the agent's parameters one after the other, so that no
layer, stride, activation or scaling can differ unseen.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import OTHERS, SCRIPTS, Dim

import ngu_r2d2

ALL = SCRIPTS | OTHERS
ROOT_2 = 2**0.5
DEFAULT = None  # PyTorch's own weights
TANH = [("linear", 64, ROOT_2), "tanh", ("linear", 64, ROOT_2), "tanh"]
NATURE = [("conv", 32, 8, 4, 0, ROOT_2), "relu", ("conv", 64, 4, 2, 0, ROOT_2), "relu"]
NATURE += [("conv", 64, 3, 1, 0, ROOT_2), "relu", "flatten"]
HIDDEN = [("linear", 512, ROOT_2), "relu"]
SHALLOW = [("conv", 16, 8, 4, 0, ROOT_2), "relu", ("conv", 32, 4, 2, 0, ROOT_2), "relu"]
SHALLOW += ["flatten", ("linear", 256, ROOT_2), "relu"]
DEEP = []
for width in (16, 32, 32):
    block = [
        "keep",
        "relu",
        ("conv", width, 3, 1, 1, DEFAULT),
        "relu",
        ("conv", width, 3, 1, 1, DEFAULT),
        "add",
    ]
    DEEP += [("conv", width, 3, 1, 1, DEFAULT), "pool", *block, *block]
DEEP += ["relu", "flatten", ("linear", 256, ROOT_2), "relu"]
BOARD = [("conv", 16, 3, 2, 0, ROOT_2), "relu", ("conv", 32, 2, 1, 0, ROOT_2), "relu", "flatten"]
BOARD += [("linear", 128, ROOT_2), "relu"]
GRID = [("conv", 16, 3, 1, 0, DEFAULT), "relu", ("conv", 32, 3, 1, 0, DEFAULT), "relu", "flatten"]


def check_weights(weight, bias, gain):
    """Orthogonal with this gain and zero biases, or uniform by the number of inputs."""
    rows, inputs = weight.flatten(1), weight[0].numel()
    if gain is DEFAULT:
        bound = inputs**-0.5
        assert rows.abs().max() <= bound * 1.001 and bias.abs().max() <= bound * 1.001
        assert rows.std().item() == pytest.approx(bound / 3**0.5, rel=0.2) and bias.abs().min() > 0
        return
    gram = rows @ rows.T if len(rows) <= inputs else rows.T @ rows
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-4, rtol=0)
    assert not bias.any()


def apply(layers, module, x):
    """What the layers make of x (n, ...) with the module's parameters, whose first values it checks."""
    parameters, kept = list(module.parameters()), None
    for layer in layers:
        name, *numbers = (layer,) if isinstance(layer, str) else layer
        if name in ("conv", "linear"):
            weight, bias, *parameters = parameters
            check_weights(weight.detach(), bias.detach(), numbers[-1])
            assert len(weight) == numbers[0]
        if name == "conv":
            _, kernel, stride, padding, _ = numbers
            assert weight.shape[2:] == (kernel, kernel)
            x = F.conv2d(x, weight, bias, stride=stride, padding=padding)
        elif name == "linear":
            x = x @ weight.T + bias
        elif name == "pool":  # the largest of 3 x 3 neighbours of every other pixel
            height, width = x.shape[2:]
            x = (
                F.unfold(F.pad(x, (1, 1, 1, 1), value=-1e9), 3, stride=2)
                .unflatten(1, (x.shape[1], 9))
                .amax(2)
            )
            x = x.unflatten(-1, ((height + 1) // 2, (width + 1) // 2))
        elif name == "keep":
            kept = x
        elif name == "add":
            x = x + kept
        else:
            x = dict(relu=F.relu, tanh=torch.tanh, flatten=torch.flatten)[name](x, *[1] * (name == "flatten"))
    assert not parameters
    return x


def lstm(module, x, state, starts):
    """Outputs (T, N, hidden) and state after inputs (T, N, n), by the equations of PyTorch's manual."""
    w, u, b, c = module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0
    (hidden, cell), outputs = state, []
    for step, is_start in zip(x, starts, strict=True):
        hidden, cell = (torch.where(is_start[:, None], 0, y) for y in (hidden, cell))
        i, f, g, o = (step @ w.T + b + hidden @ u.T + c).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs), torch.stack((hidden, cell))


def envs_like(shape, actions, dtype=np.float32):
    envs = Dim(shape, actions)
    high = 255 if dtype == np.uint8 else 1
    envs.single_observation_space, envs.num_envs = gym.spaces.Box(0, high, shape, dtype), 3
    return envs


def observations(envs, *size):
    space, rng = envs.single_observation_space, np.random.default_rng(1)
    x = rng.random((*size, *space.shape)) * (256 if space.dtype == np.uint8 else 1)
    return torch.from_numpy(x.astype(space.dtype))


def make(name, envs, **flags):
    """An agent with known weights."""
    torch.manual_seed(1)
    args = [ALL[name].Args(device="cpu", **flags)] if name in OTHERS else []
    return ALL[name].Agent(envs, *args)


def scaled(obs):
    """Pixels from 0 to 1."""
    return obs.float() / (255 if obs.dtype == torch.uint8 else 1)


def check_outputs(dist, value, logits, expected_value):
    """Policies by their log-probabilities. The heads' weights are small, so that differences are, too."""
    torch.testing.assert_close(dist.logprobs, logits.log_softmax(-1), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(value, expected_value[..., 0], atol=1e-5, rtol=1e-4)


DISCRETE, MULTI = gym.spaces.Discrete(5), gym.spaces.MultiDiscrete([3, 2])
BOX = gym.spaces.Box(-1, 1, (5,), np.float32)
GAME, PICTURE = ((4, 84, 84), np.uint8), ((2, 44, 60), np.float32)


def heads(agent, hidden, layers=()):
    """Logits and value (..., 1), each by layers of its own and a head."""
    logits = apply([*layers, ("linear", 5, 0.01)], agent.actor, hidden)
    return logits, apply([*layers, ("linear", 1, 1.0)], agent.critic, hidden)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous", "ppo_multidiscrete", "ppo_async"])
def test_separate_networks(name):
    actions = dict(ppo_continuous=BOX, ppo_multidiscrete=MULTI).get(name, DISCRETE)
    envs = envs_like((7,), actions)
    envs.statistics = np.zeros(0)
    agent, obs = make(name, envs), observations(envs, 6)
    logits, value = heads(agent, obs, TANH)
    if name == "ppo_continuous":
        dist, found = agent(obs)
        torch.testing.assert_close(dist.mean, logits, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found, value[:, 0], atol=1e-5, rtol=1e-4)
        assert dist.log_std.tolist() == [0] * 5
    elif name == "ppo_multidiscrete":
        check_components(agent, obs, logits, value)
    else:
        check_outputs(*agent(obs), logits, value)


def check_components(agent, obs, logits, value):
    """Every pair of choices has the product of its probabilities, as much of them as the mask leaves."""
    mask = torch.tensor([True, False, True, True, True])
    dist, found = agent(obs, mask.expand(len(obs), 5))
    first, second = logits[:, :3].masked_fill(~mask[:3], -1e8).log_softmax(-1), logits[:, 3:].log_softmax(-1)
    for i in (0, 2):
        for j in range(2):
            logprob = dist.log_prob(torch.tensor([[i, j]]).expand(len(obs), 2))
            torch.testing.assert_close(logprob, first[:, i] + second[:, j], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found, value[:, 0], atol=1e-5, rtol=1e-4)


def test_network_of_a_board():
    envs = envs_like((8, 9, 4), MULTI)
    agent, obs = make("ppo_multidiscrete", envs), observations(envs, 6)
    hidden = apply(BOARD, agent.network, obs.permute(0, 3, 1, 2))
    logits, value = heads(agent, hidden)
    check_components(agent, obs, logits, value)


SHARED = [("ppo_shared", TANH, ((7,), np.float32)), ("ppo_atari", [*NATURE, *HIDDEN], GAME)]
SHARED += [("ppo_async", [*NATURE, *HIDDEN], x) for x in (GAME, PICTURE)]


@pytest.mark.parametrize("name,layers,space", SHARED)
def test_shared_networks(name, layers, space):
    envs = envs_like(space[0], DISCRETE, space[1])
    agent, obs = make(name, envs), observations(envs, 3)
    hidden = apply(layers, agent.network, scaled(obs))
    logits, value = heads(agent, hidden)
    check_outputs(*agent(obs), logits, value)


@pytest.mark.parametrize(
    "layers,space", [(TANH, ((7,), np.float32)), ([*NATURE, *HIDDEN], ((1, 84, 84), np.uint8))]
)
def test_lstm_of_ppo(layers, space):
    envs = envs_like(space[0], DISCRETE, space[1])
    agent, obs, starts = make("ppo_lstm", envs), observations(envs, 4, 3), episodes(4)
    for weight in (agent.lstm.weight_ih_l0, agent.lstm.weight_hh_l0):
        check_weights(weight, agent.lstm.bias_ih_l0, 1.0)
    assert not agent.lstm.bias_hh_l0.any()
    x = apply(layers, agent.network, scaled(obs.flatten(0, 1))).unflatten(0, (4, 3))
    state = torch.randn(2, 3, 128)
    hidden, after = lstm(agent.lstm, x, state, starts)
    logits, value = heads(agent, hidden)
    *found, found_after = agent(obs, state, starts)
    check_outputs(*found, logits, value)
    torch.testing.assert_close(found_after, after, atol=1e-5, rtol=1e-4)


def episodes(T):
    """Starts (T, 3) of episodes: none, at once, and in the middle."""
    starts = torch.zeros(T, 3, dtype=torch.bool)
    starts[0, 1] = starts[T // 2, 2] = True
    return starts


def rows_of(obs, starts, **more):
    """What led to observations (T, 3, ...): actions, and rewards of which some are large."""
    rng, shape = np.random.default_rng(2), starts.shape
    rows = dict(obs=obs, starts=starts, last_actions=torch.from_numpy(rng.integers(5, size=shape)))
    return rows | {name: torch.from_numpy(3 * rng.normal(size=shape).astype(np.float32)) for name in more}


FIGURE_3 = [("shallow", TANH, ((7,), np.float32)), ("shallow", SHALLOW, GAME), ("shallow", SHALLOW, PICTURE)]
FIGURE_3 += [("deep", DEEP, GAME), ("deep", DEEP, PICTURE)]


@pytest.mark.parametrize("has_lstm", [False, True])
@pytest.mark.parametrize("network,layers,space", FIGURE_3)
def test_networks_of_impala(network, layers, space, has_lstm):
    envs = envs_like(space[0], DISCRETE, space[1])
    agent = make("impala_vtrace", envs, network=network, lstm=has_lstm)
    starts = episodes(4)
    rows = rows_of(observations(envs, 4, 3), starts, last_rewards=0)
    hidden = apply(layers, agent.network, scaled(rows["obs"].flatten(0, 1))).unflatten(0, (4, 3))
    size = hidden.shape[-1] if has_lstm else 0
    assert agent.initial_state(3).shape == (2, 3, size) and not agent.initial_state(3).any()
    state = after = torch.randn(2, 3, size)
    if has_lstm:
        x = (hidden, F.one_hot(rows["last_actions"], 5), rows["last_rewards"].clip(-1, 1)[..., None])
        hidden, after = lstm(agent.lstm, torch.cat(x, -1), state, starts)
    logits, value = heads(agent, hidden)
    *found, found_after = agent(rows, state)
    check_outputs(*found, logits, value)
    torch.testing.assert_close(found_after, after, atol=1e-5, rtol=1e-4)


def things(obs):
    """A channel for each of eleven things in each channel of a grid."""
    one_hot = F.one_hot(obs.clip(max=10).long(), 11)  # (n, channels, height, width, 11)
    return one_hot.permute(0, 1, 4, 2, 3).flatten(1, 2).float()


ENCODERS = [([("linear", 64, DEFAULT), "relu"], ((7,), np.float32), scaled), (NATURE, GAME, scaled)]
ENCODERS += [
    (GRID, ((2, 9, 7), np.uint8), things),
    (GRID, ((2, 9, 7), np.float32), scaled),
    (NATURE, PICTURE, scaled),
]


@pytest.mark.parametrize("squash_reward", [True, False])
@pytest.mark.parametrize("layers,space,see", ENCODERS)
def test_networks_of_ngu(layers, space, see, squash_reward):
    envs = envs_like(space[0], DISCRETE, space[1])
    flags = dict(hidden_size=24, num_policies=3, squash_reward=squash_reward)
    agent = make("ngu_r2d2", envs, **flags)
    starts = episodes(4) & (torch.arange(4) == 0)[:, None]  # episodes begin in the first row alone
    rows, state = rows_of(observations(envs, 4, 3), starts, r_ext=0, r_int=0), torch.randn(2, 3, 24)
    rows["policies"] = torch.tensor([[0, 1, 2]]).expand(4, 3)
    seen = see(rows["obs"].flatten(0, 1))
    torch.testing.assert_close(ngu_r2d2.scaled(rows["obs"].flatten(0, 1)), seen)
    gain = ROOT_2 if layers is NATURE else DEFAULT
    x = apply([*layers, ("linear", 24, gain), "relu"], agent.encoder, seen).unflatten(0, (4, 3))
    rows["features"] = agent.features(seen).unflatten(0, (4, 3))
    torch.testing.assert_close(rows["features"], x, atol=1e-5, rtol=1e-4)
    reward = rows["r_ext"]
    reward = reward.sign() * (1 + reward.abs()).log() if squash_reward else reward
    x = (x, F.one_hot(rows["last_actions"], 5), reward[..., None], rows["r_int"][..., None])
    hidden, after = lstm(agent.lstm, torch.cat((*x, F.one_hot(rows["policies"], 3)), -1), state, starts)
    dueling = [("linear", 24, DEFAULT), "relu"]
    value = apply([*dueling, ("linear", 1, DEFAULT)], agent.value, hidden)
    advantage = apply([*dueling, ("linear", 5, DEFAULT)], agent.advantage, hidden)
    q, found_after = agent(rows, state)
    torch.testing.assert_close(q, value + advantage - advantage.mean(-1)[..., None], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found_after, after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layers,space,see", ENCODERS[:3])
def test_networks_of_curiosity(layers, space, see):
    """Embedding and predictor; the predictor's numbers, and the frozen target's, may be negative."""
    envs = envs_like(space[0], DISCRETE, space[1])
    torch.manual_seed(1)
    curiosity = ngu_r2d2.Curiosity(envs, ngu_r2d2.Args(device="cpu", memory_size=10))
    seen, gain = see(observations(envs, 3)), ROOT_2 if layers is NATURE else DEFAULT
    embedded = apply([*layers, ("linear", 32, gain), "relu"], curiosity.embedding, seen)
    torch.testing.assert_close(curiosity.acting_embedding(seen), embedded, atol=1e-5, rtol=1e-4)
    both = torch.cat((embedded, embedded.flip(0)), -1)
    logits = apply([("linear", 128, DEFAULT), "relu", ("linear", 5, DEFAULT)], curiosity.inverse, both)
    torch.testing.assert_close(curiosity.inverse(both), logits, atol=1e-5, rtol=1e-4)
    curiosity.whitening.mean.normal_()
    curiosity.whitening.var.fill_(0.25)
    white = ((seen - curiosity.whitening.mean) / 0.5).clip(-5, 5)
    parts = [
        apply([*layers, ("linear", 128, gain)], x, white)
        for x in (curiosity.rnd_predictor, curiosity.rnd_target)
    ]
    errors = ((parts[0] - parts[1]) ** 2).sum(-1) / 128
    torch.testing.assert_close(curiosity.prediction_errors(seen), errors, atol=1e-5, rtol=1e-4)
    assert parts[0].min() < 0 and errors.min() > 0
