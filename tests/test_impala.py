"""impala_vtrace.py: V-trace by its definition, what actors send, replay, tasks, and how a run can end."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import scalars, steps_of
from forks import run
from torch.utils.tensorboard import SummaryWriter

import impala_vtrace
from benchmark import human
from impala_vtrace import Agent, Args, Exchange, Group, Replay, impala_loss, make_env, vtrace

ROOT = Path(__file__).parent.parent
INF = float("inf")


def actors_alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("actor")]


def small(**flags):
    """Two groups of two environments; an update is one segment of each."""
    flags = dict(env_id="Count-v0", num_envs=4, num_steps=8, batch_segments=4, log_every=1) | flags
    return Args(**dict(total_timesteps=32 * 10, sync=True, device="cpu") | flags)


# === V-trace ===


def inputs(T=6, N=3, scale=1.0, done=0.2, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(scale=scale, size=(T, N)) for _ in range(4)]
    behavior, target, rewards, values = (torch.from_numpy(x) for x in arrays)
    discounts = torch.from_numpy(0.9 * (rng.random((T, N)) > done))
    return behavior, target, rewards, discounts, values, torch.from_numpy(rng.normal(size=N))


def by_definition(behavior, target, rewards, discounts, values, last, rho_bar, c_bar, lam):
    """Equation 1: v_s = V(x_s) + sum over t >= s of gamma^(t-s) (product of c_i, s <= i < t) delta_t."""
    T, N = rewards.shape
    ratio = np.exp((target - behavior).numpy())
    rho, c = (np.minimum(ratio, bar) for bar in (rho_bar, c_bar))
    r, g, V = rewards.numpy(), discounts.numpy(), np.vstack((values.numpy(), last.numpy()))
    vs, advantages = np.vstack((V[:-1], V[-1:])), np.zeros((T, N))
    for n in range(N):
        for s in range(T):
            for t in range(s, T):
                weight = np.prod([g[i, n] * lam * c[i, n] for i in range(s, t)])
                vs[s, n] += weight * rho[t, n] * (r[t, n] + g[t, n] * V[t + 1, n] - V[t, n])
        for s in range(T):
            advantages[s, n] = rho[s, n] * (r[s, n] + g[s, n] * vs[s + 1, n] - V[s, n])
    return vs[:-1], advantages


def of_logprobs(behavior, target, *x):
    """V-trace by default without shortened traces, clipped at 1."""
    bars = x[4:] or (1.0, 1.0, 1.0)
    return vtrace((target - behavior).exp(), *x[:4], *bars)


@pytest.mark.parametrize("bars", [(1.0, 1.0, 1.0), (2.0, 0.5, 0.9), (INF, INF, 1.0), (1.0, INF, 0.0)])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_vtrace_is_equation_1(bars, T):
    x = inputs(T)
    for ours, theirs in zip(of_logprobs(*x, *bars), by_definition(*x, *bars), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_vtrace_on_policy_is_the_n_step_return():
    _, target, rewards, discounts, values, last = inputs(done=0)
    vs, advantages = of_logprobs(target, target, rewards, discounts, values, last)
    value = last
    for t in reversed(range(len(rewards))):
        value = rewards[t] + discounts[t] * value
        torch.testing.assert_close(vs[t], value)
        torch.testing.assert_close(advantages[t], value - values[t])


def test_vtrace_by_hand():
    """Two steps with ratios 2 and 1/2: deltas 1 (1 + .9 * 2 - 1) = 1.8 and .5 (0 + .9 * 4 - 2) = .8."""
    ratio, rewards = torch.tensor([[2.0], [0.5]]), torch.tensor([[1.0], [0.0]])
    values, last = torch.tensor([[1.0], [2.0]]), torch.tensor([4.0])
    vs, advantages = vtrace(ratio, rewards, torch.full((2, 1), 0.9), values, last, 1.0, 1.0, 1.0)
    torch.testing.assert_close(vs, torch.tensor([[1 + 1.8 + 0.9 * 0.8], [2.8]]))
    torch.testing.assert_close(advantages, torch.tensor([[1 + 0.9 * 2.8 - 1], [0.5 * (0.9 * 4 - 2)]]))


def test_vtrace_does_not_see_beyond_the_end_of_an_episode():
    x = list(inputs(T=5, done=0))
    x[3][2] = 0  # step 2 ends an episode in every environment
    before = of_logprobs(*x)
    for k in (2, 4):  # rewards and values of the next episode
        x[k] = x[k].clone()
        x[k][3:] += 100
    for ours, theirs in zip(of_logprobs(*x), before, strict=True):
        assert torch.equal(ours[:3], theirs[:3]) and not torch.equal(ours[3:], theirs[3:])


def test_vtrace_survives_large_ratios_and_has_no_gradient():
    behavior, target, *rest = inputs(scale=1e3)
    rest[2].requires_grad_()
    results = of_logprobs(behavior, target, *rest)
    assert all(x.isfinite().all() and not x.requires_grad for x in results)


# === What actors send ===


class Walk(gym.Env):
    """Observes 10 episode + step; the reward is action + step / 10; episodes of 3, 4, 5, ... steps."""

    observation_space, action_space = (
        gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        gym.spaces.Discrete(2),
    )
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def observe(self):
        return np.array([10 * self.episode + self.t, 1], np.float32)

    def step(self, action):
        self.t += 1
        cut = self.t >= 2 + self.episode
        return self.observe(), action + self.t / 10, False, cut, {}


gym.register("Walk-v0", Walk)


def new_group(env_id, args, size=2):
    return Group(env_id, make_env(env_id, args, size))


def collected(args, count=4):
    """Segments of the first group of an actor with a random agent, and the agent."""
    torch.manual_seed(1)
    groups, exchange = [new_group(args.env_id, args, args.group_size) for _ in range(2)], Exchange()
    agent = Agent(groups[0].envs, args)
    for k, group in enumerate(groups):
        group.reset(seed=1 + k * args.group_size)
        group.state = agent.initial_state(args.group_size)
    for version in range(count):
        impala_vtrace.publish(agent, version, exchange, args)
        impala_vtrace.play(groups, exchange, args)
    both = [exchange.queue.get() for _ in range(2 * count)]
    assert [segments.version for segments in both[::2]] == list(range(count))
    return both[::2], agent


def tensors(segments):
    """As the learner has them, with nothing beyond time limits."""
    data = {name: torch.from_numpy(x.copy()) for name, x in segments.data.items() if name != "final_obs"}
    return data | dict(bootstraps=torch.zeros_like(data["last_rewards"]))


def test_segments_pair_every_action_with_its_reward_and_end():
    found, _ = collected(small(env_id="Walk-v0", num_steps=7))
    for before, after in zip(found, found[1:], strict=False):
        for name in ("obs", "last_actions", "last_rewards", "starts"):  # the last row is the next one's first
            assert np.array_equal(before.data[name][-1], after.data[name][0]), name
    data = {
        k: np.concatenate([u.data[k][:-1] for u in found])[:, 0] for k in ("obs", "last_actions", "starts")
    }
    rewards = np.concatenate([u.data["last_rewards"][:-1] for u in found])[:, 0]
    step = data["obs"][:, 0].astype(int) % 10
    episode = data["obs"][:, 0].astype(int) // 10
    assert (data["starts"] == (step == 0)).all() and data["starts"].sum() >= 5
    for t in range(1, len(step)):
        taken = step[t] if step[t] else 1 + episode[t]  # the last step of the episode before
        np.testing.assert_allclose(rewards[t], data["last_actions"][t] + taken / 10, rtol=1e-6)
    episodes = [e for u in found for e in u.episodes]
    lengths = [episode["charts/episodic_length"] for _, episode in episodes]
    assert lengths[::2] == [3, 4, 5, 6, 7][: len(episodes) // 2]
    ends = [7 * k + t for k, u in enumerate(found) for t, _ in u.episodes][::2]
    assert ends == np.flatnonzero(data["starts"])[1:].tolist()[: len(ends)]


@pytest.mark.parametrize("lstm", [False, True])
def test_learner_recomputes_what_the_actor_did(lstm):
    """The same parameters: ratio 1 for every step, with the LSTM's state reset where episodes begin."""
    found, agent = collected(small(env_id="Walk-v0", num_steps=7, lstm=lstm))
    for segments in found:
        data = tensors(segments)
        with torch.no_grad():
            dist, values, state = agent(data, data["state"])
        logprobs = dist.log_prob(data["last_actions"].roll(-1, 0))[:-1]
        torch.testing.assert_close(logprobs, data["logprobs"])
        _, info = impala_loss(agent, data, small(lstm=lstm))
        assert abs(info["rho"] - 1) < 1e-6 and abs(info["approx_kl"]) < 1e-6
    if lstm:
        assert state.shape == (2, 2, 64) and data["state"].abs().max() > 0
        data["starts"][3:5] = ~data["starts"][3:5]
        assert not torch.allclose(agent(data, data["state"])[1], values)


