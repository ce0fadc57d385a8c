"""One test a detail of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details, by number.

Details 23 to 37 are in test_details_continuous.py, test_details_lstm.py and test_details_multidiscrete.py.
Details 14 to 20 are also compared frame by frame in test_atari_envs.py.
"""

import math
from collections import Counter

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
import torch.nn as nn
from conftest import (
    OTHERS,
    SCRIPTS,
    AlignedGames,
    CutGames,
    aligned_args,
    games,
    random_batch,
    scalars,
    small_args,
)
from torch.utils._pytree import tree_map_only

import impala_vtrace
import ngu_r2d2
import ppo
import ppo_async
import ppo_atari
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete
import ppo_shared

gym.register_envs(ale_py)


def watch(monkeypatch, script, name):
    """Calls of a function of the script: [(arguments, result), ...], with arguments as they were then."""
    calls, original = [], getattr(script, name)

    def spy(*args, **kwargs):
        before = tree_map_only(np.ndarray, np.copy, tree_map_only(torch.Tensor, torch.clone, args))
        result = original(*args, **kwargs)
        calls.append((before, result))
        return result

    monkeypatch.setattr(script, name, spy)
    return calls


def every(*scripts):
    """Runs a test on all of these scripts, as its argument "script"."""
    return pytest.mark.parametrize("script", scripts, ids=lambda script: script.SCRIPT)


FLAT = [script for script in SCRIPTS.values() if script is not ppo_lstm]  # minibatches are of single steps
TASKS = {ppo_atari: "BreakoutNoFrameskip-v4", ppo_continuous: "Pendulum-v1", ppo_multidiscrete: "Pendulum-v1"}


def task_args(script, **flags):
    """small_args() on a task that differs from step to step."""
    return small_args(script, env_id=TASKS.get(script, "CartPole-v1"), **flags)


def agent_of(script):
    torch.manual_seed(1)
    return script.Agent(script.make_env(task_args(script), 1))


def batch_of(script, agent, size=64):
    if script is ppo_atari:
        return random_batch(agent, size, (4, 84, 84), torch.uint8)
    if script is ppo_lstm:
        starts = torch.zeros(size, 1, dtype=torch.bool)
        return random_batch(agent, size, state=agent.initial_state(1), starts=starts)
    if script is ppo_multidiscrete:
        return random_batch(agent, size, (3,), masks=torch.ones(size, 11, dtype=torch.bool))
    return random_batch(agent, size, (3,) if script is ppo_continuous else (4,))


