"""ppo_async.py: what is stale, dropped, used again; and that in turn it is ppo_atari.py's update."""

import os
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import scalars, steps_of
from forks import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import impala_vtrace
import ppo
import ppo_async
import ppo_atari
from benchmark.studies.staleness import held_back
from ppo_async import Agent, Args, Exchange, compute_gae, ppo_loss


def small(**flags):
    """Two groups of two environments; an iteration is one pass over a segment of each."""
    flags = dict(env_id="Count-v0", num_envs=4, num_steps=16, batch_segments=4, sample_reuse=1.0) | flags
    return Args(**dict(total_timesteps=64 * 10, sync=True, device="cpu") | flags)


def acting(script, args, seed=1):
    """The two groups of an actor, a random agent, and an exchange with its copy."""
    torch.manual_seed(seed)
    task, exchange = [args.env_id] if script is impala_vtrace else [], Exchange()
    groups = [script.Group(args.env_id, script.make_env(*task, args, args.group_size)) for _ in range(2)]
    agent = script.Agent(groups[0].envs, args)
    for k, group in enumerate(groups):
        group.reset(seed + k * args.group_size)
        if script is impala_vtrace:
            group.state = agent.initial_state(args.group_size)
    script.publish(agent, 0, exchange, args)
    return groups, agent, exchange


def segments(args, count=2, seed=1):
    """Segments of both groups of an actor with a random agent, and the agent."""
    groups, agent, exchange = acting(ppo_async, args, seed)
    for _ in range(count):
        ppo_async.play(groups, exchange, args)
    return [exchange.queue.get() for _ in range(2 * count)], agent


def tensors(some):
    return {name: torch.from_numpy(x) for name, x in some.data.items() if name != "final_obs"}


def hold_back(monkeypatch, iterations):
    """Trains on what was collected so many iterations ago, as the study of staleness does."""
    monkeypatch.setattr(ppo_async, "receive", held_back(ppo_async.receive, iterations))


@pytest.mark.parametrize("env_id", ["Count-v0", "PongNoFrameskip-v4"])
def test_ratio_is_one_before_the_first_gradient_step(env_id):
    """Of fresh samples, and recomputed in one pass over a segment."""
    found, agent = segments(small(env_id=env_id))
    for some in found:
        data = tensors(some)
        dist, values = agent(data["obs"].flatten(0, 1))
        logprobs = ppo.Categorical(dist.logprobs.view(17, 2, -1)[:-1]).log_prob(data["actions"])
        torch.testing.assert_close(logprobs, data["logprobs"], atol=1e-5, rtol=0)
        torch.testing.assert_close(values.view(17, -1), data["values"], atol=1e-5, rtol=1e-5)
    run_dir = ppo_async.train(small(env_id=env_id, num_minibatches=1, total_timesteps=128))
    assert abs(scalars(run_dir, "losses/approx_kl")[0][1]) < 1e-6


def test_advantages_of_a_segment_by_hand():
    """Count-v0 ends every fifth step with reward 1 a step: the definition, step by step."""
    (some, _), _ = segments(small(), count=1)
    data = some.data
    r, v, d = data["rewards"][:, 0], data["values"][:, 0], data["dones"][:, 0]
    assert np.flatnonzero(d).tolist() == [4, 9, 14] and (r == 1).all()
    expected, advantage = np.zeros(16), 0.0
    for t in reversed(range(16)):
        advantage = r[t] + 0.99 * (1 - d[t]) * v[t + 1] - v[t] + 0.99 * 0.95 * (1 - d[t]) * advantage
        expected[t] = advantage
    values = data["values"]
    ours = compute_gae(data["rewards"], values[:-1], data["dones"], values[-1], 0.99, 0.95)
    np.testing.assert_allclose(ours[:, 0], expected, rtol=1e-5)


def test_defaults_are_those_of_ppo_atari():
    ours, theirs = asdict(Args()), asdict(ppo_atari.Args())
    assert ours["sample_reuse"] == theirs.pop("update_epochs")
    assert Args().batch_size == ppo_atari.Args().num_envs * ppo_atari.Args().num_steps
    assert theirs == {name: ours[name] for name in theirs}


