"""ngu_r2d2.py: its functions by their definitions, the nine choices, and the bugs that public implementations
have had, one test each."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import scalars, small_args
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ngu_r2d2
from benchmark.studies import exploration as disco
from ngu_r2d2 import (
    Actor,
    Agent,
    Args,
    Curiosity,
    Replay,
    episodic_reward,
    epsilons,
    h,
    h_inv,
    last_transitions,
    make_env,
    nstep_targets,
    policy_family,
    q_loss,
    rescaled,
    retrace_targets,
    sequence_priority,
)

ROOT = Path(__file__).parent.parent


def small(**flags):
    flags = dict(env_id="Strange-v0", num_envs=3, num_steps=8, total_timesteps=480, log_every=1) | flags
    flags = dict(burn_in=3, unroll=6, period=4, replay_steps=400, learning_starts=16, hidden_size=8) | flags
    return Args(**dict(batch_sequences=4, num_policies=3, memory_size=50, device="cpu") | flags)


class Strange(gym.Env):
    """Observes (episode, step, last action); the reward is its step / 10; episodes of 1, 2, 3, ... steps.

    Every third episode is cut, the others end.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)
    longest = 25

    def __init__(self):
        self.episode = 0

    def observe(self, action):
        return np.array([self.episode, self.t, action], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode % self.longest + 1, 0
        return self.observe(-1), {}

    def step(self, action):
        self.t += 1
        over, is_cut = self.t == self.episode, self.episode % 3 == 0
        return self.observe(action), self.t / 10, over and not is_cut, over and is_cut, {}


gym.register("Strange-v0", Strange)


@torch.no_grad()
def play(args, steps, seed=1, check=lambda replay, rows: None):
    """Actor and Replay as in train(), after some steps; what the actor saw, by environment; all rows that it
    saw or arrived at, by environment, with the state before each."""
    torch.manual_seed(seed)
    N = args.num_envs
    envs = make_env(args, N)
    agent, curiosity = Agent(envs, args), Curiosity(envs, args)
    actor, rng, replay = Actor(args, envs, agent, curiosity), np.random.default_rng(seed), Replay(args, envs)
    actor.reset(seed)
    history, rows, original = [[] for _ in range(N)], [[] for _ in range(N)], agent.forward

    def note(row):
        for n in range(N):
            if row is not actor.row or row["starts"][n]:
                values = {name: np.copy(x[n]) for name, x in row.items()}
                rows[n].append(values | dict(state=actor.state[:, n].numpy().copy()))

    note(actor.row)

    def forward(inputs, state):
        q, state = original(inputs, state)
        for n in range(N):
            history[n].append(dict(obs=inputs["obs"][0, n].tolist(), q=q[0, n].clone()))
        return q, state

    agent.forward, infos = forward, []
    with torch.no_grad():
        for _ in range(steps):
            row = actor.row
            arrival, ended, info = actor.step(np.full(N, 0.5), rng)
            infos.append(info)
            for n in range(N):
                history[n][-1] |= {name: arrival[name][n] for name in ("r_int", "mu", "ends", "last_actions")}
                history[n][-1] |= dict(policy=arrival["policies"][n], arrival=arrival["obs"][n])
            replay.append(row, arrival, actor.state.numpy())
            note(arrival)
            note(actor.row)
            check(replay, rows)
    agent.forward = original
    return SimpleNamespace(**locals())


def tensors(batch):
    return {name: torch.as_tensor(x) for name, x in batch.items()}


def everything(replay):
    """All sequences as one batch, in the order in which they were added."""
    return replay.padded(np.arange(len(replay.sequences)))


# === Functions ===


def test_policy_family():
    """Choice 9, and by hand: N = 32 as in the paper; the first weight is exactly 0."""
    betas, gammas = policy_family(32, 0.3, 0.997, 0.99)
    assert betas[0] == 0 and betas[31] == 0.3 and betas.dtype == gammas.dtype == torch.float64
    assert betas[5].item() == pytest.approx(0.3 / (1 + math.exp(-10 * (10 - 30) / 30)), rel=1e-9)
    assert gammas[0].item() == pytest.approx(0.997) and gammas[31].item() == pytest.approx(0.99)
    middle = 1 - math.exp((21 * math.log(0.003) + 10 * math.log(0.01)) / 31)
    assert gammas[10].item() == pytest.approx(middle, rel=1e-9)
    assert (betas.diff() > 0).all() and (gammas.diff() < 0).all()
    assert [x.tolist() for x in policy_family(1, 0.3, 0.997, 0.99)] == [[0.3], [0.997]]
    two = [x.tolist() for x in policy_family(2, 0.3, 0.997, 0.99)]
    assert two[0] == [0, 0.3] and two[1] == pytest.approx([0.997, 0.99])
    assert policy_family(1, 0.0, 0.997, 0.99)[0].item() == 0


def test_epsilons():
    assert epsilons(1).tolist() == [0.4]
    np.testing.assert_allclose(epsilons(8), 0.4 ** np.arange(1, 9))
    assert epsilons(256)[0] == 0.4 and epsilons(256)[-1] == pytest.approx(0.4**8)


def test_rescaling_and_its_inverse():
    """Choice 5: h_inv is the inverse, squared root and all."""
    x = torch.linspace(-1e4, 1e4, 999, dtype=torch.float64)
    torch.testing.assert_close(h_inv(h(x)), x, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(h(h_inv(x / 100)), x / 100, rtol=1e-8, atol=1e-8)
    assert h(torch.tensor(3.0, dtype=torch.float64)).item() == pytest.approx(1 + 0.003)


def returns_case(T=7, B=4, seed=0):
    rng = np.random.default_rng(seed)
    rewards, taken, traces = (torch.from_numpy(rng.normal(size=(T, B))) for _ in range(3))
    ends = torch.from_numpy(rng.random((T, B)) < 0.2)
    discounts = 0.9 * (1 - (ends & torch.from_numpy(rng.random((T, B)) < 0.5)).double())
    values = torch.from_numpy(rng.normal(size=(T + 1, B)))
    return rewards, discounts, ends, values, taken, traces.sigmoid()


@pytest.mark.parametrize("n", [1, 3, 20])
def test_nstep_targets_by_definition(n):
    """Choice 7: rewards up to n steps ahead, the end of the episode or of the sequence, then the value."""
    rewards, discounts, ends, values, *_ = returns_case()
    targets = nstep_targets(rewards, discounts, ends, values, n)
    for b in range(4):
        for t in range(7):
            total, factor = 0.0, 1.0
            for k in range(t, min(t + n, 7)):
                total, factor = total + factor * rewards[k, b], factor * discounts[k, b]
                if ends[k, b]:
                    break
            torch.testing.assert_close(targets[t, b], total + factor * values[k + 1, b])


def test_retrace_targets_by_definition():
    """Q(x_t, a_t) + sum over s >= t of gamma^(s-t) (product of c_i, t < i <= s) delta_s."""
    rewards, discounts, ends, values, taken, traces = returns_case()
    targets = retrace_targets(rewards, discounts, ends, values, taken, traces)
    for b in range(4):
        for t in range(7):
            total, factor = taken[t, b].clone(), 1.0
            for s in range(t, 7):
                factor = factor * traces[s, b] if s > t else factor
                total += factor * (rewards[s, b] + discounts[s, b] * values[s + 1, b] - taken[s, b])
                factor = factor * discounts[s, b]
                if ends[s, b]:
                    break
            torch.testing.assert_close(targets[t, b], total)
    greedy = retrace_targets(rewards, discounts, ends, values, taken, torch.zeros_like(traces))
    torch.testing.assert_close(greedy, nstep_targets(rewards, discounts, ends, values, 1))


def test_inverse_in_float32():
    """The paper's difference of two numbers near 1 has errors of 1e-4 near 0, and 170 values for these."""
    x = torch.linspace(-0.01, 0.01, 1_000_001)
    exact = h_inv(x.double())
    assert (h_inv(x) - exact).abs().max() < 1e-6 and len(h_inv(x).unique()) > 100_000
    large = torch.logspace(-6, 4, 1000, dtype=torch.float64)
    root = ((1 + 4e-3 * (large + 1 + 1e-3)).sqrt() - 1) / 2e-3  # as the paper writes it, in float64
    torch.testing.assert_close(h_inv(large), root**2 - 1, rtol=1e-9, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("squash_reward", [True, False])
def test_the_lstm_sees_the_squashed_reward(squash_reward):
    """Rewards of 300 and -300 as 5.7 and -5.7, or as they are; the bonus as it is."""
    args = small(squash_reward=squash_reward)
    agent = Agent(make_env(args, 1), args)
    seen, original = [], agent.lstm.forward
    agent.lstm.forward = lambda x, state: (seen.append(x), original(x, state))[1]
    rewards = torch.tensor([[300.0], [-300.0], [0.0]])
    rows = dict(last_actions=torch.zeros(3, 1, dtype=torch.long), r_ext=rewards, r_int=rewards)
    rows |= dict(policies=torch.zeros(3, 1, dtype=torch.long), starts=torch.zeros(3, 1, dtype=torch.bool))
    agent(rows | dict(features=torch.zeros(3, 1, args.hidden_size)), torch.zeros(2, 1, args.hidden_size))
    expected = rewards.sign() * (1 + rewards.abs()).log() if squash_reward else rewards
    places = args.hidden_size + agent.num_actions
    torch.testing.assert_close(seen[0][..., places], expected)
    torch.testing.assert_close(seen[0][..., places + 1], rewards)


def test_learning_begins_after_so_many_steps_padding_not_counted():
    """Episodes of 1 to 25 steps, sequences of up to 9: the update is in the iteration of the 300th step."""
    for starts, step in ((100, 120), (300, 312)):
        for replay_steps in (400, 4000):
            args = small(learning_starts=starts, replay_steps=replay_steps, total_timesteps=960)
            assert scalars(ngu_r2d2.train(args), "losses/td_loss")[0][0] == step


def test_training_writes_priorities_into_the_replay(monkeypatch):
    """Each update gives its sequences those that the loss has found."""
    found, replays, original = [], [], ngu_r2d2.q_loss
    sample = Replay.sample

    def spy(*args):
        result = original(*args)
        found.append(result[1])
        return result

    def drawn(self, *args):
        if found:  # the update before this draw; where a sequence was drawn twice, the last one counts
            places, priorities = replays[-1], found[-1].numpy() + 1e-6
            last = {place: priority for place, priority in zip(places.tolist(), priorities, strict=True)}
            if self.sequences is sequences[-1]:
                assert [self.priorities[n] for n in last] == pytest.approx(list(last.values()))
                checked.append(len(last))
        at, batch = sample(self, *args)
        replays.append(at)
        sequences.append(self.sequences)
        return at, batch

    sequences, checked = [], []
    monkeypatch.setattr(ngu_r2d2, "q_loss", spy)
    monkeypatch.setattr(Replay, "sample", drawn)
    ngu_r2d2.train(small(updates_per_rollout=3))
    assert len(checked) > 20


def test_priority_is_of_absolute_errors_not_squares():
    errors = torch.tensor([[3.0, 1.0], [-1.0, 0.0], [100.0, 100.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]]).bool()
    assert sequence_priority(errors, 0.9, mask).tolist() == pytest.approx(
        [0.9 * 3 + 0.1 * 2, 0.9 + 0.1 * 0.5]
    )
    assert sequence_priority(errors, 0.9, mask & False).tolist() == [0, 0]


def test_episodic_reward_by_hand():
    """k = 10; where all are as far as usual, 1 / (sqrt(10 eps / (0.992 + eps)) + c)."""
    usual = 1 / (math.sqrt(10 * 1e-3 / (0.992 + 1e-3)) + 1e-3)
    assert episodic_reward(np.full((1, 10), 4.0), 4.0)[0] == pytest.approx(usual, rel=1e-9)
    known = 1 / (math.sqrt(10) + 1e-3)
    assert episodic_reward(np.zeros((1, 10)), 4.0)[0] == pytest.approx(known, rel=1e-9)
    assert episodic_reward(np.full((1, 10), 0.008 * 4), 4.0)[0] == pytest.approx(
        known, rel=1e-9
    )  # one cluster
    far = episodic_reward(np.full((1, 10), 1e12), 4.0)[0]
    assert 990 < far < 1000  # at most 1 / c
    assert episodic_reward(np.zeros((1, 10)), 4.0, max_similarity=3.0)[0] == 0
    assert episodic_reward(np.zeros((2, 10)), 0.0).tolist() == pytest.approx([known] * 2)  # no division by 0


def test_fewer_memories_than_neighbors_count_as_many():
    """Choice 4: one memory at a distance is worth ten at it."""
    few = np.full((3, 10), np.inf)
    few[0, :1], few[1, :4], few[2] = 2.0, 2.0, 2.0
    np.testing.assert_allclose(episodic_reward(few, 1.5), episodic_reward(few, 1.5)[2])


def test_scales_look_at_what_is_no_padding():
    novelty = torch.tensor([[1.0, 3.0], [5.0, 100.0]])
    mask = torch.tensor([[True, True], [True, False]])
    scaled = {how: rescaled(novelty, mask, how)[mask].tolist() for how in ngu_r2d2.Bonus.__args__}
    assert scaled["calibrated"] == scaled["long-run-mean"] == [1, 3, 5]
    assert scaled["min-max"] == pytest.approx([0, 0.5, 1])
    assert scaled["batch-mean"] == pytest.approx([1 / 3, 1, 5 / 3])
    assert scaled["unit-std"] == pytest.approx([0.5, 1.5, 2.5])
    assert scaled["zero-mean"] == pytest.approx([-1, 0, 1])


# === Acting ===


@torch.no_grad()
def test_network_is_fed_what_led_to_its_observation():
    """Of its own environment; nothing at the start of an episode; the raw reward, the novelty of arrival."""
    args = small()
    envs, rng = make_env(args, 3), np.random.default_rng(0)
    actor, starts = Actor(args, envs, Agent(envs, args), Curiosity(envs, args)), 0
    actor.reset(1)
    with torch.no_grad():
        for _ in range(60):
            arrival, _, _ = actor.step(np.full(3, 1.0), rng)
            row = actor.row
            for n in range(3):
                if row["starts"][n]:
                    starts += 1
                    assert row["last_actions"][n] == row["r_ext"][n] == row["r_int"][n] == 0
                    assert row["obs"][n][1] == 0 and row["obs"][n][2] == -1
                else:
                    assert row["last_actions"][n] == row["obs"][n][2] == arrival["last_actions"][n]
                    assert row["r_ext"][n] == pytest.approx(row["obs"][n][1] / 10)
                    assert row["r_int"][n] == arrival["r_int"][n] > 0
    assert starts > 10


def test_actor_draws_and_says_with_what_probability():
    args = small(num_envs=2)
    run = play(args, 1)
    with torch.no_grad():
        epsilon, counts, likely = np.array([0.0, 0.6]), np.zeros((2, 3)), set()
        q = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 1.0, 2.0]]])
        run.actor.agent = lambda inputs, state: (q, state)
        run.actor.agent.num_actions, run.actor.agent.features = 3, lambda obs: obs
        for _ in range(2000):
            arrival, _, _ = run.actor.step(epsilon, run.rng)
            for n, action in enumerate(arrival["last_actions"]):
                counts[n, action] += 1
                likely.add((n, int(action), round(float(arrival["mu"][n]), 6)))
    assert likely == {(0, 1, 1.0), (1, 0, 0.6), (1, 1, 0.2), (1, 2, 0.2)}
    np.testing.assert_allclose(counts[1] / 2000, [0.6, 0.2, 0.2], atol=0.04)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_actor_takes_a_time_limit_for_no_end_unless_told(bootstrap):
    """Choice 6; Strange-v0 cuts every third episode."""
    run = play(small(bootstrap_truncated=bootstrap), 1)
    kinds = set()
    for _ in range(60):
        with torch.no_grad():
            arrival, _, _ = run.actor.step(np.full(3, 0.5), run.rng)
        for obs, ends, discount in zip(arrival["obs"], arrival["ends"], arrival["discounts"], strict=True):
            is_cut = ends and obs[0] % 3 == 0
            assert ends == (obs[0] == obs[1]) and discount == (not ends or is_cut and bootstrap)
            kinds.add((bool(ends), bool(is_cut)))
    assert len(kinds) == 3