@pytest.mark.parametrize(
    "flags", [{}, dict(lstm=True), dict(env_id="PongNoFrameskip-v4", total_timesteps=64)]
)
def test_ratio_is_one_before_the_first_gradient_step(flags):
    run_dir = impala_vtrace.train(small(**flags))
    assert abs(scalars(run_dir, "losses/rho")[0][1] - 1) < 1e-6
    assert abs(scalars(run_dir, "losses/approx_kl")[0][1]) < 1e-6


def test_last_action_and_reward_reach_the_lstm():
    found, agent = collected(small(env_id="Walk-v0", lstm=True), count=1)
    data = tensors(found[0])
    with torch.no_grad():
        value = agent(data, data["state"])[1]
        for name, other in (
            ("last_actions", 1 - data["last_actions"]),
            ("last_rewards", -data["last_rewards"]),
        ):
            assert not torch.allclose(agent(data | {name: other}, data["state"])[1], value), name
        clipped = data["last_rewards"].clamp(-1, 1)
        assert torch.equal(agent(data | dict(last_rewards=clipped), data["state"])[1], value)


@pytest.mark.parametrize("lstm", [False, True])
def test_time_limit_is_valued_by_the_learner_on_demand(lstm):
    """Cut-v0 is cut after 4 steps, and its last observation has a 100, which today's agent values."""
    args = small(env_id="Cut-v0", bootstrap_truncated=True, lstm=lstm, num_steps=10)
    found, _ = collected(args)
    for segments in found[:2]:  # cut at rows 4 and 8; at 2, 6 and 10
        final_obs, data = segments.data["final_obs"], tensors(segments)
        rows = [t for t in range(11) if final_obs[t, 1] is not None]
        assert rows in ([4, 8], [2, 6, 10]) and all(final_obs[t, 1][0] == 100 for t in rows)
        today = Agent(impala_vtrace.make_env("Cut-v0", args, 1), args)  # another one than acted
        with torch.no_grad():
            ours = impala_vtrace.beyond_time_limits(today, data, final_obs, 0.9)
            expected, state = torch.zeros_like(ours), data["state"]
            for t in range(11):  # step by step
                row = {name: data[name][t : t + 1] for name in ("starts", "last_actions", "last_rewards")}
                final = row | dict(obs=torch.tensor([[[100.0, 1.0]] * 2]), starts=row["starts"] & False)
                if t in rows:
                    expected[t] = 0.9 * today(final, state)[1][0]
                _, _, state = today(row | dict(obs=data["obs"][t : t + 1]), state)
        torch.testing.assert_close(ours, expected)
        assert ours.abs()[rows].min() > 0
    (segments,), _ = collected(small(env_id="Cut-v0", lstm=lstm), count=1)
    assert all(obs is None for obs in segments.data["final_obs"].flat)