def test_in_turn_it_is_the_update_of_ppo_atari(monkeypatch):
    """The same rollout, parameters and shuffling: the same parameters to 1e-6 after two epochs."""
    seen = {}
    side_by_side = ppo_async.side_by_side

    def spy(segments):
        seen["data"] = side_by_side(segments)
        seen["data"]["rewards"][2] = 7  # to be clipped
        return seen["data"]

    made, original = [], Agent.__init__
    monkeypatch.setattr(Agent, "__init__", lambda self, *x: (original(self, *x), made.append(self))[0])
    monkeypatch.setattr(ppo_async, "side_by_side", spy)
    flags = dict(env_id="PongNoFrameskip-v4", num_envs=4, num_steps=16, device="cpu", total_timesteps=64)
    ppo_async.train(Args(**flags, batch_segments=4, sample_reuse=2.0, sync=True))
    data, agents = seen["data"], []

    class Replayed:  # of the rollout that ppo_async.py saw
        num_envs, t = 4, 0
        envs = ppo_async.make_env(Args(**flags, batch_segments=4), 1)
        single_observation_space = envs.single_observation_space
        single_action_space = envs.single_action_space

        def reset(self, seed):
            return data["obs"][0], {}

        def close(self):
            pass

        def step(self, actions):
            assert np.array_equal(actions, data["actions"][self.t])
            rewards, ended = np.sign(data["rewards"][self.t]), data["dones"][self.t] > 0
            self.t += 1
            return data["obs"][self.t], rewards, ended, ended & False, {}

    class Twin(ppo_atari.Agent):
        def __init__(self, envs):
            super().__init__(envs)
            agents.append(self)
            names = dict(network="network", actor="actor", critic="critic")
            assert names.keys() == dict(self.named_children()).keys()

    taken = iter(torch.from_numpy(data["actions"]))
    monkeypatch.setattr(ppo_atari.Categorical, "sample", lambda self: next(taken))
    monkeypatch.setattr(ppo_atari, "make_env", lambda args, n: Replayed())
    monkeypatch.setattr(ppo_atari, "Agent", Twin)
    shuffles = []
    randperm = torch.randperm
    # the order of samples in a batch is the same, (T, N); the two shuffle with the same numbers
    monkeypatch.setattr(torch, "randperm", lambda n, **k: shuffles.append(n) or (torch.arange(n) * 37) % n)
    del shuffles[:]
    ppo_atari.train(ppo_atari.Args(**flags, update_epochs=2))
    theirs = torch.cat([p.detach().flatten() for p in agents[0].parameters()])
    del made[:]
    ppo_async.train(Args(**flags, batch_segments=4, sample_reuse=2.0, sync=True))
    ours = torch.cat([p.detach().flatten() for p in made[0].parameters()])
    assert shuffles == [64] * 4 and randperm is not torch.randperm
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_segments_that_are_held_back_are_stale(delay, monkeypatch):
    """In turn and held back for K iterations: K versions stale once the first K are through."""
    hold_back(monkeypatch, delay)
    run_dir = ppo_async.train(small())
    means = [x for _, x in scalars(run_dir, "staleness/mean")]
    assert means == [min(k, delay) for k in range(10)]
    assert [x for _, x in scalars(run_dir, "staleness/max")] == means
    assert len(scalars(run_dir, f"staleness/clipfrac_{delay}")) == 10 - delay
    events = EventAccumulator(str(run_dir))
    events.Reload()
    last = events.Histograms("staleness/versions")[-1].histogram_value
    assert last.min == last.max == delay and last.num == 64


def test_each_batch_that_is_held_back_has_the_time_of_an_iteration(monkeypatch):
    calls, receive, beat = [], ppo_async.receive, ppo_async.heartbeat
    monkeypatch.setattr(ppo_async, "heartbeat", lambda loop: calls.append(loop) or beat(loop))
    monkeypatch.setattr(ppo_async, "receive", lambda *x: calls.append("receive") or receive(*x))
    hold_back(monkeypatch, 3)
    ppo_async.train(small())
    assert calls.count("receive") == 13
    assert all(x == "iteration" for x, then in zip(calls, calls[1:], strict=False) if then == "receive")