def test_policies_are_drawn_for_each_episode_and_repeat_by_seed():
    histories = [play(small(num_policies=5), 200, seed).history for seed in (1, 1, 2)]
    drawn = [[step["policy"] for h in history for step in h] for history in histories]
    assert drawn[0] == drawn[1] != drawn[2] and set(drawn[0]) == set(range(5))
    for steps in histories[0]:
        for before, after in zip(steps, steps[1:], strict=False):
            assert before["ends"] or before["policy"] == after["policy"]


def test_evaluation_plays_the_first_policy_alone(monkeypatch):
    run_dir = ngu_r2d2.train(small())
    seen, forward = set(), Agent.forward

    def spy(self, rows, state):
        seen.update(rows["policies"].flatten().tolist())
        return forward(self, rows, state)

    monkeypatch.setattr(Agent, "forward", spy)
    args = ngu_r2d2.load_checkpoint(run_dir)["args"]
    args.evaluate, args.eval_episodes = str(run_dir), 5
    assert len(ngu_r2d2.evaluate(args)) == 5 and seen == {0}


# === Curiosity ===


def curiosity_of(num_envs=1, **flags):
    args = small(num_envs=num_envs, **flags)
    curiosity = Curiosity(make_env(args, num_envs), args)
    curiosity.acting_embedding = itself()
    return curiosity