def test_detail_1_vectorized_segments_join_into_one_trajectory(monkeypatch):
    """Episodes of 5 steps in rollouts of 16: nothing is lost, repeated or reset between rollouts."""
    losses = watch(monkeypatch, ppo, "ppo_loss")
    monkeypatch.setattr(torch, "randperm", lambda n, **kwargs: torch.arange(n))
    probes.Count.resets = 0
    flags = dict(num_envs=2, total_timesteps=100, num_minibatches=1, update_epochs=1)
    ppo.train(small_args(ppo, env_id="Count-v0", **flags))
    obs = [call[0][1]["obs"].view(16, 2, 2)[:, :, 0] for call in losses]
    assert len(obs) == 100 // 32  # whole rollouts only
    expected = torch.arange(3 * 16).remainder(5).float()
    torch.testing.assert_close(torch.cat(obs), expected[:, None].expand(-1, 2))
    assert probes.Count.resets == 2 * (1 + 3 * 16 // 5)


VECTORS = [x for x in (SCRIPTS | OTHERS).values() if x not in (ppo_atari, impala_vtrace)]


@every(*VECTORS)
def test_detail_1_environments_reset_within_the_step_that_ends_their_episode(script):
    """Gymnasium's, in SAME_STEP; a record of every episode, with the numbers of its last info."""
    box = "Box" * (script in (ppo_continuous, ppo_multidiscrete))
    probes.Reports.episodes = 0
    envs = script.make_env(small_args(script, env_id=f"Reports{box}-v0"), 2)
    assert isinstance(envs.unwrapped, gym.vector.SyncVectorEnv)
    envs.reset(seed=1)
    records = []
    for _ in range(12):
        *_, terminated, truncated, info = envs.step(envs.action_space.sample())
        ended = script.ended_episodes(info)
        assert len(ended) == (terminated | truncated).sum()
        records += ended
    assert len(records) == 2 * 12 // 3
    for k, record in enumerate(records):
        names = {"episodic_return", "episodic_length", "is_success", "is_near", "distance", "level"}
        names |= {"sometimes"} if (k + 1) % 3 == 0 else set()
        assert {name.removeprefix("charts/") for name in record} == names
        assert record["charts/episodic_return"] == record["charts/episodic_length"] == 3
        assert record["charts/is_success"] == (k % 2 == 0) and record["charts/distance"] == 2.5
        assert record["charts/is_near"] == (k % 3 == 0)


def test_detail_2_orthogonal_weights_and_zero_biases(script):
    agent = agent_of(script)
    layers = {n: m for n, m in agent.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert len(layers) == (4 if script in (ppo_shared, ppo_lstm) else 6)
    for name, layer in layers.items():
        out = layer.weight.shape[0]
        policy, value = name in ("actor", "actor.4"), name in ("critic", "critic.4")
        gain = 0.01 if policy else 1.0 if value else math.sqrt(2)
        w = layer.weight.detach().reshape(out, -1)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5, rtol=0)
        assert (layer.bias == 0).all()
    entropy = script.ppo_loss(agent, batch_of(script, agent, 8), 0.2, task_args(script))[1]["entropy"]
    actions = {ppo_atari: 4, ppo_multidiscrete: 11, ppo_continuous: (2 * math.pi * math.e) ** 0.5}
    assert entropy.item() == pytest.approx(math.log(actions.get(script, 2)), abs=1e-3)


@every(*SCRIPTS.values(), ppo_async, ngu_r2d2)
def test_detail_3_adam_epsilon(script, monkeypatch):
    """Of ngu_r2d2.py, whose Adam is another paper's, the epsilon is a flag."""
    made = watch(monkeypatch, torch.optim, "Adam")
    script.train(aligned_args(script, monkeypatch, total_timesteps=32))
    assert len(made) == (2 if script is ngu_r2d2 else 1)
    for _, optimizer in made:
        assert optimizer.defaults["eps"] == (1e-7 if script is ngu_r2d2 else 1e-5)
        assert {group["eps"] for group in optimizer.param_groups} == {optimizer.defaults["eps"]}
        assert optimizer.defaults["betas"] == (0.9, 0.999)


@every(*SCRIPTS.values(), ppo_async, impala_vtrace)
def test_detail_4_learning_rate_annealing(script, monkeypatch):
    for anneal in (True, False):
        args = aligned_args(script, monkeypatch, anneal_lr=anneal)
        rates = [value for _, value in scalars(script.train(args), "charts/learning_rate")]
        expected = [args.learning_rate * (1 - anneal * k / 8) for k in range(8)]
        np.testing.assert_allclose(rates, expected, rtol=1e-5)


@every(*SCRIPTS.values(), ppo_async)
def test_detail_5_generalized_advantage_estimation(script):
    rewards, values = np.ones((3, 1)), np.array([[0.5], [0.6], [0.7]])
    # the second step ends an episode: worked by hand in the facts on the details
    dones = np.array([[0.0], [1.0], [0.0]])
    advantages = script.compute_gae(rewards, values, dones, np.array([0.8]), 0.99, 0.95)
    np.testing.assert_allclose(advantages, [[1.4702], [0.4], [1.092]], atol=1e-4, rtol=0)

    T, N, gamma, lam = 7, 3, 0.9, 0.8
    rng = np.random.default_rng(0)
    rewards, values, last = rng.normal(size=(T, N)), rng.normal(size=(T, N)), rng.normal(size=N)
    dones = (rng.random((T, N)) < 0.3).astype(float)
    advantages = script.compute_gae(rewards, values, dones, last, gamma, lam)
    following = np.vstack((values[1:], last))
    for t in range(T):  # the sum of (gamma lam)^k delta_{t+k} up to the end of the episode
        total, alive = np.zeros(N), np.ones(N)
        for k in range(T - t):
            delta = rewards[t + k] + gamma * following[t + k] * (1 - dones[t + k]) - values[t + k]
            total += alive * (gamma * lam) ** k * delta
            alive *= 1 - dones[t + k]
        np.testing.assert_allclose(advantages[t], total)


def test_detail_5_gae_is_of_what_the_rollout_saw(script, monkeypatch):
    """From rewards, values and ends of its steps and the value of the observation after the last.

    Value targets are advantages, not yet normalized, plus values; they reach the update as they are.
    """
    gaes, losses = (watch(monkeypatch, script, name) for name in ("compute_gae", "ppo_loss"))
    made = watch(monkeypatch, script, "make_env")
    script.train(args := task_args(script, update_epochs=1, num_minibatches=1, gamma=0.9, gae_lambda=0.8))
    assert len(gaes) == len(losses) == args.num_iterations > 0 and len(made) == 1
    for ((rewards, values, dones, next_value, *discounts), advantages), ((_, batch, *_), _) in zip(
        gaes, losses, strict=True
    ):
        assert discounts == [0.9, 0.8] and rewards.shape == values.shape == dones.shape
        assert next_value.shape == rewards.shape[1:]
        assert sorted(batch["values"].flatten().tolist()) == sorted(values.flatten().tolist())
        assert sorted(batch["advantages"].flatten().tolist()) == sorted(advantages.flatten().tolist())
        torch.testing.assert_close(batch["returns"], batch["advantages"] + batch["values"])


@every(*FLAT)
def test_detail_6_every_step_once_an_epoch_in_a_new_order(script, monkeypatch):
    losses = watch(monkeypatch, script, "ppo_loss")
    flags = dict(num_envs=2, num_minibatches=4, update_epochs=3, total_timesteps=32)
    script.train(task_args(script, **flags))
    minibatches = [args[1]["advantages"].tolist() for args, _ in losses]  # as good as unique
    epochs = [sum(minibatches[i : i + 4], []) for i in (0, 4, 8)]
    assert {len(m) for m in minibatches} == {8}
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert len(set(epochs[0])) > 16 and epochs[0] != epochs[1] != epochs[2]


def test_detail_7_advantages_normalized_in_each_minibatch(script, monkeypatch):
    """The loss of [1, 2, 3, 4] is that of +-1.1619 at the ends: with the unbiased std, as in the blog."""
    agent = agent_of(script)
    batch = batch_of(script, agent, 4)
    args = script.Args(device="cpu")
    shape = batch["logprobs"].shape
    raw = batch | dict(advantages=torch.tensor([1.0, 2.0, 3.0, 4.0]).view(shape))
    normalized = batch | dict(advantages=torch.tensor([-1.1619, -0.3873, 0.3873, 1.1619]).view(shape))
    ratios = torch.tensor([0.05, -0.05, 0.02, -0.02]).view(shape)
    raw["logprobs"] = normalized["logprobs"] = batch["logprobs"] + ratios
    loss = script.ppo_loss(agent, raw, 0.2, args)[1]["policy_loss"]
    args.norm_adv = False
    expected = script.ppo_loss(agent, normalized, 0.2, args)[1]["policy_loss"]
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=0)
    assert abs(loss - script.ppo_loss(agent, raw, 0.2, args)[1]["policy_loss"]) > 0.1