def test_replayed_time_limits_do_not_age(monkeypatch):
    """In every batch, new or replayed, the final observation has the value of the agent of that update."""
    checked, loss = [], impala_vtrace.impala_loss

    def spy(agent, batch, args):
        ends = batch["bootstraps"] != 0
        with torch.no_grad():
            row = dict(obs=torch.tensor([[[100.0, 1.0]]]), starts=torch.zeros(1, 1, dtype=bool))
            value = agent(row, agent.initial_state(1))[1].item()
        torch.testing.assert_close(
            batch["bootstraps"][ends], torch.full_like(batch["bootstraps"][ends], 0.99 * value)
        )
        assert torch.equal(ends.nonzero()[:, 0] % 4, ends.nonzero()[:, 0] * 0) and ends.sum() == 16
        checked.append(value)
        return loss(agent, batch, args)

    monkeypatch.setattr(impala_vtrace, "impala_loss", spy)
    flags = dict(replay_fraction=0.5, batch_segments=8, replay_segments=16, bootstrap_truncated=True)
    impala_vtrace.train(small(env_id="Cut-v0", **flags, learning_rate=1e-2))
    assert len(checked) == 10 and np.ptp(checked) > 0.1  # of an agent that learns


def test_atari_group_ends_episodes_with_lives_and_keeps_the_raw_score():
    group = new_group("BreakoutNoFrameskip-v4", small())
    group.reset(seed=3)
    rng, scores, starts, episodes = np.random.default_rng(0), np.zeros(2), np.zeros(2), []
    for _ in range(900):
        group.send(rng.integers(4, size=2))
        episodes += group.receive()[1]
        scores += group.row["last_rewards"]
        starts += group.row["starts"]
    assert group.row["obs"].shape == (2, 4, 84, 84) and group.row["obs"].dtype == np.uint8
    assert len(episodes) >= 2 and starts.sum() >= 5 * len(episodes)
    assert (
        scores.sum() == sum(episode["charts/episodic_return"] for episode in episodes) + group.returns.sum()
    )