def itself(*more):
    """An embedding that pads an observation, and does more."""
    layers = torch.nn.Sequential(torch.nn.ZeroPad1d((0, 29)), *more)
    return ngu_r2d2.FrozenEmbedding(layers, torch.zeros(2))


def at(*x):
    return torch.tensor([[x, 0.0, 0.0] for x in x])


@torch.no_grad()
def test_first_bonuses_are_ordinary():
    """Choices 2 and 3: the mean is updated before its use, so the first arrival is as far as usual: 1."""
    curiosity = curiosity_of(rnd=False)
    curiosity.begin(at(0.0), np.ones(1, bool))
    novelty, alpha, info = curiosity(at(2.0))
    assert novelty[0] == pytest.approx(1, rel=1e-6) and alpha[0] == 1 and info["distance"] == pytest.approx(4)
    again, *_ = curiosity(at(2.0))
    assert again[0] < 0.05  # the same place again, as near as can be


@torch.no_grad()
def test_nothing_is_worth_more_than_what_is_as_far_as_usual():
    """Choice 2; the scales of DI-engine have no such bound."""
    for bonus, bound in (("calibrated", 1.0), ("min-max", 1.3)):
        curiosity = curiosity_of(num_envs=2, rnd=False, bonus=bonus)
        curiosity.begin(at(0.0, 0.0), np.ones(2, bool))
        novelty, *_ = curiosity(at(1.0, 10.0))  # squared distances of 1 and 100, 50.5 on average
        assert novelty[0] < 0.2 and novelty[1] == 1.0 if bound == 1 else novelty[1] > bound


@torch.no_grad()
def test_standing_still_is_not_novel():
    """Not even where nothing else was ever seen, so that all distances are 0."""
    curiosity = curiosity_of(rnd=False)
    curiosity.begin(at(1.0), np.ones(1, bool))
    novelties = [curiosity(at(1.0))[0].item() for _ in range(20)]
    assert all(0 <= x < 0.1 for x in novelties), novelties


@torch.no_grad()
def test_distances_are_squared_and_of_earlier_arrivals_alone():
    curiosity = curiosity_of(rnd=False, memory_size=5, neighbors=3)
    curiosity.begin(at(0.0), np.ones(1, bool))
    for x in range(1, 12):  # the memory wraps around: what arrives is never compared with itself
        nearest = curiosity.memory.nearest(np.pad([[float(x)]], ((0, 0), (0, 31))))
        expected = [d**2 if d <= x else np.inf for d in (1, 2, 3)]
        assert sorted(nearest[0].tolist()) == expected
        curiosity(at(float(x)))
    assert curiosity.memory.counts[0] == 12


@torch.no_grad()
def test_memory_is_emptied_by_an_episode_and_the_mean_is_not():
    curiosity = curiosity_of(num_envs=2, rnd=False)
    curiosity.begin(at(0.0, 0.0), np.ones(2, bool))
    curiosity(at(1.0, 1.0))
    before = curiosity.acting_embedding.distances.clone()
    curiosity.begin(at(5.0, 9.0), np.array([True, False]))
    assert curiosity.memory.counts.tolist() == [1, 2]
    assert torch.equal(curiosity.acting_embedding.distances, before)
    nearest = curiosity.memory.nearest(np.zeros((2, 32), np.float32))
    assert nearest[0, :2].tolist() == [25, np.inf] and sorted(nearest[1, :3]) == [0, 1, np.inf]
    assert {"acting_embedding.distances", "whitening.mean", "errors.mean"} <= curiosity.state_dict().keys()


@torch.no_grad()
def test_embedding_acts_as_it_was_until_refreshed():
    """Memories and what is compared with them are of one embedding: that with which an episode began."""
    run = play(small(), 20)
    curiosity, obs = run.curiosity, torch.as_tensor(run.actor.row["obs"])
    memory, old = curiosity.memory, curiosity.acting_embedding(obs)
    counts = memory.counts.copy()
    for x in curiosity.embedding.parameters():
        x += 1
    assert torch.equal(curiosity.acting_embedding(obs), old)
    curiosity.refresh()
    new = curiosity.acting_embedding(obs)
    assert not torch.allclose(new, old) and (memory.counts == counts).all()
    np.testing.assert_array_equal(memory.embed(obs), old)
    curiosity.begin(obs, np.array([False, True, False]))
    expected = torch.stack((old[0], new[1], old[2]))
    np.testing.assert_allclose(memory.embed(obs), expected, rtol=1e-6)
    assert memory.counts.tolist() == [counts[0], 1, counts[2]]
    np.testing.assert_allclose(memory.entries[1, 0], new[1], rtol=1e-6)


@torch.no_grad()
def test_places_of_an_episode_are_paid_once_however_often_the_embedding_changes():
    """Pacing to and fro over 20 places, in one episode, with a refresh every 30 steps and without."""
    paid = []
    for every in (30, 10**6):
        torch.manual_seed(0)
        curiosity = curiosity_of(rnd=False, memory_size=1000)
        curiosity.begin(at(0.0), np.ones(1, bool))
        total = []
        for t in range(400):
            place = float(abs((t + 1) % 40 - 20))
            total.append(curiosity(at(place))[0].item())
            if (t + 1) % every == 0:
                curiosity.refresh()
        paid.append(total)
    assert paid[0] == paid[1] and sum(paid[0][:40]) > 5 * sum(paid[0][360:])


@torch.no_grad()
def test_each_embedding_has_its_own_mean_distance():
    """A new one, whose distances are a hundred times as large, begins with the first of them."""
    curiosity = curiosity_of(num_envs=2, rnd=False)
    curiosity.begin(at(0.0, 0.0), np.ones(2, bool))
    for x in range(1, 50):
        curiosity(at(float(x), float(x)))
    old = curiosity.acting_embedding
    before = old.distances[0] / old.distances[1]
    curiosity.acting_embedding = itself(Times(10))
    curiosity.begin(at(0.0, 0.0), np.array([True, False]))
    reward, _, info = curiosity(at(1.0, 50.0))
    assert curiosity.acting_embedding.distances.tolist() == [100, 1] and reward[0] == pytest.approx(1)
    assert old.distances[0] / old.distances[1] == pytest.approx(before.item(), rel=0.1)


@torch.no_grad()
def test_a_new_embedding_begins_with_the_mean_distance_of_the_one_before():
    """For --evaluate of a checkpoint in which no episode has begun with it; its own distances outweigh it."""
    curiosity = curiosity_of(rnd=False)
    curiosity.begin(at(0.0), np.ones(1, bool))
    for x in range(1, 50):
        curiosity(at(float(x)))
    before = curiosity.acting_embedding.distances
    before = (before[0] / before[1]).item()
    curiosity.refresh()
    curiosity.eval().begin(at(0.0), np.ones(1, bool))
    *_, info = curiosity(at(1.0))
    assert before > 1 and info["distance"] == pytest.approx(before, rel=1e-4)
    curiosity.train().begin(at(0.0), np.ones(1, bool))
    nearest = curiosity.memory.nearest(curiosity.memory.embed(at(7.0)))
    *_, info = curiosity(at(7.0))
    assert info["distance"] == pytest.approx(nearest[0, 0], rel=1e-3)