def test_held_back_segments_are_the_older_ones(monkeypatch):
    """What is trained on in iteration k was collected in iteration k - K."""
    collected, trained = [], []
    receive, loss = ppo_async.receive, ppo_async.ppo_loss
    monkeypatch.setattr(ppo_async, "receive", lambda *x: (collected.append(receive(*x)), collected[-1])[1])
    monkeypatch.setattr(
        ppo_async, "ppo_loss", lambda a, batch, *x: (trained.append(batch), loss(a, batch, *x))[1]
    )
    hold_back(monkeypatch, 2)
    ppo_async.train(small(env_id="CartPole-v1", num_minibatches=1))
    assert len(collected) == 12 and len(trained) == 10
    for received, batch in zip(collected, trained, strict=False):
        seen = torch.cat([torch.from_numpy(some.data["logprobs"]).flatten() for some in received])
        assert torch.equal(batch["logprobs"].sort()[0], seen.sort()[0])


def test_versions_are_updates_and_stale_segments_are_dropped_and_counted(monkeypatch):
    """Held back for 3 iterations and at most 1 version behind: two of four iterations learn, for ever."""
    published, publish = [], ppo_async.publish

    def spy(agent, version, *others):
        published.append((version, torch.cat([p.detach().flatten() for p in agent.parameters()])))
        publish(agent, version, *others)

    monkeypatch.setattr(ppo_async, "publish", spy)
    flags = dict(env_id="CartPole-v1", max_staleness=1)
    with monkeypatch.context() as patch:
        hold_back(patch, 3)
        run_dir = ppo_async.train(small(**flags))
    dropped = [x for _, x in scalars(run_dir, "staleness/dropped")]
    assert dropped == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert [x for _, x in scalars(run_dir, "staleness/mean")] == [0, 1] + [1] * 4
    assert [version for version, _ in published] == list(range(7))
    assert len({tuple(parameters[:50].tolist()) for _, parameters in published}) == 7
    rates = [x for _, x in scalars(run_dir, "charts/learning_rate")]  # annealing waits for updates
    updates_before = np.array([0, 1, 2, 2, 2, 3, 4, 4, 4, 5])
    np.testing.assert_allclose(rates, 2.5e-4 * (1 - updates_before / 10), rtol=1e-5)
    assert [x for _, x in scalars(run_dir, "charts/sample_reuse")] == [1 - x for x in dropped]
    assert steps_of(run_dir) == list(range(64, 641, 64))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["version"] == 6 and state["iteration"] == 10
    hold_back(monkeypatch, 3)
    ppo_async.train(small(**flags, resume=str(run_dir), total_timesteps=64 * 11))
    assert [version for version, _ in published[7:]] == [6, 7]


@pytest.mark.parametrize("reuse,passes", [(0.5, 0.5), (1.0, 1), (2.5, 2.5), (4.0, 4)])
def test_sample_reuse(reuse, passes, monkeypatch):
    """Each sample is trained on so many times: exactly in whole passes, a random share in the rest."""
    used, loss = [], ppo_async.ppo_loss
    monkeypatch.setattr(
        ppo_async, "ppo_loss", lambda a, b, *x: (used.append(b["logprobs"]), loss(a, b, *x))[1]
    )
    run_dir = ppo_async.train(small(env_id="CartPole-v1", sample_reuse=reuse, total_timesteps=64))
    values, counts = torch.cat(used).unique(return_counts=True)
    assert counts.sum() == 64 * passes
    assert [x for _, x in scalars(run_dir, "charts/sample_reuse")] == [reuse]
    assert len(used) == 4 * np.ceil(passes)


def test_minibatches_are_always_as_many_and_none_is_of_one_sample(monkeypatch):
    """19 of 64 samples in 8 minibatches."""
    sizes, loss = [], ppo_async.ppo_loss
    monkeypatch.setattr(
        ppo_async, "ppo_loss", lambda a, b, *x: (sizes.append(len(b["obs"])), loss(a, b, *x))[1]
    )
    flags = dict(num_envs=2, batch_segments=1, num_steps=64, num_minibatches=8, sample_reuse=0.3)
    ppo_async.train(small(env_id="CartPole-v1", **flags, total_timesteps=64 * 3))
    assert sizes == [3, 3, 3, 2, 2, 2, 2, 2] * 3