class OneLogit(nn.Module):
    """An agent of two numbers: the logit of action 1 against 0, and the value."""

    def __init__(self, script, logit=0.0, value=0.0):
        super().__init__()
        self.is_recurrent = script is ppo_lstm
        self.logit, self.value = nn.Parameter(torch.tensor(logit)), nn.Parameter(torch.tensor(value))

    def forward(self, obs, *_):
        logits = torch.stack((torch.zeros(()), self.logit)).expand(len(obs), 2)
        state = (None,) if self.is_recurrent else ()
        return ppo.Categorical(logits), self.value.expand(len(obs)), *state


def steps(**batch):
    """A minibatch with what only some agents take, too."""
    return dict(state=None, starts=None, masks=None) | batch


def loss_of(script, agent, clip=0.2, clip_vloss=True, **batch):
    one = steps(
        obs=torch.zeros(1, 1), actions=torch.ones(1, dtype=torch.int64), logprobs=torch.tensor([-math.log(2)])
    )
    one |= dict(values=torch.zeros(1), advantages=torch.zeros(1), returns=torch.zeros(1))
    one |= {name: torch.tensor([value]) for name, value in batch.items()}
    args = script.Args(norm_adv=False, ent_coef=0.0, clip_vloss=clip_vloss, device="cpu")
    return script.ppo_loss(agent, one, clip, args)