@pytest.mark.parametrize("how", ngu_r2d2.Bonus.__args__)
def test_a_batch_of_one_step_has_a_finite_bonus(how):
    """Episodes of one step make such sequences, and --batch-sequences 1 such batches."""
    bonus = rescaled(torch.ones(3, 1), torch.tensor([[True], [False], [False]]), how)
    assert bonus.abs().max() <= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_goes_on_with_the_saved_replay(rank, monkeypatch):
    """It is that one's: the others fill theirs anew, or all would have the same steps."""
    run_dir = ngu_r2d2.train(small(save_replay=True))
    steps = torch.load(run_dir / "checkpoint.pt", weights_only=True)["replay"]["steps"]
    found, original = [], ngu_r2d2.Replay

    class Kept(original):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(ngu_r2d2, "Replay", Kept)
    monkeypatch.setattr(Actor, "step", probes.own_mistake)  # after everything is loaded
    monkeypatch.setattr(ngu_r2d2, "RANK", rank)
    args = ngu_r2d2.load_checkpoint(run_dir)["args"]
    args.resume, args.total_timesteps = str(run_dir), 528
    with pytest.raises(ZeroDivisionError):
        ngu_r2d2.train(args)
    assert found[0].steps == (steps if rank == 0 else 0) and steps > 100


class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@torch.no_grad()
def test_the_mean_distance_forgets():
    """Of the last hundred steps: after 500 of distance 1, 500 of distance 2 count alone."""
    curiosity = curiosity_of(rnd=False, neighbors=1, memory_size=1)
    curiosity.begin(at(0.0), np.ones(1, bool))
    for step, reach in ((500, 1.0), (500, 2.0)):
        for t in range(step):
            _, _, info = curiosity(at(reach * ((t + 1) % 2)))
        assert info["distance"] == pytest.approx(reach**2, rel=0.02)


def test_evaluation_leaves_all_statistics_as_they_are(monkeypatch):
    """So that an episode's result does not depend on how many were played before."""
    run_dir, made = ngu_r2d2.train(small()), []
    original = Curiosity.__init__

    def init(self, *args):
        original(self, *args)
        made.append(self)

    monkeypatch.setattr(Curiosity, "__init__", init)
    saved = ngu_r2d2.load_checkpoint(run_dir)
    args = saved["args"]
    args.evaluate, args.eval_episodes = str(run_dir), 20
    ngu_r2d2.evaluate(args)
    after = made[-1].state_dict()
    assert len(after) > 20 and after.keys() == saved["curiosity"].keys()
    assert all(torch.equal(x, saved["curiosity"][name]) for name, x in after.items())


@torch.no_grad()
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_alpha_does_not_depend_on_the_scale_of_errors(scale):
    """A constant beside the variance would damp small errors: with 1e-8, alpha is 1 for all of 1e-6."""
    curiosity, rng = curiosity_of(num_envs=4), np.random.default_rng(0)
    curiosity.begin(at(0.0, 0.0, 0.0, 0.0), np.ones(4, bool))
    alphas = []
    for _ in range(20):
        errors = torch.from_numpy(rng.exponential(size=4)).float() * scale
        curiosity.prediction_errors = lambda obs, errors=errors: errors
        alphas.append(curiosity(at(1.0, 1.0, 1.0, 1.0))[1])
    assert np.mean(alphas) == pytest.approx(1.35, abs=0.1)


def test_training_forgets_nothing_but_where_episodes_begin(monkeypatch):
    """Whether the embedding changes with every update or never: after 4 to 160 steps of each environment."""
    begun, original = [], Curiosity.begin
    for every in (1, 10**6):
        begins = []
        monkeypatch.setattr(
            Curiosity, "begin", lambda *args, to=begins: (to.append(args[2].tolist()), original(*args))
        )
        ngu_r2d2.train(small(embedding_every=every))
        begun.append(begins)
    first, *others = begun[0]
    assert begun[0] == begun[1] and all(first) and len(others) > 10 and all(map(any, others))


def test_training_refreshes_the_embedding_that_acts():
    states = []
    for every in (1, 10**6):
        state = ngu_r2d2.load_checkpoint(ngu_r2d2.train(small(embedding_every=every)))["curiosity"]
        pairs = [(state[f"embedding.{k}"], state[f"acting_embedding.{k}"]) for k in ("0.weight", "2.bias")]
        states.append(all(torch.equal(*pair) for pair in pairs))
    assert states == [True, False]


def test_things_on_a_grid_become_channels():
    """Three numbers a cell, below 11: 33 channels, a one where the number is; not so pixels and vectors."""
    grid = torch.randint(0, 11, (2, 3, 7, 7), dtype=torch.uint8)
    x = ngu_r2d2.scaled(grid)
    assert x.shape == (2, 33, 7, 7) and x.sum().item() == grid.numel()
    assert x[1, 11 + int(grid[1, 1, 4, 5]), 4, 5] == 1 and x[0, 22 + int(grid[0, 2, 0, 6]), 0, 6] == 1
    pixels = torch.randint(0, 256, (2, 1, 84, 84), dtype=torch.uint8)
    assert torch.equal(ngu_r2d2.scaled(pixels), pixels / 255)
    assert torch.equal(ngu_r2d2.scaled(torch.ones(2, 4, dtype=torch.float64)), torch.ones(2, 4))


@torch.no_grad()
def test_a_ball_moves_the_features_of_pixels():
    """Two pixels of a frame; with PyTorch's own initialization, their deviation is 0.0002."""
    torch.manual_seed(0)
    frames = torch.full((64, 1, 84, 84), 87 / 255)
    for frame, (row, column) in zip(frames, torch.randint(10, 74, (64, 2)).tolist(), strict=True):
        frame[0, row : row + 2, column] = 236 / 255
    assert ngu_r2d2.encoder((1, 84, 84), 128)(frames).std(0).mean() > 0.003


@torch.no_grad()
def test_maps_show_what_is_next_to_the_agent_wherever_it_is_and_where_it_is():
    x = torch.zeros(2, 1, 21, 21)
    x[0, 0, 5, 5] = x[1, 0, 10, 13] = 1.0
    a, b = disco.map_encoder((1, 21, 21), 8)[:5](x)
    assert torch.equal(a[:32], b[:32]) and len(a) == 3 * 32
    assert not torch.allclose(a[32:], b[32:], atol=1e-3)
    x *= 100  # a softmax of one place alone: its row and column, from -5 to 5
    peaks = disco.Peaks()(x)
    expected = torch.tensor([[100, -2.5, -2.5], [100, 0, 1.5]])
    torch.testing.assert_close(peaks, expected)


@torch.no_grad()
def test_alpha_is_one_plus_the_standardized_error():
    curiosity = curiosity_of(num_envs=4)
    errors = torch.tensor([1.0, 2.0, 3.0, 10.0])
    curiosity.prediction_errors = lambda obs: errors
    curiosity.begin(at(0.0, 0.0, 0.0, 0.0), np.ones(4, bool))
    reward, alpha, info = curiosity(at(1.0, 1.0, 1.0, 1.0))
    np.testing.assert_allclose(alpha, [1, 1, 1, 1 + 6 / errors.std(unbiased=False)], rtol=1e-4)
    np.testing.assert_allclose(reward, alpha, rtol=1e-5)  # the novelty is 1
    assert info["alpha_at_least"] == 0.75 and info["alpha_at_most"] == 0
    errors = torch.tensor([1.0, 2.0, 3.0, 1e6])
    for _ in range(30):
        _, alpha, info = curiosity(at(1.0, 1.0, 1.0, 1.0))
        errors = torch.tensor([2.0, 2.0, 2.0, 2.0])
    assert alpha.tolist() == [1] * 4  # what is not surprising adds nothing, however long one has trained


def test_statistics_are_of_arrivals_not_of_replayed_or_padded_steps():
    run_dir = ngu_r2d2.train(small(updates_per_rollout=3))
    state = ngu_r2d2.load_checkpoint(run_dir)
    assert state["updates"] > 30
    for name in ("whitening", "errors"):
        assert state["curiosity"][f"{name}.count"].item() == pytest.approx(480, abs=0.01)