def test_loss_is_that_of_ppo():
    found, agent = segments(small(env_id="CartPole-v1"), count=1)
    data = {name: x[:16].flatten(0, 1) for name, x in tensors(found[0]).items()}
    batch = dict(obs=data["obs"], actions=data["actions"], values=data["values"])
    batch |= dict(
        logprobs=data["logprobs"] + torch.randn(32) / 5, advantages=torch.randn(32), returns=torch.randn(32)
    )
    (ours, info), (theirs, their_info) = (f(agent, batch, 0.1, small()) for f in (ppo_loss, ppo.ppo_loss))
    clipped = info.pop("clipped")
    share = their_info.pop("clipfrac")
    assert torch.equal(ours, theirs) and info == their_info
    assert clipped.shape == (32,) and clipped.float().mean() == share > 0.2


def decoupled_loss(decoupled, behavior, recent, current, advantages):
    """Loss, diagnostics and the gradient by the current log-probabilities; clipped at 0.2."""
    current = torch.tensor(current).log().requires_grad_()
    zeros = torch.zeros(len(current))
    dist = SimpleNamespace(log_prob=lambda actions: current, entropy=lambda: zeros)
    batch = dict(obs=zeros, actions=zeros, values=zeros, returns=zeros, advantages=torch.tensor(advantages))
    batch |= dict(logprobs=torch.tensor(behavior).log(), recent_logprobs=torch.tensor(recent).log())
    args = small(norm_adv=False, decoupled=decoupled)
    loss, info = ppo_loss(lambda obs: (dist, zeros), batch, 0.2, args)
    return loss.item(), info, torch.autograd.grad(loss, current)[0].tolist()


def test_decoupled_objective_by_hand():
    """Weights 0.5, 4 and 1 of min(1.1 * 2, 1.2 * 2), min(1.5, 1.2) and min(-0.5, -0.8)."""
    parts = [0.5, 0.1, 0.5], [0.25, 0.4, 0.5], [0.275, 0.6, 0.25], [2.0, 1.0, -1.0]
    loss, info, _ = decoupled_loss(True, *parts)
    assert loss == pytest.approx(-(0.5 * 2.2 + 4 * 1.2 - 0.8) / 3)
    assert info["clipped"].tolist() == [False, True, True]
    ratios, weights = np.array([1.1, 1.5, 0.5]), np.array([0.5, 4, 1])
    assert info["approx_kl"].item() == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-4)
    assert info["behavior_kl"].item() == pytest.approx((weights - 1 - np.log(weights)).mean(), rel=1e-4)
    assert decoupled_loss(True, parts[0], parts[0], *parts[2:])[0] == decoupled_loss(False, *parts)[0]


def test_stale_samples_begin_with_a_gradient_only_if_decoupled():
    """The policy has gone from 0.1 to 0.4 since the action, and has yet to move in this update."""
    parts = [0.1], [0.4], [0.4], [1.0]
    *_, gradient = decoupled_loss(False, *parts)
    assert gradient == [0]
    *_, gradient = decoupled_loss(True, *parts)
    assert gradient == pytest.approx([-4])


@pytest.mark.parametrize("delay", [0, 2])
def test_decoupled_clip_begins_at_the_policy_before_the_update(delay, monkeypatch):
    """Whatever the staleness, the first minibatch is at ratio 1; fresh samples are trained on as ever."""
    agents, batches, loss = {}, [], ppo_async.ppo_loss

    def spy(agent, batch, *x):
        batches.append(batch)
        agents[x[-1].decoupled] = agent
        return loss(agent, batch, *x)

    infos = []

    def keep(*x):
        loss, info = spy(*x)
        infos.append((loss, dict(info)))
        return loss, info

    monkeypatch.setattr(ppo_async, "ppo_loss", keep)
    for decoupled in (False, True):
        flags = dict(env_id="CartPole-v1", learning_rate=1e-2, sample_reuse=2)
        with monkeypatch.context() as patch:
            hold_back(patch, delay)
            ppo_async.train(small(**flags, decoupled=decoupled))
    plain, ours = (torch.cat([p.detach().flatten() for p in agents[k].parameters()]) for k in (False, True))
    starts = [info for _, info in infos[80::8]]  # of ten iterations of two passes of four minibatches
    assert len(starts) == 10 and all(info["approx_kl"].abs() < 1e-6 for info in starts)
    assert not any(info["clipped"].any() for info in starts)
    for k in range(80, 160, 8):  # and the clip stays there for both passes
        first, second = (torch.cat([b["recent_logprobs"] for b in batches[i : i + 4]]) for i in (k, k + 4))
        assert torch.equal(first.sort()[0], second.sort()[0])
    if delay:
        assert not torch.allclose(plain, ours, atol=1e-3)
        assert starts[-1]["behavior_kl"] > 1e-4 > 1e-6 > starts[0]["behavior_kl"].abs()
    else:
        torch.testing.assert_close(plain, ours, atol=1e-5, rtol=0)