@pytest.mark.parametrize(
    "advantage,ratio,moves", [(1, 1.3, False), (1, 0.7, True), (-1, 0.7, False), (-1, 1.3, True)]
)
def test_detail_8_clipped_surrogate(script, advantage, ratio, moves):
    """No gradient where the ratio has left the clip range to the better side; all of it on the other side."""
    agent = OneLogit(script)
    loss, info = loss_of(script, agent, logprobs=-math.log(2 * ratio), advantages=float(advantage))
    loss.backward()
    assert (agent.logit.grad.abs() > 0.1).item() == moves
    expected = -advantage * (ratio if moves else 1 + math.copysign(0.2, ratio - 1))
    assert info["policy_loss"].item() == pytest.approx(expected, abs=1e-5)


def test_detail_9_value_loss_clipping(script):
    agent = OneLogit(script, value=1.0)
    _, info = loss_of(script, agent, returns=0.1)
    assert info["value_loss"].item() == pytest.approx(0.405)
    loss, info = loss_of(script, agent, returns=2.0)
    assert info["value_loss"].item() == pytest.approx(1.62)
    loss.backward()
    assert agent.value.grad == 0
    loss, info = loss_of(script, agent, returns=2.0, clip_vloss=False)
    assert info["value_loss"].item() == pytest.approx(0.5)
    loss.backward()
    assert agent.value.grad == -0.5


def test_detail_10_overall_loss(script):
    agent = OneLogit(script, logit=0.3, value=1.0)
    args = script.Args(norm_adv=False, ent_coef=0.01, device="cpu")
    batch = steps(obs=torch.zeros(2, 1), actions=torch.tensor([0, 1]), logprobs=torch.tensor([-0.7, -0.6]))
    batch |= dict(
        values=torch.ones(2), advantages=torch.tensor([1.0, -2.0]), returns=torch.tensor([0.9, 1.2])
    )
    loss, info = script.ppo_loss(agent, batch, 0.2, args)
    p = 1 / (1 + math.exp(-0.3))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    value_loss = 0.5 * (0.1**2 + 0.2**2) / 2
    assert info["entropy"].item() == pytest.approx(entropy)
    assert info["value_loss"].item() == pytest.approx(value_loss)
    expected = info["policy_loss"].item() - 0.01 * entropy + 0.5 * value_loss
    assert loss.item() == pytest.approx(expected)