def test_running_moments_forgets_beyond_its_horizon():
    norm, rng = ngu_r2d2.RunningMoments(horizon=100.0), np.random.default_rng(0)
    data = [torch.from_numpy(rng.normal(k // 50, 1 + k // 50, 10)) for k in range(150)]
    for x in data:
        norm.update(x)
    assert abs(norm.mean - 2) < 1 and 2 < norm.var.sqrt() < 4
    whole = ngu_r2d2.RunningMoments()
    for x in data:
        whole.update(x)
    everything = torch.cat(data)
    torch.testing.assert_close(whole.mean, everything.mean().float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.var, everything.var(unbiased=False).float(), rtol=1e-4, atol=1e-4)


def test_reward_belongs_to_the_arrival_and_is_stored():
    """Choice 1: the novelty of an observation is in the same row, the last one of an episode included."""
    run = play(small(rnd=False), 150)
    batch = everything(run.replay)
    assert len(run.replay.sequences) > 20
    for at in range(len(run.replay.sequences)):
        obs, r_int, steps = batch["obs"][:, at], batch["r_int"][:, at], batch["lengths"][at]
        for step in range(1, steps + 1):
            expected = [s["r_int"] for h in run.history for s in h if np.array_equal(s["arrival"], obs[step])]
            assert r_int[step] in expected and r_int[step] > 0


def test_novelty_is_that_of_the_arrival():
    """Choice 1: not of the observation that was acted on, nor of the next episode's first one."""
    run, seen = play(small(), 1), []
    original = run.curiosity.forward
    run.curiosity.forward = lambda obs: (seen.append(obs.copy()), original(obs))[1]
    for _ in range(40):
        with torch.no_grad():
            arrival, _, _ = run.actor.step(np.full(3, 0.5), run.rng)
        assert np.array_equal(seen.pop(), arrival["obs"]) and (arrival["obs"][:, 1] > 0).all()
        fed = np.where(arrival["ends"], 0, arrival["r_int"])
        np.testing.assert_array_equal(run.actor.row["r_int"], fed)


def test_embedding_and_predictor_train():
    """Inverse dynamics of Strange-v0, whose observation names the action, become certain; the errors fall."""
    torch.manual_seed(0)
    run = play(small(num_envs=8), 400)
    _, batch = run.replay.sample(64, run.rng)
    transitions = last_transitions(tensors(batch), 5)
    optimizer = torch.optim.Adam(run.curiosity.parameters(), lr=5e-3)
    before = [x.clone() for x in run.curiosity.rnd_target.parameters()]
    obs, _, mask = transitions
    errors = run.curiosity.prediction_errors(obs[1:][mask])  # as when acting: whitened, of arrivals
    assert run.curiosity.loss(*transitions)[1]["rnd_loss"].item() == pytest.approx(errors.mean().item())
    infos = []
    for _ in range(150):
        optimizer.zero_grad()
        loss, info = run.curiosity.loss(*transitions)
        loss.backward()
        optimizer.step()
        infos.append(info)
    assert info["inverse_accuracy"] > 0.95 and info["rnd_loss"] < infos[0]["rnd_loss"] / 3
    assert all(torch.equal(a, b) for a, b in zip(before, run.curiosity.rnd_target.parameters(), strict=True))


def test_last_transitions():
    """Against a loop over each sequence."""
    T, B = 6, 10
    mask = torch.zeros(T, B, dtype=torch.bool)
    mask[:, 0] = mask[2:5, 1] = mask[:1, 2] = True  # whole; from a burn-in to padding; a single step
    mask[:, 5:] = True
    obs = torch.arange((T + 1) * B).view(T + 1, B)
    actions = obs + 100
    lengths = torch.tensor([6, 5, 1, 0, 0, 6, 6, 6, 6, 6])
    batch = dict(mask=mask, lengths=lengths, obs=obs, last_actions=actions)
    for steps in (1, 2, 20):
        expected = set()
        for b in range(B):
            for t in mask[:, b].nonzero().flatten().tolist()[-steps:]:
                expected.add((obs[t, b].item(), obs[t + 1, b].item(), actions[t + 1, b].item()))
        found, taken, trained = last_transitions(batch, steps)
        assert found.shape == (min(steps, T) + 1, B) and taken.shape == trained.shape == (min(steps, T), B)
        parts = [x[trained].tolist() for x in (found[:-1], found[1:], taken)]
        assert len(parts[0]) == len(expected) and set(zip(*parts, strict=True)) == expected


@pytest.mark.parametrize("flag", ["train_embedding", "rnd"])
def test_what_is_not_trained_stays_as_it_was(flag):
    """Weight decay included; and with neither, both do."""
    for others in ({}, dict(train_embedding=False, rnd=False)):
        args = small(**{flag: False} | others)
        torch.manual_seed(args.seed)
        envs = make_env(args, 3)
        Agent(envs, args)
        names = dict(train_embedding=("embedding", "inverse"), rnd=("rnd_predictor",))[flag]
        then = Curiosity(envs, args).state_dict()
        now = ngu_r2d2.load_checkpoint(ngu_r2d2.train(args))["curiosity"]
        for name, x in then.items():
            if name.startswith(names):
                assert torch.equal(x, now[name]), name


def test_weights_of_the_inverse_model_decay_and_no_others():
    """By 1e-5 of each weight in the gradient, as table 6 of the paper gives L2 to the inverse model alone.

    A predictor of RND that decays would call things familiar that the agent has not seen.
    """
    saved = ngu_r2d2.load_checkpoint(ngu_r2d2.train(small(total_timesteps=24)))
    assert all(saved[name]["param_groups"][0]["weight_decay"] == 0 for name in ("auxiliary", "optimizer"))

    run = play(small(replay_steps=4000), 200)
    loss, info = run.curiosity.loss(*ngu_r2d2.last_transitions(tensors(everything(run.replay)), 3))
    decaying = [*run.curiosity.embedding.parameters(), *run.curiosity.inverse.parameters()]
    penalty = sum((x.double() ** 2).sum().item() for x in decaying) * 1e-5 / 2
    errors = info["inverse_loss"].double() + info["rnd_loss"].double()
    assert (loss.double() - errors).item() == pytest.approx(penalty, rel=1e-2) and penalty > 1e-4


# === Replay ===


def test_sequences_hold_episodes_in_order_and_lose_no_step():
    """Every step of every finished episode is trained on, at most twice; nothing crosses an end."""
    args = small(replay_steps=4000)
    run = play(args, 400)
    fields, trained = everything(run.replay), {}
    for at in range(len(run.replay.sequences)):
        obs, mask = fields["obs"][:, at], fields["mask"][:, at]
        steps = 1 + mask.nonzero()[0].max()
        assert mask.any() and mask[mask.argmax() : steps].all() and mask.argmax() in (0, args.burn_in)
        assert len(set(obs[: steps + 1, 0])) == 1  # one episode
        assert np.array_equal(obs[: steps + 1, 1], obs[0, 1] + np.arange(steps + 1))  # in order
        assert np.array_equal(fields["last_actions"][1 : steps + 1, at], obs[1 : steps + 1, 2])
        assert len(set(fields["policies"][: steps + 1, at])) == 1
        assert not fields["ends"][:steps, at].any() and not obs[steps + 1 :].any()
        assert mask[0] == (obs[0, 1] == 0) == fields["starts"][0, at] and not fields["starts"][1:, at].any()
        for t in mask.nonzero()[0]:
            key = (obs[t, 0], obs[t, 1], obs[t + 1, 2])
            trained[key] = trained.get(key, 0) + 1
    episodes = {e for e, t, _ in trained if e < 13}
    assert episodes == set(range(1, 13))
    for episode in episodes:
        assert {t for e, t, _ in trained if e == episode} == set(range(int(episode)))
    repeated = everything(play(small(replay_steps=4000, period=6), 400).replay)
    assert repeated["ends"].sum() > 30 and repeated["mask"].sum() <= 400 * 3  # period = unroll: none twice


def test_stored_sequences_give_the_values_that_the_actor_saw():
    """Inputs, stored states and resets of training are those of acting, at every step that is trained on."""
    run = play(small(replay_steps=4000), 300)
    batch = tensors(everything(run.replay))
    inputs = {k: batch[k] for k in ("last_actions", "r_ext", "r_int", "policies", "starts")}
    with torch.no_grad():
        features = run.agent.features(batch["obs"].flatten(0, 1))
        inputs["features"] = features.unflatten(0, batch["ends"].shape)
        q, _ = run.agent(inputs, batch["state"])
    acted = {}
    for steps in run.history:
        for step in steps:
            acted.setdefault(tuple(step["obs"]), []).append(step["q"])
    compared = 0
    for t, at in batch["mask"].nonzero().tolist():
        close = [torch.allclose(q[t, at], x, atol=1e-5) for x in acted[tuple(batch["obs"][t, at].tolist())]]
        assert any(close), (t, at)
        compared += 1
    assert compared > 500


def test_last_reward_has_a_weight_and_the_input_none():
    for weight in (1.0, 5.0):
        run = play(small(last_reward_weight=weight, replay_steps=4000), 200)
        fields, ended = everything(run.replay), 0
        for at in range(len(run.replay.sequences)):
            rewards, r_ext = fields["rewards"][:, at].copy(), fields["r_ext"][:, at]
            steps = 1 + fields["mask"][:, at].nonzero()[0].max()
            if fields["ends"][steps, at]:
                ended += 1
                assert rewards[steps] == pytest.approx(weight * r_ext[steps])
                rewards[steps] = r_ext[steps]
            np.testing.assert_array_equal(rewards, r_ext)
        assert ended > 20


def test_priorities_draw_and_weigh():
    run = play(small(replay_steps=60), 100)
    replay, size = run.replay, len(run.replay.sequences)
    assert size >= 6 and len(replay.priorities) == size
    replay.priorities[:] = np.arange(1, size + 1)
    rng, counts = np.random.default_rng(0), np.zeros(size)
    for _ in range(500):
        at, batch = replay.sample(8, rng)
        counts += np.bincount(at, minlength=size)
        p = np.arange(1, size + 1) ** 0.9 / (np.arange(1, size + 1) ** 0.9).sum()
        weights = (size * p[at]) ** -0.6
        np.testing.assert_allclose(batch["weights"], weights / weights.max(), rtol=1e-5)
        np.testing.assert_array_equal(batch["obs"], everything(replay)["obs"][:, at])
    np.testing.assert_allclose(counts / counts.sum(), p, atol=0.02)


def sequences_by_hand(args, environments):
    """Of all rows that an environment has had: (environment, first row) -> rows, state before, age in rows.

    Written by loops over its episodes: one begins every period; of an episode's last ones, that alone which
    has steps to train on that are not in the one before.
    """
    L, found = args.length, {}
    for n, rows in enumerate(environments):
        begins = [k for k, row in enumerate(rows) if row["starts"]] + [len(rows)]
        for begin, end in zip(begins, begins[1:], strict=False):
            is_over = rows[end - 1].get("ends", False)
            for first in range(begin, end, args.period):
                steps = min(L, end - 1 - first)
                shared = 0 if first == begin else L - args.period
                if steps == L or is_over and steps > shared:
                    found[n, first] = rows[first : first + steps + 1], len(rows) - first
                if steps < L or first + L == end - 1 and is_over:
                    break
    return found


@pytest.mark.parametrize("replay_steps", [60, 69, 100, 600])
@pytest.mark.parametrize("flags", [{}, dict(period=6), dict(burn_in=0, period=1), dict(unroll=4, period=3)])
def test_table_has_what_a_copy_of_each_sequence_would_have(replay_steps, flags):
    """Rings of 20 and more rows, written round many times: the sequences whose rows are all there, no other.

    Rows, padding, stored states and masks, against lists of all rows.
    """
    args, compared = small(replay_steps=replay_steps, **flags), []
    run = play(args, 200, check=partial(check_table, args, compared))
    assert run.replay.written.min() > replay_steps // 3 and len(compared) > 10


def check_table(args, compared, replay, environments):
    if len(environments[0]) < 190:
        return
    compared.append(len(replay.sequences))
    found = sequences_by_hand(args, environments)
    there = {key: rows for key, (rows, age) in found.items() if age <= args.replay_steps // 3}
    batch = everything(replay)
    assert sorted(there) == sorted((n, first) for n, first, _ in replay.sequences.tolist())
    assert len(replay.priorities) == len(there) >= 3 and (replay.priorities > 0).all()
    for at, (n, first, steps) in enumerate(replay.sequences.tolist()):
        rows = there[n, first]
        assert steps == len(rows) - 1 == batch["lengths"][at]
        for name in ("obs", "last_actions", "r_ext", "r_int", "policies", "starts", "mu", "alpha", "ends"):
            expected = np.stack([row.get(name, np.zeros(())) for row in rows])
            np.testing.assert_array_equal(batch[name][: steps + 1, at], expected, name)
            assert not batch[name][steps + 1 :, at].any()
        is_first = rows[0]["starts"]
        trained = [t >= (0 if is_first else args.burn_in) and t < steps for t in range(args.length)]
        assert batch["mask"][:, at].tolist() == trained
        if not is_first:
            np.testing.assert_array_equal(batch["state"][:, at], rows[0]["state"])


def test_sequences_keep_their_priorities_when_others_leave():
    given, left = {}, set()

    def check(replay, _):
        keys = [tuple(key) for key in replay.sequences.tolist()]
        assert all(given.get(key, p) == p for key, p in zip(keys, replay.priorities.tolist(), strict=True))
        left.update(given.keys() - set(keys))
        replay.priorities[:] = np.random.default_rng(len(given)).uniform(1, 2, len(keys))
        given.update(zip(keys, replay.priorities.tolist(), strict=True))

    play(small(replay_steps=100), 100, check=check)
    assert len(left) > 20


def test_unseen_sequences_have_the_largest_priority():
    run = play(small(), 20)
    run.replay.priorities[:] = np.linspace(1, 3, len(run.replay.sequences))
    before, row = len(run.replay.sequences), {name: x.copy() for name, x in run.arrival.items()}
    row["ends"][:] = True
    run.replay.append(run.actor.row, row, run.actor.state.numpy())
    assert len(run.replay.sequences) > before and (run.replay.priorities[before:] == 3).all()
    assert (run.replay.priorities[:before] == np.linspace(1, 3, before)).all()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_cross_mixture(share):
    """That share of sequences is trained on for a policy drawn anew; the replay keeps the one that played."""
    run, rng, drawn = play(small(cross_mixture=share), 100), np.random.default_rng(0), []
    played = run.replay.rows["policies"].copy()
    first = everything(run.replay)["policies"][0]
    run.replay.priorities[:] = 1.0
    for _ in range(500):
        at, batch = run.replay.sample(8, rng)
        other = batch["policies"][0] != first[at]
        assert (batch["policies"][:, other] == batch["policies"][0, other]).all()
        drawn.append(other)
    assert np.mean(drawn) == pytest.approx(share * 2 / 3, abs=0.03)
    np.testing.assert_array_equal(run.replay.rows["policies"], played)


# === Loss ===


class Fixed(torch.nn.Module):
    """An agent with given action values (T, B, A)."""

    def __init__(self, q):
        super().__init__()
        self.q, self.at, self.num_actions, self.seen = torch.nn.Parameter(q), 0, q.shape[-1], []

    def features(self, obs):
        return torch.zeros(len(obs), 8)

    def forward(self, inputs, state):
        T = len(inputs["features"])
        self.seen.append(inputs)
        q = self.q[self.at : self.at + T]
        self.at = (self.at + T) % len(self.q)
        return q, state


def loss_case(seed=0, B=3, **flags):
    args = small(num_policies=2, **flags)
    L, rng = args.length, np.random.default_rng(seed)
    float_ = lambda *size: torch.from_numpy(rng.normal(size=size)).float()  # noqa: E731
    batch = {k: float_(L + 1, B) for k in ("r_ext", "rewards", "r_int")} | dict(obs=float_(L + 1, B, 3))
    batch |= dict(last_actions=torch.from_numpy(rng.integers(3, size=(L + 1, B))))
    batch |= dict(policies=torch.tensor([0, 1, 1])[:B].expand(L + 1, B), alpha=torch.ones(L + 1, B))
    batch |= dict(
        mu=torch.from_numpy(rng.uniform(0.2, 1, (L + 1, B))).float(), ends=torch.zeros(L + 1, B) > 0
    )
    batch |= dict(discounts=torch.ones(L + 1, B), mask=torch.ones(L, B) > 0, state=torch.zeros(2, B, 8))
    batch |= dict(weights=torch.ones(B), starts=torch.zeros(L + 1, B) > 0, lengths=torch.full((B,), L))
    online, target = float_(L + 1, B, 3), float_(L + 1, B, 3)
    return args, batch, online, target


def by_hand(args, batch, online, target):
    """Targets (L, B) after rescaling, by loops: Retrace or n steps of the inverse of the target network."""
    L, B = batch["mask"].shape
    betas, gammas = policy_family(2, args.beta, args.gamma_max, args.gamma_min)
    q = h_inv(target.double(), args.h_eps)
    targets = torch.zeros(L, B, dtype=torch.float64)
    for b in range(B):
        policy = batch["policies"][0, b]
        best = online[:, b].argmax(-1)
        pi = torch.full((L + 1, 3), args.eval_epsilon / 3, dtype=torch.float64)
        pi[range(L + 1), best] += 1 - args.eval_epsilon
        reward = (batch["rewards"] + betas[policy] * batch["r_int"])[:, b].double()
        for t in range(L):
            a = batch["last_actions"][:, b]
            if args.target == "nstep":
                total, factor = 0.0, 1.0
                for k in range(t, min(t + args.n_step, L)):
                    total, factor = total + factor * reward[k + 1], factor * gammas[policy]
                targets[t, b] = total + factor * q[k + 1, b, best[k + 1]]
                continue
            total, factor = q[t, b, a[t + 1]].clone(), 1.0
            for s in range(t, L):
                if s > t:
                    ratio = pi[s, a[s + 1]] / batch["mu"][s + 1, b]
                    factor = factor * args.retrace_lambda * min(1, ratio)
                delta = reward[s + 1] + gammas[policy] * (pi[s + 1] * q[s + 1, b]).sum() - q[s, b, a[s + 1]]
                total, factor = total + factor * delta, factor * gammas[policy]
            targets[t, b] = total
    return h(targets, args.h_eps)


@pytest.mark.parametrize("kind", ["retrace", "nstep"])
def test_loss_by_hand(kind):
    """Choice 8: pi is epsilon-greedy of the online network; double Q; each sequence's own beta and gamma."""
    args, batch, online, target = loss_case(target=kind)
    batch["weights"] = torch.tensor([1.0, 0.5, 0.1])
    family = policy_family(2, args.beta, args.gamma_max, args.gamma_min).float()
    agents = Fixed(online), Fixed(target)
    loss, priorities, info = q_loss(*agents, batch, family, args)
    for agent in agents:  # sees the rewards as the actor saw them, not those of the targets
        for name in ("last_actions", "r_ext", "r_int", "policies"):
            assert torch.equal(torch.cat([rows[name] for rows in agent.seen]), batch[name])
    targets = by_hand(args, batch, online, target)
    taken = online[:-1].gather(-1, batch["last_actions"][1:, :, None]).squeeze(-1)
    errors = targets - taken
    expected = (batch["weights"] * 0.5 * (errors**2).sum(0)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    np.testing.assert_allclose(
        priorities, (0.9 * errors.abs().max(0)[0] + 0.1 * errors.abs().mean(0)), rtol=1e-3
    )
    assert info["target"].item() == pytest.approx(targets.mean().item(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["retrace", "nstep"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_padding_counts_nowhere_and_a_time_limit_is_no_end(kind, is_cut):
    """Choices 6 and 7: whatever is beyond the end changes nothing; only a cut episode values its last row."""
    args, batch, online, target = loss_case(target=kind, bonus="min-max")
    steps, family = 5, policy_family(2, 0.3, 0.997, 0.99).float()
    batch["mask"][steps:], batch["lengths"][:], batch["ends"][steps] = False, steps, True
    batch["discounts"][steps] = float(is_cut)
    results = []
    for scale in (0.0, 100.0):
        changed = {k: x.clone() for k, x in batch.items()}
        for name in ("rewards", "r_int", "r_ext"):
            changed[name][steps + 1 :] = scale
        o, t = online.clone(), target.clone()
        o[steps + 1 :], t[steps + 1 :] = scale, scale
        loss, priorities, info = q_loss(Fixed(o), Fixed(t), changed, family, args)
        results.append(torch.stack((loss, *priorities, *info.values())))
    assert torch.equal(*results)
    t = target.clone()
    t[steps] += 1  # the value of the last observation
    loss, *_ = q_loss(Fixed(online), Fixed(t), batch, family, args)
    assert (loss.item() != results[0][0].item()) == is_cut


@pytest.mark.parametrize("kind", ["retrace", "nstep"])
def test_the_last_step_of_an_episode_has_its_bonus(kind):
    args, batch, online, target = loss_case(target=kind)
    steps, family = 5, policy_family(2, 0.3, 0.997, 0.99).float()
    batch["mask"][steps:], batch["ends"][steps], batch["discounts"][steps] = False, True, 0
    batch["lengths"][:] = steps
    losses = []
    for at in (None, steps, steps + 1):
        r_int = batch["r_int"].clone()
        if at:
            r_int[at] += 1
        losses.append(q_loss(Fixed(online), Fixed(target), batch | dict(r_int=r_int), family, args)[0].item())
    assert losses[0] == losses[2] and abs(losses[1] - losses[0]) > 1e-3


def test_stored_states_are_those_before_sequences_and_none_at_the_start_of_an_episode():
    """Whatever is stored where an episode starts; and the target network begins there, too."""
    args, batch, *_ = loss_case()
    envs = make_env(args, 3)
    torch.manual_seed(0)
    agents = Agent(envs, args), Agent(envs, args)
    batch["starts"][0, 1] = True
    before = ngu_r2d2.q_values(*agents, batch, args)
    for n in range(3):
        batch["state"] = torch.zeros(2, 3, 8)
        batch["state"][:, n] = 1.0
        for q, other in zip(before, ngu_r2d2.q_values(*agents, batch, args), strict=True):
            is_same = torch.isclose(q, other).all(-1).all(0).tolist()
            assert is_same == [k != n or k == 1 for k in range(3)]


def test_no_gradient_reaches_the_burn_in():
    """Of sequences that are not the first of an episode; the first are trained on from row 0."""
    args, batch, *_ = loss_case(burn_in=3)
    envs = make_env(args, 3)
    torch.manual_seed(0)
    agent, target = Agent(envs, args), Agent(envs, args)
    family = policy_family(2, 0.3, 0.997, 0.99).float()
    batch["mask"][:3, 1:] = False
    batch["obs"].requires_grad_()
    q_loss(agent, target, batch, family, args)[0].backward()
    reached = batch["obs"].grad.abs().sum(-1) > 0
    assert reached[:9, 0].all() and not reached[:3, 1:].any() and reached[3:9, 1:].all()


def test_observations_up_to_the_last_count_and_no_padding():
    """Whatever stands there; the last one of an episode that was cut counts."""
    args, batch, *_ = loss_case(burn_in=3)
    envs, steps = make_env(args, 3), 5
    torch.manual_seed(0)
    agent, target = Agent(envs, args), Agent(envs, args)
    family = policy_family(2, 0.3, 0.997, 0.99).float()
    batch["mask"][steps:, 0], batch["mask"][:3, 1], batch["ends"][steps, 0] = False, False, True
    batch["lengths"][0] = steps

    def loss_with(t, n, value):
        obs = batch["obs"].clone()
        obs[t, n] = value
        return q_loss(agent, target, batch | dict(obs=obs), family, args)[0].item()

    loss = q_loss(agent, target, batch, family, args)[0].item()
    for n, rows in (0, range(steps + 1)), (1, range(args.length + 1)):
        assert all(loss_with(t, n, 1.5) != loss for t in rows), n
    assert loss_with(slice(steps + 1, None), 0, 1.5) == loss


def test_reward_of_a_transition_does_not_depend_on_its_batch():
    novelty = torch.rand(5, 4)
    alone = rescaled(novelty[:, :1], torch.ones(5, 1) > 0, "calibrated")
    assert torch.equal(rescaled(novelty, torch.ones(5, 4) > 0, "calibrated")[:, :1], alone)


# === Runs ===


def test_run_logs_what_it_is_made_of():
    run_dir = ngu_r2d2.train(small(num_policies=2, total_timesteps=2400, updates_per_rollout=1))
    for tag in (
        *("losses/td_loss", "losses/inverse_accuracy", "losses/rnd_loss", "losses/intrinsic_reward"),
        *("curiosity/alpha", "curiosity/alpha_at_least", "curiosity/alpha_at_most", "curiosity/distance"),
        *("curiosity/memory", "curiosity/novelty", "curiosity/reward", "charts/replay_ratio", "charts/SPS"),
        *("replay/sequences", "replay/priority_mean", "replay/priority_std", "replay/priority_max"),
    ):
        assert len(scalars(run_dir, tag)) > 90 and np.isfinite(scalars(run_dir, tag)).all(), tag
    by_policy = [scalars(run_dir, f"policies/return_{k}") for k in range(2)]
    assert all(by_policy) and sorted(by_policy[0] + by_policy[1]) == sorted(
        scalars(run_dir, "charts/episodic_return")
    )
    for _, episodic_return in by_policy[0]:  # raw: 1 + 2 + ... + n tenths
        assert any(episodic_return == pytest.approx(n * (n + 1) / 20, rel=1e-5) for n in range(1, 30))
    assert 4 * 6 / 24 * 0.5 < scalars(run_dir, "charts/replay_ratio")[-1][1] < 4 * 9 / 24
    ngu_r2d2.train(
        replace(ngu_r2d2.load_checkpoint(run_dir)["args"], resume=str(run_dir), total_timesteps=2640)
    )
    assert 4 * 6 / 24 * 0.5 < scalars(run_dir, "charts/replay_ratio")[-1][1] < 4 * 9 / 24  # of its own steps


def test_flags_change_both_optimizers_of_a_resumed_run():
    """A checkpoint has their numbers of before in it."""
    run_dir, used = ngu_r2d2.train(small()), set()
    args = replace(ngu_r2d2.load_checkpoint(run_dir)["args"], resume=str(run_dir), total_timesteps=528)

    def note(optimizer, *_):
        (group,) = optimizer.param_groups
        used.add((group["lr"], group["eps"]))

    hook = register_optimizer_step_pre_hook(note)
    ngu_r2d2.train(replace(args, learning_rate=0.1, auxiliary_lr=0.2, adam_eps=0.3))
    hook.remove()
    assert used == {(0.1, 0.3), (0.2, 0.3)}


def test_r2d2_alone_has_no_intrinsic_reward(monkeypatch):
    for name in ("forward", "begin", "loss"):  # None, so that a call fails
        monkeypatch.setattr(Curiosity, name, None)
    run_dir = ngu_r2d2.train(small(num_policies=1, beta=0.0))
    assert not scalars(run_dir, "curiosity/reward")
    assert {v for _, v in scalars(run_dir, "losses/intrinsic_reward")} == {0.0}


@pytest.mark.parametrize("kind", ["retrace", "nstep"])
@pytest.mark.parametrize("bonus", ngu_r2d2.Bonus.__args__)
def test_every_combination_trains(kind, bonus):
    run_dir = ngu_r2d2.train(small(target=kind, bonus=bonus, burn_in=0))
    assert np.isfinite(scalars(run_dir, "losses/td_loss")).all() and scalars(run_dir, "losses/td_loss")


@pytest.mark.parametrize("every,is_same", [(1, True), (10**6, False)])
def test_target_network_is_the_agent_of_some_updates_ago(every, is_same):
    run_dir = ngu_r2d2.train(small(target_every=every))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    same = [torch.equal(x, state["target_agent"][name]) for name, x in state["agent"].items()]
    assert state["updates"] > 20 and len(same) > 10
    assert all(same) if is_same else not all(same)


@pytest.mark.parametrize("save_replay", [False, True])
def test_replay_is_saved_on_demand_and_else_built_anew(save_replay):
    run_dir = ngu_r2d2.train(small(save_replay=save_replay))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert ("replay" in state) == save_replay
    args = ngu_r2d2.load_checkpoint(run_dir)["args"]
    args.resume, args.total_timesteps = str(run_dir), 528
    ngu_r2d2.train(args)
    sequences = dict(scalars(run_dir, "replay/sequences"))
    assert (sequences[504] > sequences[480] // 2) == save_replay


def test_a_saved_replay_goes_on_where_it_was(tmp_path):
    """Written round or not, it draws the same batches, and what is played next begins new sequences."""
    for replay_steps in (75, 4000):
        run = play(small(replay_steps=replay_steps), 200)
        run.replay.priorities[:] = np.linspace(1, 2, len(run.replay.sequences))
        torch.save(run.replay.state_dict(), tmp_path / "replay.pt")
        loaded = Replay(run.args, run.envs)
        loaded.load_state_dict(torch.load(tmp_path / "replay.pt", weights_only=True))
        assert loaded.steps == run.replay.steps == 600
        replays, total = (run.replay, loaded), len(loaded.sequences)
        for step in range(15):
            np.testing.assert_equal(*(replay.sample(8, np.random.default_rng(0)) for replay in replays))
            for replay in replays:
                row = run.actor.row | dict(starts=np.full(3, step == 0))
                replay.append(row, run.arrival | dict(ends=np.zeros(3, bool)), run.actor.state.numpy())
        np.testing.assert_equal(*(everything(replay) for replay in replays))
        assert len(loaded.sequences) == total + 2 * 3 or replay_steps == 75


@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "MiniGrid-Empty-5x5-v0"])
def test_images_train(env_id):
    run_dir = ngu_r2d2.train(small(env_id=env_id, total_timesteps=240))
    assert scalars(run_dir, "losses/td_loss") and scalars(run_dir, "curiosity/alpha")
    actions = ngu_r2d2.load_checkpoint(run_dir)["agent"]["advantage.2.bias"]
    assert len(actions) == (18 if env_id.startswith("Pong") else 7)


def test_replay_takes_the_memory_that_it_says(capsys):
    """The line at the start, against the arrays as they are filled."""
    args = small(env_id="PongNoFrameskip-v4", total_timesteps=24)
    ngu_r2d2.train(args)
    steps, megabytes = map(
        int, capsys.readouterr().err.split("replay: ")[1].split(" MB")[0].split(" steps, ")
    )
    assert steps == 3 * (400 // 3) and megabytes == pytest.approx(steps * 84 * 84 / 1e6, rel=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_replay_takes_the_memory_that_it_says():
    """Of frames of Atari, against the pages that the process has more than before it."""
    code = """
import gymnasium, numpy as np, resource, ngu_r2d2
from types import SimpleNamespace
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
N, args = 16, ngu_r2d2.Args(replay_steps=20_000)
zeros, ones = np.zeros(N, np.float32), np.ones(N, bool)
row = dict(obs=np.ones((N, 1, 84, 84), np.uint8), last_actions=zeros.astype(int), r_ext=zeros, r_int=zeros)
row |= dict(starts=ones, policies=zeros.astype(int))
before, state = resident(), np.ones((2, N, args.hidden_size), np.float32)
space = gymnasium.spaces.Box(0, 255, (1, 84, 84), np.uint8)
replay = ngu_r2d2.Replay(args, SimpleNamespace(num_envs=N, single_observation_space=space))
arrival = row | dict(starts=~ones, mu=zeros, alpha=zeros, discounts=zeros, ends=~ones)
while replay.written[0] < 2 * replay.size:
    replay.append(arrival if replay.written[0] else row, arrival, state)  # one episode
print(resident() - before, replay.num_bytes)
"""
    environment = os.environ | dict(PYTHONPATH=str(Path(__file__).parent.parent))
    taken, said = map(int, subprocess.check_output([sys.executable, "-c", code], env=environment).split())
    assert said > 140e6 and taken == pytest.approx(said, rel=0.1)


def test_a_reward_that_is_not_finite_ends_the_run_before_it_is_learned_from():
    """The replay, and with --save-replay the checkpoint, would keep it."""
    args = small_args(ngu_r2d2, env_id="NanReward-v0", total_timesteps=640, learning_starts=600, save_every=1)
    with pytest.raises(SystemExit, match="step 192: not finite: .*'reward': nan.*of iteration 2$"):
        ngu_r2d2.train(args)


def test_a_loss_that_is_not_finite_ends_the_run_after_its_updates(monkeypatch):
    """The second update of the rollout still finds numbers among the priorities."""
    original = ngu_r2d2.q_loss

    def broken(*args):
        loss, priorities, losses = original(*args)
        return loss * torch.nan, priorities * torch.nan, losses | dict(td_loss=loss.detach() * torch.nan)

    monkeypatch.setattr(ngu_r2d2, "q_loss", broken)
    with pytest.raises(SystemExit, match="not finite: .*'losses/td_loss': nan"):
        ngu_r2d2.train(small(updates_per_rollout=2))


def test_the_replay_must_hold_two_sequences_of_each_environment():
    args = small()
    least = 2 * (args.length + 1) * args.num_envs
    ngu_r2d2.check(replace(args, replay_steps=least))
    with pytest.raises(ValueError, match="replay_steps must hold two sequences"):
        ngu_r2d2.check(replace(args, replay_steps=least - 1))


def test_the_look_at_a_grid_is_not_filmed(monkeypatch):
    """check_spaces() resets a grid to see its numbers, but not where that would be the first video."""
    resets, original = [], gym.wrappers.RecordVideo.reset
    monkeypatch.setattr(
        gym.wrappers.RecordVideo, "reset", lambda self, **x: resets.append(1) or original(self, **x)
    )
    args = small(env_id="MiniGrid-Empty-5x5-v0")
    make_env(args, 1, Path("videos")).close()
    assert not resets