def test_clipped_share_by_staleness_by_hand():
    staleness, clipped = torch.tensor([0, 0, 2, 2, 2, 5]), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    report = ppo_async.staleness_report(staleness, clipped)
    expected = {"staleness/mean": 11 / 6, "staleness/max": 5, "staleness/clipfrac_0": 0.5}
    expected |= {"staleness/clipfrac_2": 2 / 3, "staleness/clipfrac_5": 0}
    assert report == pytest.approx(expected)


def test_asynchronous_run_is_little_stale_and_leaves_no_thread():
    run_dir = ppo_async.train(small(env_id="CartPole-v1", sync=False, total_timesteps=64 * 100))
    assert steps_of(run_dir) == list(range(64, 6401, 64))
    stale = [x for _, x in scalars(run_dir, "staleness/max")]
    assert max(stale) <= 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor")]
    reuse = [x for _, x in scalars(run_dir, "charts/sample_reuse")]
    assert set(reuse) == {1.0}


@pytest.mark.parametrize("flags", [{}, dict(max_staleness=1)])
def test_time_limit_is_valued_by_the_learner_on_demand(flags, monkeypatch):
    """Cut-v0 is cut after 4 steps, and its last observation has a 100: held back, it has today's value."""
    checked, gae = [], ppo_async.compute_gae

    def spy(rewards, values, *x):
        with torch.no_grad():
            value = agents[0](torch.tensor([[100.0, 1.0]]))[1].item()
        expected = np.ones((16, 4), np.float32)  # sign of the reward
        expected[3::4] += 0.99 * value
        np.testing.assert_allclose(rewards, expected[:, : rewards.shape[1]], rtol=1e-5)
        checked.append(value)
        return gae(rewards, values, *x)

    agents, original = [], Agent.__init__
    monkeypatch.setattr(Agent, "__init__", lambda self, *x: (original(self, *x), agents.append(self))[0])
    monkeypatch.setattr(ppo_async, "compute_gae", spy)
    hold_back(monkeypatch, 2)
    ppo_async.train(small(env_id="Cut-v0", bootstrap_truncated=True, learning_rate=1e-2, **flags))
    assert len(checked) == 10 and np.ptp(checked) > 0.1  # of an agent that learns
    (some, _), _ = segments(small(env_id="Cut-v0"), count=1)
    assert all(obs is None for obs in some.data["final_obs"].flat)


def test_a_minibatch_may_have_steps_of_several_groups():
    """Of eight groups with a step each, four minibatches; not where seven may be too stale to be kept."""
    flags = dict(num_envs=8, num_actors=4, num_steps=1, batch_segments=8, num_minibatches=4, sync=False)
    run_dir = ppo_async.train(small(**flags, total_timesteps=64))
    assert len(scalars(run_dir, "losses/policy_loss")) == 8
    with pytest.raises(ValueError, match="a minibatch must hold more than one step"):
        ppo_async.check(small(**flags, max_staleness=9))


def test_a_minibatch_of_each_process_must_have_more_than_one_step(monkeypatch):
    flags = small(num_envs=8, num_steps=1, batch_segments=8, num_minibatches=4)
    ppo_async.check(flags)
    monkeypatch.setattr(ppo_async, "WORLD_SIZE", 2)
    with pytest.raises(ValueError, match="a minibatch must hold more than one step"):
        ppo_async.check(flags)