def test_images_and_dictionaries_become_arrays():
    class Picture(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (40, 48, 3), np.uint8)

    class Grid(gym.Env):
        image = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)
        observation_space = gym.spaces.Dict(image=image, direction=gym.spaces.Discrete(4))

    shapes = [impala_vtrace.as_array(env()).observation_space.shape for env in (Picture, Grid)]
    assert shapes == [(3, 40, 48), (147,)]


# === Loss and optimizer ===


def off_policy_batch(T=5, N=3, **flags):
    found, agent = collected(
        small(env_id="Walk-v0", num_steps=T, num_envs=2 * N, batch_segments=N, **flags), 2
    )
    data = tensors(found[1])
    data["logprobs"] += torch.from_numpy(np.random.default_rng(0).normal(size=(T, N)).astype(np.float32))
    return agent, data


def gradient(agent, batch, **flags):
    loss, _ = impala_loss(agent, batch, small(**flags))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(agent.parameters()))])


def test_loss_is_summed_and_made_of_its_parts():
    agent, batch = off_policy_batch()
    dist, values, _ = agent(batch, batch["state"])
    logprobs = dist.log_prob(batch["last_actions"].roll(-1, 0))[:-1]
    rewards = batch["last_rewards"][1:].clamp(-1, 1)
    targets = rewards, 0.99 * ~batch["starts"][1:], values[:-1], values[-1]
    vs, advantages = of_logprobs(batch["logprobs"], logprobs, *targets)
    entropy = -(dist.logprobs.exp() * dist.logprobs)[:-1].sum()
    expected = -(logprobs * advantages).sum() + 0.25 * ((vs - values[:-1]) ** 2).sum() - 0.01 * entropy
    loss, info = impala_loss(agent, batch, small())
    torch.testing.assert_close(loss, expected)
    twice = {name: torch.cat((x, x), 1) for name, x in batch.items()}
    torch.testing.assert_close(gradient(agent, twice), 2 * gradient(agent, batch), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(info["entropy"], (entropy / 15).detach())


@pytest.mark.parametrize(
    "flags", [{}, dict(rho_bar=0.6), dict(c_bar=0.5), dict(vtrace_lambda=0.4), dict(rho_bar=2.0, c_bar=1.5)]
)
def test_loss_clips_and_shortens_as_the_flags_say(flags):
    """--rho-bar, --c-bar and --vtrace-lambda: the losses of targets by the definition, with those values."""
    agent, batch = off_policy_batch()
    with torch.no_grad():
        dist, values, _ = agent(batch, batch["state"])
        logprobs = dist.log_prob(batch["last_actions"].roll(-1, 0))[:-1]
    args = small(**flags)
    bars = (args.rho_bar, args.c_bar, args.vtrace_lambda)
    rewards, discounts = batch["last_rewards"][1:].clamp(-1, 1), 0.99 * ~batch["starts"][1:]
    targets = rewards, discounts, values[:-1], values[-1]
    losses = []
    for used in (bars, (1.0, 1.0, 1.0)):
        vs, advantages = by_definition(batch["logprobs"], logprobs, *targets, *used)
        policy_loss = -(logprobs.numpy() * advantages).mean()
        losses.append((policy_loss, 0.5 * ((vs - values[:-1].numpy()) ** 2).mean()))
    _, info = impala_loss(agent, batch, args)
    np.testing.assert_allclose([info["policy_loss"], info["value_loss"]], losses[0], rtol=1e-4)
    if flags:
        assert np.abs(np.subtract(*losses)).max() > 1e-3  # it does make a difference


def test_diagnostics_survive_a_ratio_that_underflows():
    """A policy that has left the one that acted far behind: exp(-120) is 0 in float32."""
    agent, batch = off_policy_batch()
    batch["logprobs"] = batch["logprobs"] * 0 + 120
    _, info = impala_loss(agent, batch, small())
    assert all(x.isfinite() for x in info.values())
    with torch.no_grad():
        logprobs = agent(batch, batch["state"])[0].log_prob(batch["last_actions"].roll(-1, 0))[:-1]
    torch.testing.assert_close(info["approx_kl"], (119 - logprobs).mean())


def test_share_of_clipped_ratios():
    """Ratios of 1, as those of the policy that acted, are not above a limit of 1."""
    agent, batch = off_policy_batch()
    with torch.no_grad():
        logprobs = agent(batch, batch["state"])[0].log_prob(batch["last_actions"].roll(-1, 0))[:-1]
    ratios = torch.ones(15)
    ratios[:3], ratios[3:7] = 1.5, 0.5
    for limit, share in ((1.0, 3 / 15), (0.4, 1.0), (2.0, 0.0)):
        _, info = impala_loss(
            agent, batch | dict(logprobs=logprobs - ratios.log().view(5, 3)), small(rho_bar=limit)
        )
        assert info["rho_clipped"].item() == pytest.approx(share)
        assert info["rho"].item() == pytest.approx(ratios.mean().item(), rel=1e-5)


def test_corrections_of_the_ablation():
    """All differ, epsilon by little from none; only V-trace has targets and bars; on policy all agree."""
    agent, batch = off_policy_batch()
    parts = dict(vf_coef=0.0, ent_coef=0.0)
    kinds = ("vtrace", "one-step-is", "epsilon", "none")
    found = {kind: gradient(agent, batch, correction=kind, **parts) for kind in kinds}
    assert len({tuple(g[:50].tolist()) for g in found.values()}) == 4
    torch.testing.assert_close(found["epsilon"], found["none"], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        logprobs = agent(batch, batch["state"])[0].log_prob(batch["last_actions"].roll(-1, 0))[:-1]
    rho = (logprobs - batch["logprobs"]).exp().clamp(max=1)
    assert rho.min() < 0.8
    targets = {kind: impala_loss(agent, batch, small(correction=kind))[1]["value_loss"] for kind in kinds}
    assert targets["one-step-is"] == targets["epsilon"] == targets["none"] != targets["vtrace"]
    bars = dict(rho_bar=0.5, c_bar=0.5, vtrace_lambda=0.5)  # are V-trace's alone
    barred = {
        kind: impala_loss(agent, batch, small(correction=kind, **bars))[1]["value_loss"] for kind in kinds
    }
    assert barred["vtrace"] != targets["vtrace"]
    assert all(barred[kind] == targets[kind] for kind in kinds[1:])
    batch["logprobs"] = logprobs
    on_policy = [gradient(agent, batch, correction=kind) for kind in kinds]
    for g in on_policy:
        torch.testing.assert_close(g, on_policy[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_first_update_by_hand(optimizer, monkeypatch):
    """Of a gradient of twos: norm clipped to 40; lr by Adam, whose moments are g and g**2 at first.

    By RMSProp lr g / sqrt(ms + eps), epsilon inside the root, with a mean of squares that begins with 1.
    """
    monkeypatch.setattr(  # of which every gradient is 2
        impala_vtrace,
        "impala_loss",
        lambda agent, batch, args: (2 * sum(x.sum() for x in agent.parameters()), dict(loss=torch.zeros(()))),
    )
    agents = []
    original = Agent.__init__
    monkeypatch.setattr(Agent, "__init__", lambda self, *x: (original(self, *x), agents.append(self))[0])
    torch.manual_seed(1)
    impala_vtrace.train(small(total_timesteps=32, anneal_lr=False, optimizer=optimizer))
    torch.manual_seed(1)
    fresh = Agent(make_env("Count-v0", small(), 2), small())
    ours = torch.cat([p.flatten() for p in agents[0].parameters()])
    before = torch.cat([p.flatten() for p in fresh.parameters()])
    g = 2 * min(1, 40 / (2 * len(ours) ** 0.5 + 1e-6))
    step = 6e-4 * g / (g + 1e-5 if optimizer == "adam" else np.sqrt(0.99 + 0.01 * g**2 + 0.01))
    torch.testing.assert_close(before - ours, torch.full_like(ours, step), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("flag,number", [("rmsprop_decay", 0.5), ("rmsprop_eps", 1.0)])
def test_flags_change_the_rmsprop_of_a_resumed_run(flag, number):
    """A checkpoint has the mean of squares, and not how they are averaged."""
    learned = []
    for changes in ({}, {flag: number}):
        run_dir = impala_vtrace.train(small(optimizer="rmsprop"))
        args = impala_vtrace.load_checkpoint(run_dir)["args"]
        impala_vtrace.train(replace(args, resume=str(run_dir), total_timesteps=32 * 12, **changes))
        learned.append(torch.load(run_dir / "checkpoint.pt")["agent"]["actor.weight"])
    assert not torch.equal(*learned)


def test_learning_rate_falls_to_zero():
    run_dir = impala_vtrace.train(small())
    rates = [x for _, x in scalars(run_dir, "charts/learning_rate")]
    np.testing.assert_allclose(rates, 6e-4 * np.arange(10, 0, -1) / 10, rtol=1e-5)


def test_networks_of_figure_3():
    envs = make_env("PongNoFrameskip-v4", small(), 1)
    kinds = {}
    for network in ("shallow", "deep"):
        agent = Agent(envs, small(network=network, lstm=network == "deep"))
        convolutions = [m for m in agent.modules() if isinstance(m, torch.nn.Conv2d)]
        kinds[network] = (len(convolutions), [c.out_channels for c in convolutions])
        rows = dict(obs=torch.zeros(2, 3, 4, 84, 84, dtype=torch.uint8), starts=torch.zeros(2, 3, dtype=bool))
        rows |= dict(last_actions=torch.zeros(2, 3, dtype=torch.int64), last_rewards=torch.zeros(2, 3))
        dist, value, state = agent(rows, agent.initial_state(3))
        assert dist.logprobs.shape == (2, 3, 6) and value.shape == (2, 3)
        assert state.shape == (2, 3, 256 if network == "deep" else 0)
    assert kinds == dict(shallow=(2, [16, 32]), deep=(15, [16] * 5 + [32] * 10))


# === Replay ===


def test_replay_is_first_in_first_out_and_uniform():
    replay = Replay(5)
    for k in range(4):  # segments 0 and 1, 2 and 3, ...: 3 to 7 are left
        ids = np.array([2 * k, 2 * k + 1])
        replay.add(dict(obs=np.zeros((3, 2, 1)) + ids[:, None], state=np.zeros((2, 2, 4)) - ids[:, None]))
        if k == 0:
            assert set(replay.sample(50, np.random.default_rng(0))["obs"][0, :, 0]) == {0, 1}
    drawn = replay.sample(5000, np.random.default_rng(0))
    ids, counts = np.unique(drawn["obs"][0, :, 0], return_counts=True)
    assert ids.tolist() == [3, 4, 5, 6, 7] and counts.min() > 900
    assert (drawn["obs"][..., 0] == drawn["obs"][0, :, 0]).all() and (
        drawn["state"] == -drawn["obs"][0]
    ).all()


def test_replayed_share_of_a_batch(monkeypatch):
    seen = []
    original = impala_vtrace.impala_loss
    monkeypatch.setattr(impala_vtrace, "impala_loss", lambda *x: (seen.append(x[1]), original(*x))[1])
    run_dir = impala_vtrace.train(small(replay_fraction=0.5, batch_segments=8, replay_segments=16))
    assert all(batch["obs"].shape[:2] == (9, 8) for batch in seen) and len(seen) == 10
    assert steps_of(run_dir) == list(range(32, 321, 32))  # only new steps count


# === Tasks ===


def test_human_normalized_scores_by_hand():
    percent = human.human_normalized({"PongNoFrameskip-v4": 14.6, "ALE/Breakout-v5": 30.5 * 2 - 1.7})
    assert percent == pytest.approx({"PongNoFrameskip-v4": 100, "ALE/Breakout-v5": 200})
    assert human.human_normalized({"CartPole-v1": 500.0}) == {}
    assert human.human_normalized({"MontezumaRevengeNoFrameskip-v4": 0.0}) == {
        "MontezumaRevengeNoFrameskip-v4": 0.0
    }
    assert len(human.bounds()) == 56


def test_scores_are_of_the_last_games_of_the_policy_to_evaluate(monkeypatch, capsys):
    """The last hundred, of several policies those of the first; what is above a human's is capped."""
    tags = {
        "PongNoFrameskip-v4__x__1__1": "charts/episodic_return",
        "Breakout-v5__x__1__1": "policies/return_0",
    }
    for name, tag in tags.items():
        with SummaryWriter(name) as writer:
            for step in range(300):
                writer.add_scalar("charts/episodic_return", 14.6 if step >= 200 else -20.7, step)
                if "policies" in tag:
                    writer.add_scalar(tag, 30.5 * 2 - 1.7 if step >= 200 else 0.0, step)
    monkeypatch.setattr(sys, "argv", ["human.py", *tags])
    human.main()
    lines = ["PongNoFrameskip-v4: 100.0 %", "Breakout-v5: 200.0 %"]
    lines += ["median 150.0 %, mean of what is capped 100.0 %"]
    assert capsys.readouterr().out.splitlines() == lines
    with SummaryWriter("Pong-v5__x__2__1") as writer:
        for tag in ("charts/episodic_return", "policies/return_1"):
            writer.add_scalar(tag, 1.0, 1)
    monkeypatch.setattr(sys, "argv", ["human.py", "Pong-v5__x__2__1"])
    with pytest.raises(SystemExit, match="2"):
        human.main()
    assert "no episode of the first policy has ended" in capsys.readouterr().err


def test_three_games_in_one_network(monkeypatch):
    games = "PongNoFrameskip-v4,BreakoutNoFrameskip-v4,ALE/Boxing-v5"
    monkeypatch.setattr(Group, "receive", shortened(Group.receive))
    args = small(env_id=games, num_envs=6, num_steps=5, batch_segments=6, total_timesteps=30 * 12, sync=False)
    run_dir = impala_vtrace.train(args)
    assert not set(run_dir.name) & set(":;,#?/'")  # which W&B refuses in a run's id
    for env_id in games.split(","):
        assert scalars(run_dir, f"tasks/{env_id}"), env_id
    returns = {env_id: [x for _, x in scalars(run_dir, f"tasks/{env_id}")] for env_id in games.split(",")}
    means = {env_id: np.mean(x[-100:]) for env_id, x in returns.items()}
    tool = [sys.executable, ROOT / "benchmark/human.py", run_dir]
    printed = subprocess.run(tool, check=True, capture_output=True, text=True, timeout=600).stdout
    percent = list(human.human_normalized(means).values())
    assert f"median {np.median(percent):.1f} %" in printed and printed.count(" %") == 5
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["agent"]["actor.weight"].shape[0] == 18
    assert len(state["last_returns"]) == min(100, sum(map(len, returns.values())))


def shortened(receive):
    """Games that end after four steps."""

    def wrapped(self):
        final_obs, episodes = receive(self)
        self.count = getattr(self, "count", 0) + 1
        ended = {"charts/episodic_return": self.returns[0].item(), "charts/episodic_length": 4}
        return final_obs, [ended] if self.count % 4 == 0 else episodes

    return wrapped


def test_the_mean_of_no_returns_is_not_0(capsys):
    impala_vtrace.train(small(env_id="CartPole-v1", total_timesteps=32))  # no episode ends so early
    assert "return nan" in capsys.readouterr().err


def test_tasks_that_do_not_fit_one_network(capsys):
    with pytest.raises(SystemExit) as end:
        impala_vtrace.train(small(env_id="CartPole-v1,Acrobot-v1", num_envs=4, batch_segments=4))
    assert end.value.code == 2 and "one network cannot play CartPole-v1" in capsys.readouterr().err


# === Actors and learner ===


def test_asynchronous_run_learns_its_steps_and_leaves_no_thread():
    run_dir = impala_vtrace.train(small(env_id="CartPole-v1", sync=False, total_timesteps=32 * 200))
    assert steps_of(run_dir) == list(range(32, 32 * 200 + 1, 32))
    lags = [x for _, x in scalars(run_dir, "charts/policy_lag_max")]
    assert max(lags) <= 1
    for share in ("learner_wait", "actor_wait", "queue_fill"):
        values = [x for _, x in scalars(run_dir, f"charts/{share}")]
        assert values and 0 <= min(values) <= max(values) <= 1, share
    ends = [step for step, _ in scalars(run_dir, "charts/episodic_return")]
    assert ends == sorted(ends) and len(ends) > 50
    assert not actors_alive()


def test_slow_learner_stops_the_actors(monkeypatch):
    """The queue is bounded: whatever the speeds, no data is older than it can hold."""
    original = impala_vtrace.impala_loss
    monkeypatch.setattr(impala_vtrace, "impala_loss", lambda *x: (time.sleep(0.2), original(*x))[1])
    run_dir = impala_vtrace.train(small(sync=False, total_timesteps=32 * 30))
    assert scalars(run_dir, "charts/actor_wait")[-1][1] > 0.5
    assert max(x for _, x in scalars(run_dir, "charts/policy_lag_max")) <= 1


def test_several_actors_and_batches_of_several_blocks():
    run_dir = impala_vtrace.train(small(sync=False, num_envs=12, num_actors=3, batch_segments=10))
    assert steps_of(run_dir)[:2] == [80, 160]


@pytest.mark.parametrize("flags", [{}, dict(lstm=True, replay_fraction=0.5, num_envs=2)])
def test_sync_repeats_bit_for_bit(flags):
    runs = [impala_vtrace.train(small(env_id="CartPole-v1", seed=seed, **flags)) for seed in (1, 1, 2)]
    agents = [torch.load(run / "checkpoint.pt", weights_only=True)["agent"] for run in runs]
    assert all(torch.equal(agents[0][name], agents[1][name]) for name in agents[0])
    assert not torch.equal(agents[0]["actor.weight"], agents[2]["actor.weight"])


# === Mistakes ===


@pytest.mark.parametrize(
    "flags,words",
    [
        ("--num-envs 3", "num_envs must be a multiple of 2"),
        ("--batch-segments 33", "must be a multiple of 4"),
        ("--replay-fraction 1", "replay_fraction must be below 1"),
        (
            "--env-id CartPole-v1 --total-timesteps 720 --replay-fraction 0.1",
            "replay_fraction must be 0, or replay a segment",
        ),
        (
            "--env-id Count-v0 --total-timesteps 720 --replay-fraction 0.5 --batch-segments 1 --num-envs 2",
            "must be 0, or replay a segment",
        ),
        ("--env-id ,", "at least one id"),
        ("--env-id Pendulum-v1", "ppo_continuous.py"),
        ("--correction maybe", "correction"),
    ],
)
def test_mistakes(flags, words):
    done = run(impala_vtrace, *flags.split())
    assert done.code == 2 and re.search(words, done.err) and "Traceback" not in done.err
    assert sorted(os.listdir()) == ["err0", "out0"]


def test_many_tasks_have_a_folder_and_each_its_videos():
    """A file's name has 255 bytes at most, and a second task must not write over the first one's videos."""
    tasks = ",".join(["CartPole-v1", "CartPole-v0"] * 15)
    args = small(env_id=tasks, num_envs=60, batch_segments=60, num_steps=4, total_timesteps=240)
    run_dir = impala_vtrace.train(args)
    assert run_dir.name.startswith("CartPole-v1+CartPole-v0+") and run_dir.is_dir()
    for env_id in ("CartPole-v1", "CartPole-v0"):
        envs = impala_vtrace.make_env(env_id, impala_vtrace.Args(eval_episodes=1), 1, run_dir / "videos")
        envs.reset(seed=1)
        for _ in range(100):
            envs.step(np.zeros(1, np.int64))
        envs.close()
    names = sorted(path.name for path in (run_dir / "videos").glob("*.mp4"))
    assert names == ["CartPole-v0-episode-0.mp4", "CartPole-v1-episode-0.mp4"]


def test_states_that_the_lstm_is_given_are_contiguous(monkeypatch):
    """cuDNN wants that; NumPy and torch.cat keep other layouts where a batch has one new segment."""
    found, forward = [], torch.nn.LSTM.forward

    def spy(self, x, state):
        found.append(all(part.is_contiguous() for part in state))
        return forward(self, x, state)

    monkeypatch.setattr(torch.nn.LSTM, "forward", spy)
    flags = dict(lstm=True, replay_fraction=0.75, num_steps=4, num_envs=2, batch_segments=4)
    impala_vtrace.train(small(**flags, total_timesteps=40, sync=True))
    assert len(found) > 50 and all(found)


def test_each_task_is_evaluated(monkeypatch, capsys):
    """By games of its own, with a line of its own; the returns of all are returned."""
    tasks, made, original = ("Count-v0", "Aligned-v0"), [], impala_vtrace.make_env
    run_dir = impala_vtrace.train(small(env_id=",".join(tasks), num_envs=4, batch_segments=4))
    monkeypatch.setattr(impala_vtrace, "make_env", lambda *x: made.append(x[0]) or original(*x))
    capsys.readouterr()
    args = impala_vtrace.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    returns = impala_vtrace.evaluate(args)
    assert tuple(made) == tasks and len(returns) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if ": return" in line]
    for task, line, own in zip(tasks, lines, (returns[:2], returns[2:]), strict=True):
        assert line == f"{task}: return {np.mean(own):.2f} +- {np.std(own):.2f}"


def test_processes_must_divide_a_batch_with_its_replayed_segments(monkeypatch):
    monkeypatch.setattr(impala_vtrace, "WORLD_SIZE", 2)
    impala_vtrace.check(small(num_envs=8, batch_segments=8, replay_fraction=0.5))
    with pytest.raises(ValueError, match="new segments must be a multiple of"):
        impala_vtrace.check(small(num_envs=4, batch_segments=5, replay_fraction=0.2))