@every(*SCRIPTS.values(), ppo_async, ngu_r2d2)
def test_detail_11_global_gradient_norm(script, monkeypatch):
    """The gradient that reaches Adam, over all networks together, has at most the norm of the flag."""
    norms, step = [], torch.optim.Adam.step

    def spy(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    for limit in (1e-4, 1e9):
        script.train(aligned_args(script, monkeypatch, total_timesteps=64, max_grad_norm=limit))
        assert len(norms) >= 2
        if limit < 1:
            np.testing.assert_allclose(norms, limit, rtol=0.02)
        else:
            assert max(norms) > 1e-2
        norms.clear()


def test_detail_12_debug_variables(script):
    agent = OneLogit(script)
    batch = steps(
        obs=torch.zeros(2, 1), actions=torch.tensor([0, 1]), values=torch.zeros(2), returns=torch.zeros(2)
    )
    batch |= dict(advantages=torch.zeros(2), logprobs=torch.tensor([-0.1, 0.1]) - math.log(2))
    _, info = script.ppo_loss(agent, batch, 0.1, script.Args(norm_adv=False, device="cpu"))
    assert info["old_approx_kl"].item() == pytest.approx(0, abs=1e-6)
    assert info["approx_kl"].item() == pytest.approx(0.0050042, abs=1e-6)
    assert info["clipfrac"].item() == 0.5  # e^0.1 - 1 is beyond 0.1, 1 - e^-0.1 is not
    run = script.train(task_args(script))
    logged = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    for name in logged:
        assert scalars(run, f"losses/{name}"), name


def test_detail_12_explained_variance_without_variance_is_not_logged(script, monkeypatch):
    zeros = lambda rewards, values, *rest: -values  # noqa: E731  all returns are 0
    monkeypatch.setattr(script, "compute_gae", zeros)
    run = script.train(aligned_args(script, monkeypatch, total_timesteps=32))
    assert scalars(run, "losses/value_loss") and not scalars(run, "losses/explained_variance")


def test_detail_13_separate_and_shared_networks():
    obs = torch.randn(5, 4)
    for script, parameters, shared in ((ppo, 9155, False), (ppo_shared, 4675, True)):
        agent = agent_of(script)
        assert sum(p.numel() for p in agent.parameters()) == parameters
        before = agent(obs)[0].logprobs
        value_loss = agent(obs)[1].pow(2).sum()
        for p, g in zip(
            agent.parameters(),
            torch.autograd.grad(value_loss, agent.parameters(), allow_unused=True),
            strict=True,
        ):
            p.data -= g if g is not None else 0
        assert torch.equal(before, agent(obs)[0].logprobs) != shared


def game_starts(seed, game="Breakout"):
    envs = games(f"{game}NoFrameskip-v4", 1)
    envs.first_actions, counts = (), []
    envs.reset(seed=seed)
    for _ in range(240):
        envs._first_frame(0, *envs.games[0].reset())
        info = envs.games[0].step(np.array([0]))[4]  # a step of 4 frames, to read the frame counter
        counts.append(int(info["episode_frame_number"][0]) - 4)
    return counts


def test_detail_14_one_to_thirty_noops():
    counts = game_starts(seed=1)
    assert set(counts) == set(range(1, 31))
    assert counts == game_starts(seed=1) and counts != game_starts(seed=2)
    own = {"YarsRevenge": 7, "Pooyan": 1}  # frames that the game plays by itself before the first no-op
    for game, before in own.items():
        counts = game_starts(seed=1, game=game)
        assert {min(counts), max(counts)} == {before + 1, before + 30}


def test_detail_15_max_of_the_last_two_of_four_frames():
    envs = games("PongNoFrameskip-v4", 1)
    plain = gym.make("PongNoFrameskip-v4", obs_type="grayscale").unwrapped
    envs.first_actions = ()
    obs, _ = envs.reset(seed=1)
    plain.reset()
    game_frame = int(envs.games[0].step(np.array([0]))[4]["episode_frame_number"][0])
    for _ in range(game_frame):
        plain.step(0)
    for action in [2, 3, 2, 2, 3, 0, 1, 2]:
        obs, *_ = envs.step(np.array([action]))
        frames = [plain.step(action)[0] for _ in range(4)]
        expected = cv2.resize(np.maximum(frames[2], frames[3]), (84, 84), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(obs[0, -1], expected)


def play(envs, steps, policy=None, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield envs.step(
            rng.integers(envs.single_action_space.n, size=envs.num_envs) if policy is None else policy
        )


def test_detail_16_lives_end_episodes_but_not_the_game():
    """Lives go 5, 4, 3, 2, 1 over successive dones, in one game, which has one score."""
    envs = games("BreakoutNoFrameskip-v4", 1)
    envs.reset(seed=1)
    lives, scores = [int(envs.lives[0])], []
    for _, _, terminated, truncated, info in play(envs, 600):
        if terminated[0]:
            lives.append(int(envs.lives[0]))
        if "final_info" in info:
            scores.append(info["final_info"]["episode"]["r"][0])
        assert not truncated.any()
    assert lives[:11] == [5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 5]
    assert len(scores) == (len(lives) - 1) // 5 and sum(scores) > 0


def sent_actions(envs):
    log, original = [], envs._send
    envs._send = lambda i, action: (log.append(int(action)), original(i, action))
    return log


def test_detail_17_fire_after_every_reset():
    envs = games("BreakoutNoFrameskip-v4", 1)
    log = sent_actions(envs)
    envs.reset(seed=1)
    assert log == [1, 2]
    policy = np.array([3])
    for _, _, terminated, _, _ in play(envs, 400, policy):
        if terminated[0]:
            assert log[-3:] == [0, 1, 2]  # a no-op; an emulator at a game's end begins a new one
    assert log.count(1) > 5
    envs = games("FreewayNoFrameskip-v4", 1)  # no FIRE among its actions
    log = sent_actions(envs)
    envs.reset(seed=1)
    assert log == []


def test_detail_18_grey_84_by_84():
    """ale-py's palette grey against grey made from RGB, as baselines makes it: equal but for rounding."""
    envs = games("BreakoutNoFrameskip-v4", 1)
    envs.first_actions = ()
    obs, _ = envs.reset(seed=1)
    assert obs.dtype == np.uint8 and obs.shape == (1, 4, 84, 84)
    plain = gym.make("BreakoutNoFrameskip-v4").unwrapped
    plain.reset()
    frames = int(envs.games[0].step(np.array([0]))[4]["episode_frame_number"][0]) - 4
    for _ in range(frames):
        rgb, *_ = plain.step(0)
    grey = cv2.resize(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)
    difference = np.abs(grey.astype(int) - obs[0, -1])
    assert difference.max() <= 1


def test_detail_19_rewards_are_signs_and_scores_are_raw():
    envs = games("QbertNoFrameskip-v4", 2)
    envs.reset(seed=1)
    seen, scores = set(), []
    for _, rewards, _, _, info in play(envs, 1200):
        seen |= set(rewards)
        if "final_info" in info:
            scores += info["final_info"]["episode"]["r"][info["final_info"]["_episode"]].tolist()
    assert seen == {0.0, 1.0}
    assert scores and all(score % 25 == 0 for score in scores) and max(scores) >= 25


def test_detail_20_stack_of_four_frames():
    envs = games("PongNoFrameskip-v4", 2)
    obs, _ = envs.reset(seed=1)
    assert all((obs[:, k] == obs[:, 0]).all() for k in range(4))
    before, changed = obs.copy(), False
    for obs, _, terminated, _, _ in play(envs, 50):
        assert not terminated.any()
        np.testing.assert_array_equal(obs[:, :3], before[:, 1:])
        changed |= (obs[:, 3] != obs[:, 2]).any()
        before = obs.copy()
    assert changed


def test_detail_21_shared_nature_cnn():
    agent = agent_of(ppo_atari)
    assert sum(p.numel() for p in agent.parameters()) == 1_686_693
    assert [type(m).__name__ for m in agent.network] == ["Conv2d", "ReLU"] * 3 + ["Flatten", "Linear", "ReLU"]
    convolutions = [(m.out_channels, m.kernel_size[0], m.stride[0]) for m in list(agent.network)[:6:2]]
    assert convolutions == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    hidden = []
    agent.network[7].register_forward_hook(lambda module, args, output: hidden.append(args[0].shape[1]))
    agent(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    assert hidden == [3136]


def test_detail_22_pixels_are_scaled_to_one_and_stored_as_bytes(monkeypatch):
    agent = agent_of(ppo_atari)
    white = torch.full((1, 4, 84, 84), 255, dtype=torch.uint8)
    features = agent.network(torch.ones(1, 4, 84, 84))
    torch.testing.assert_close(agent(white)[1], agent.critic(features).squeeze(-1))
    losses = watch(monkeypatch, ppo_atari, "ppo_loss")
    ppo_atari.train(small_args(ppo_atari, total_timesteps=32))
    assert losses[0][0][1]["obs"].dtype == torch.uint8


@every(*SCRIPTS.values(), ppo_async)
def test_auxiliary_detail_1_clip_range_annealing(script, monkeypatch):
    losses = watch(monkeypatch, script, "ppo_loss")
    once = dict(sample_reuse=1.0) if script is ppo_async else dict(update_epochs=1)
    for anneal in (True, False):
        flags = dict(num_minibatches=1, clip_coef=0.2, anneal_clip=anneal, total_timesteps=128)
        script.train(aligned_args(script, monkeypatch, **flags, **once))
        np.testing.assert_allclose(
            [args[2] for args, _ in losses], [0.2 * (1 - anneal * k / 4) for k in range(4)]
        )
        losses.clear()


@every(*SCRIPTS.values(), ppo_async)
def test_auxiliary_detail_3_early_stopping(script, monkeypatch):
    losses = watch(monkeypatch, script, "ppo_loss")
    passes = dict(sample_reuse=5.0) if script is ppo_async else dict(update_epochs=5)
    for limit, expected in ((0.0, 2), (1e9, 10), (None, 10)):  # one epoch, or all of them
        flags = dict(num_minibatches=2, target_kl=limit, total_timesteps=32)
        script.train(aligned_args(script, monkeypatch, **flags, **passes))
        assert len(losses) == expected
        losses.clear()


class Counting(ppo_lstm.Agent):
    """Values an observation at its first number, plus 1,000 times the steps since the episode's start."""

    def forward(self, obs, state, starts):
        values = []
        for x, is_start in zip(obs, starts, strict=True):
            state = state * ~is_start[:, None] + 1
            values.append(x[:, 0].float() + 1000 * state[0, :, 0])
        return ppo_lstm.Categorical(torch.zeros(*obs.shape[:2], 2)), torch.stack(values), state


def valued_by_first_number(script, monkeypatch):
    """Agents whose value is the first number of an observation; normalization does nothing but clip at 10."""
    if script is ppo_lstm:
        return monkeypatch.setattr(script, "Agent", Counting)
    original = script.Agent.forward

    def forward(self, obs, *masks):
        return original(self, obs, *masks)[0], obs.flatten(1)[:, 0].float().view(obs.shape[:-1])

    def of_games(self, obs):
        return original(self, obs)[0], obs[:, 0, 0, 0].float()

    def of_steps(self, obs):  # (N, obs_dim) or (T, N, obs_dim)
        return original(self, obs)[0], obs[..., 0].float()

    forwards = {ppo_atari: of_games, ppo_multidiscrete: forward}
    monkeypatch.setattr(script.Agent, "forward", forwards.get(script, of_steps))
    if script in (ppo_continuous, ppo_multidiscrete):
        monkeypatch.setattr(script.RunningNorm, "update", lambda self, x: None)


def test_bootstrap_truncated(script, monkeypatch):
    """A time limit after 4 steps: the value of the last, not the next observation; none if terminated.

    And rewards, values and ends of a rollout of 14 steps are in their place, as is the value after them.
    """
    gaes = watch(monkeypatch, script, "compute_gae")
    valued_by_first_number(script, monkeypatch)
    monkeypatch.setattr(script, "ppo_loss", lambda agent, batch, *rest: fake_loss(agent))
    box = "Box" if script in (ppo_continuous, ppo_multidiscrete) else ""
    last_value = 10 if box else 100  # normalized observations are clipped
    last_value += 5000 if script is ppo_lstm else 0  # the LSTM has seen 4 steps of the episode, and this
    value_of = lambda t: t + 1000 * (t + 1) * (script is ppo_lstm)  # noqa: E731  in step t of an episode
    for is_cut, bootstrap, last_reward in (
        (True, True, 1 + 0.9 * last_value),
        (True, False, 1),
        (False, True, 1),
    ):
        gaes.clear()
        length = 4 if is_cut or script is ppo_atari else 5
        if script is ppo_atari:
            games = CutGames if is_cut else EndGames
            monkeypatch.setattr(script, "make_env", lambda args, num_envs, games=games: games(num_envs))
        flags = dict(env_id=f"{'Cut' if is_cut else 'Count'}{box}-v0", num_steps=14, total_timesteps=112)
        script.train(small_args(script, **flags, bootstrap_truncated=bootstrap, gamma=0.9))
        assert len(gaes) == (4 if script is ppo_atari else 2)
        for k, ((rewards, values, dones, next_value, *_), _) in enumerate(gaes):
            t = np.arange(14 * k, 14 * (k + 2)) % length
            t, then = np.broadcast_to(t[:14, None], values.shape), np.broadcast_to(t[14], next_value.shape)
            assert np.array_equal(dones > 0, t == length - 1)
            np.testing.assert_allclose(rewards[dones > 0], last_reward, rtol=1e-5)
            np.testing.assert_allclose(rewards[dones == 0], 1, rtol=1e-5)
            if script is not ppo_atari or is_cut:
                np.testing.assert_allclose(values, value_of(t), rtol=1e-5, atol=1e-5)
                if k == 0:  # it does not count where an episode ends with a rollout, as with the second
                    np.testing.assert_allclose(next_value, value_of(then), rtol=1e-5, atol=1e-5)


class EndGames(AlignedGames):
    """All episodes end after 4 steps, with a reward of 1 at every step."""

    length = 4

    def recv(self, games=None):
        obs, rewards, *rest = super().recv()
        return obs, np.ones_like(rewards), *rest


def fake_loss(agent):
    loss = sum(p.sum() for p in agent.parameters()) * 0
    return loss, dict(clipfrac=loss.detach())


def log_ratios(monkeypatch, script):
    """Largest change of a log-probability since the rollout, before each update."""
    found, original = [], script.ppo_loss

    def spy(agent, batch, *rest):
        with torch.no_grad():
            more = [batch[name] for name in ("state", "starts", "masks") if name in batch]
            logprobs = agent(batch["obs"], *more)[0].log_prob(batch["actions"])
            found.append((logprobs - batch["logprobs"]).abs().max().item())
        return original(agent, batch, *rest)

    monkeypatch.setattr(script, "ppo_loss", spy)
    return found


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous"])
def test_actions_are_drawn_from_the_policy(name, monkeypatch):
    """One that is far from uniform: actions are as likely as it says, and always new."""
    script = SCRIPTS[name]
    init = script.layer_init
    monkeypatch.setattr(script, "layer_init", lambda layer, std=2**0.5: init(layer, std=2**0.5))
    losses, made = watch(monkeypatch, script, "ppo_loss"), watch(monkeypatch, script, "Agent")
    flags = dict(num_minibatches=1, update_epochs=1, learning_rate=0.0, num_envs=8, num_steps=512)
    script.train(task_args(script, **flags, total_timesteps=2 * 8 * 512))
    ((_, agent),) = made
    batch = {k: torch.cat([call[0][1][k] for call in losses]) for k in ("obs", "actions", "logprobs")}
    with torch.no_grad():
        dist, _ = agent(batch["obs"])
        n, surprise = len(batch["obs"]), -dist.log_prob(batch["actions"])
    assert n == 2 * 8 * 512 and surprise.std() > 0.1
    spread = 5 * surprise.std().item() / n**0.5
    assert surprise.mean().item() == pytest.approx(dist.entropy().mean().item(), abs=spread)
    torch.testing.assert_close(-surprise, batch["logprobs"], atol=1e-5, rtol=1e-5)
    if script is ppo_continuous:
        z = (batch["actions"] - dist.mean) / dist.log_std.exp()
        assert abs(z.mean()) < 5 / n**0.5 and abs(z.std() - 1) < 5 / n**0.5
        assert len(z.unique()) > 0.99 * n
    else:
        p = dist.logprobs[:, 1].exp()
        assert p.std() > 0.05
        assert abs(batch["actions"].float().mean() - p.mean()) < 5 * (p * (1 - p)).mean().sqrt() / n**0.5


def test_ratio_is_one_before_the_first_step(script, monkeypatch):
    """Every stored log-probability is recomputed by the update: fails if any of them is misplaced."""
    ratios, losses = log_ratios(monkeypatch, script), watch(monkeypatch, script, "ppo_loss")
    script.train(task_args(script, num_minibatches=1, update_epochs=1, total_timesteps=256))
    assert ratios[0] < 1e-5 and losses[0][1][1]["clipfrac"] == 0