@pytest.mark.parametrize(
    "flags,words",
    [
        ("--num-envs 3", "num_envs must be a multiple of 2"),
        ("--batch-segments 9", "must be a multiple of 4"),
        ("--num-steps 1 --max-staleness 9", "a minibatch must hold more than one step"),
        ("--num-steps 4 --max-staleness 9 --sample-reuse 1.4", "a minibatch must hold more than one step"),
        ("--num-steps 1 --num-minibatches 8", "a minibatch must hold more than one step"),
        ("--num-steps 2 --sample-reuse 1.4", "a minibatch must hold more than one step"),
        ("--sample-reuse 0", "sample_reuse cannot be 0"),
        ("--max-staleness -1", "max_staleness cannot be -1"),
    ],
)
def test_mistakes(flags, words):
    """A minibatch of one step: of a batch, or of one group if all others may be too stale."""
    done = run(ppo_async, *flags.split())
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
    assert sorted(os.listdir()) == ["err0", "out0"]


def test_the_smallest_minibatch_has_two_steps(monkeypatch):
    """Where all groups but one are too stale: 4 steps of its 2 environments for 4 minibatches."""
    sizes, original = [], ppo_async.ppo_loss

    def spy(agent, batch, *args):
        sizes.append(len(batch["actions"]))
        return original(agent, batch, *args)

    def aged(*args):
        fresh, *others = receive(*args)
        return [fresh, *(replace(some, version=some.version - 5) for some in others)]

    receive = ppo_async.receive
    monkeypatch.setattr(ppo_async, "receive", aged)
    monkeypatch.setattr(ppo_async, "ppo_loss", spy)
    ppo_async.train(small(num_steps=4, num_minibatches=4, max_staleness=1, total_timesteps=64))
    assert sizes and set(sizes) == {2}


def test_processes_explore_apart_from_the_first_step(monkeypatch):
    """What is held back is collected before the first iteration seeds each process for itself."""
    actions, original = [], ppo_async.receive

    def spy(*inputs):
        batch = original(*inputs)
        actions.append(np.stack([some.data["actions"] for some in batch]))
        return batch

    monkeypatch.setattr(ppo_async, "receive", spy)

    def over_processes(_, x):
        return probes.own_mistake() if type(x) is bool else x  # the first question of iteration 0 ends it

    monkeypatch.setattr(ppo_async, "over_processes", over_processes)
    for rank in (1, 2):
        monkeypatch.setattr(ppo_async, "RANK", rank)
        with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch:
            hold_back(patch, 1)
            ppo_async.train(small(env_id="CartPole-v1"))
    first, _, second, _ = actions
    assert 0.3 < (first == second).mean() < 0.7


class Unhurried(gym.Env):
    """A step takes 5 ms; all steps are counted."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        Unhurried.steps += 1
        time.sleep(0.005)
        return np.zeros(2, np.float32), 0.0, False, False, {}


gym.register("Unhurried-v0", Unhurried, disable_env_checker=True)


@pytest.mark.parametrize("script", [ppo_async, impala_vtrace], ids=lambda script: script.SCRIPT)
def test_actors_that_are_closed_end_their_step_not_their_segment(script):
    flags = dict(env_id="Unhurried-v0", num_envs=2, batch_segments=2, num_steps=300, total_timesteps=600)
    args = script.Args(**flags, device="cpu")
    groups, _, exchange = acting(script, args)
    actor = threading.Thread(target=script.act, args=("actor 0", groups, exchange, args))
    actor.start()
    try:
        exchange.room.release()
        begin = Unhurried.steps
        while Unhurried.steps < begin + 10:
            time.sleep(0.001)
    finally:
        before, exchange.is_closed = Unhurried.steps, True
        exchange.room.release()
        actor.join()
    assert Unhurried.steps - before <= 10 and exchange.queue.empty()


@pytest.mark.parametrize("script", [ppo_async, impala_vtrace], ids=lambda script: script.SCRIPT)
def test_training_waits_for_the_last_step_of_its_actors(script, monkeypatch):
    names, act = [], script.act
    monkeypatch.setattr(script, "act", lambda *x: names.append(threading.current_thread().name) or act(*x))
    flags = dict(env_id="Unhurried-v0", num_envs=2, batch_segments=2, num_steps=4, total_timesteps=16)
    minibatches = dict(num_minibatches=1) if script is ppo_async else {}
    script.train(script.Args(**flags, **minibatches, device="cpu"))
    begin = Unhurried.steps
    assert names == ["actor 0"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actor")]
    time.sleep(0.05)
    assert Unhurried.steps == begin
