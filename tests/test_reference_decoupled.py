"""Whole recorded runs of impala_vtrace.py and ppo_async.py against plain references in float64.

A reference (tests/reference) is given the first weights, what the environments did, and which segments of
which versions each batch had. The latter is seen from outside, as every observation has a name
(recording.py); where actors and learner take turns, it also follows from the flags. From that the reference
computes states, targets, losses, weights and logs of the whole run. All that the script computed and that
comes in between are the weights after an update, with which the reference goes on once they are compared.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import scalars
from recording import Record, Wander
from reference.decoupled import InTurn, episodes
from reference.impala import Impala
from reference.off_policy_ppo import OffPolicyPPO

import impala_vtrace
import ppo_async
from benchmark.studies.staleness import held_back

CLOSE = dict(rtol=1e-3, atol=1e-5)  # the script computes in float32


def errors_of(reference, script, before):
    """Of each array of the new weights: the error, as a share of what the update changed in it."""
    errors = [max(0.0, np.linalg.norm(script[name] - x) - 1e-6) for name, x in reference.items()]
    changes = [np.linalg.norm(x - before[name]) for name, x in reference.items()]
    return np.array(errors) / np.maximum(changes, 1e-12)


def check_weights(errors):
    """errors: (updates, arrays). Each update began with the script's weights, so rounding does not grow.

    If the reference goes on with its own, it does: in six updates of the deep network from 1e-7 to all of a
    change. Within an update it is below 1e-4 of the change, as close decisions are the script's (Decisions).
    """
    assert np.max(errors) <= 1e-3, errors


def check_logs(run_dir, expected):
    """{tag: [(step, value)]}, all in the order in which they are logged."""
    for tag, points in expected.items():
        found = scalars(run_dir, tag)
        assert [step for step, _ in found] == [step for step, _ in points], tag
        np.testing.assert_allclose([x for _, x in found], [x for _, x in points], **CLOSE, err_msg=tag)


def check_episodes(run_dir, expected, frames=0):
    """(step, return, length) of each episode, in any order within a step. Lengths may differ by frames."""
    returns, lengths = (scalars(run_dir, f"charts/episodic_{name}") for name in ("return", "length"))
    assert [step for step, _ in returns] == sorted(step for step, *_ in expected) and expected
    found = sorted((step, r, length) for (step, r), (_, length) in zip(returns, lengths, strict=True))
    found, expected = np.array(found), np.array(sorted(expected))
    np.testing.assert_allclose(found[:, :2], expected[:, :2], **CLOSE)
    assert (np.abs(found[:, 2] - expected[:, 2]) <= frames).all()


def check_seeds(run):
    """Every environment began with a seed of its own."""
    assert len({trace.seeds[0] for trace in run.traces}) == len(run.traces)


def check_noise(samples):
    """Actions are drawn from their policy: on average, their log-probability is minus the entropy."""
    surprise = variance = 0.0
    for logprobs, action in samples:
        mean = (logprobs.exp() * logprobs).sum()
        surprise += logprobs[action] - mean
        variance += (logprobs.exp() * (logprobs - mean) ** 2).sum()
    assert variance > 0.3 and abs(surprise) < 5 * variance**0.5


def ended_in(trace, begin, length):
    """(step of the segment from 1, return, length) of each episode that ended there."""
    return [(t - begin + 1, *rest) for t, *rest in episodes(trace) if begin <= t < begin + length]


# === IMPALA ===


def impala_args(**flags):
    flags = dict(env_id="Wander-v0", num_envs=4, batch_segments=4, num_steps=5, gamma=0.9) | flags
    flags = dict(learning_rate=0.02, ent_coef=0.05, vf_coef=0.3, device="cpu", log_every=1) | flags
    flags = dict(optimizer="rmsprop") | flags
    flags = dict(rho_bar=1.01) | flags  # with 1, rounding would decide whether a weight of 1 is clipped
    updates = flags.pop("updates", 6)
    args = impala_vtrace.Args(**dict(total_timesteps=10**5) | flags)
    args.total_timesteps = updates * args.batch_size
    return args


IMPALA = {
    "Adam": dict(optimizer="adam"),
    "Adam in turn": dict(optimizer="adam", sync=True, lstm=True, learning_rate=0.005, max_grad_norm=2.0),
    "in turn": dict(sync=True),
    "vtrace": dict(num_actors=2, rho_bar=1.5, c_bar=0.8, vtrace_lambda=0.9, bootstrap_truncated=True),
    "lstm": dict(lstm=True, num_actors=2, bootstrap_truncated=True, max_grad_norm=2.0),
    "lstm in turn": dict(lstm=True, sync=True, bootstrap_truncated=True, num_steps=20, rmsprop_decay=0.9),
    "replay": dict(
        lstm=True, replay_fraction=0.5, batch_segments=8, replay_segments=6, bootstrap_truncated=True
    ),
    "replay in turn": dict(sync=True, replay_fraction=0.25, batch_segments=16, num_envs=12, num_actors=3),
    "behind": dict(num_envs=8, num_actors=2, batch_segments=2, rewards="raw", max_grad_norm=3.0),
    "behind in turn": dict(sync=True, num_envs=8, num_actors=2, batch_segments=2, anneal_lr=False),
    "one-step-is": dict(sync=True, correction="one-step-is", batch_segments=2, rho_bar=0.9),
    "epsilon": dict(sync=True, correction="epsilon", batch_segments=2, rewards="raw"),
    "none": dict(correction="none", num_envs=8, rmsprop_eps=0.1),
    "two tasks": dict(env_id="Wander-v0,Wild-v0", num_envs=8, batch_segments=8, num_steps=22, log_every=4),
    "tasks in turn": dict(env_id="Wander-v0,Wild-v0", num_envs=8, num_actors=2, sync=True, lstm=True),
    "shallow": dict(env_id="WanderImage-v0", lstm=True, learning_rate=1e-3),
    "deep": dict(env_id="WanderImage-v0", network="deep", sync=True, num_envs=2, batch_segments=2),
    "Atari": dict(
        env_id="ShortBreakout-v0",
        updates=4,
        num_envs=2,
        batch_segments=2,
        num_steps=20,
        learning_rate=1e-4,
        bootstrap_truncated=True,
    ),  # fmt: skip
}


def new_and_replayed(args, batches):
    """Of each batch of (environment, first step): the new segments, which stand first, and the replayed."""
    stored, ranks = [], []
    for batch in batches:
        size = max(1, round(args.batch_segments * (1 - args.replay_fraction)))
        new, replayed = batch[:size], batch[size:]
        assert len(batch) == args.batch_segments and len(set(new)) == size and not set(new) & set(stored)
        stored = (stored + new)[-args.replay_segments :]
        ranks += [(stored.index(name) + 0.5) / len(stored) for name in replayed]
        yield new, replayed
    if ranks:  # drawn uniformly: mean 1/2, variance 1/12
        assert abs(np.mean(ranks) - 0.5) < 3 / (12 * len(ranks)) ** 0.5


def check_rows(rows, state, reference, segments):
    """What the learner reads: T + 1 rows of each segment, and the LSTM's state before the first."""
    names = ("obs", "last_actions", "last_rewards", "starts") if reference.args.lstm else ("obs",)
    for j, segment in enumerate(segments):
        steps = range(segment.begin, segment.begin + reference.args.num_steps + 1)
        expected = [reference.row(segment.trace, t) for t in steps]
        for k, name in enumerate(names):
            np.testing.assert_array_equal(rows[name][:, j], np.array([row[k] for row in expected]), name)
        np.testing.assert_allclose(state[:, j], torch.stack(segment.state), **CLOSE)


def impala_logs(args, traces, updates):
    """What is logged, and the episodes. updates: (new segments, versions behind, losses) of each."""
    logs, ended, lags, tasks = {}, [], [], args.env_id.split(",")
    for k, (new, behind, losses) in enumerate(updates):
        lags += behind
        arrived = []
        for j, (n, begin) in enumerate(new):
            task = tasks[n // (2 * args.group_size) % len(tasks)]
            for t, total, length in ended_in(traces[n], begin, args.num_steps):
                ended.append((k * args.batch_size + t * len(new), total, length))
                arrived.append((t, j, task, total))
        for t, _, task, total in sorted(arrived) if len(tasks) > 1 else ():
            logs.setdefault(f"tasks/{task}", []).append((k * args.batch_size + t * len(new), total))
        if (k + 1) % args.log_every == 0 or k + 1 == len(updates):
            scalars = losses | {"charts/policy_lag": np.mean(lags), "charts/policy_lag_max": max(lags)}
            for tag, x in scalars.items():
                logs.setdefault(tag, []).append(((k + 1) * args.batch_size, x))
            lags = []
    return logs, ended


@pytest.mark.parametrize("flags", IMPALA.values(), ids=IMPALA)
def test_impala(flags, monkeypatch):
    args = impala_args(**flags)
    T, num_updates = args.num_steps, args.total_timesteps // args.batch_size
    run = Record(impala_vtrace, args, monkeypatch, ["vtrace"])
    assert len(run.inputs) == num_updates
    reference = Impala(args, run.weights[0], run.traces, num_updates)
    num_actors = len(args.env_id.split(",")) * args.num_actors
    in_turn = InTurn(num_actors, args.group_size, T)
    segments, updates, errors = {}, [], []
    batches = [run.samples(rows["obs"][0]) for rows, _ in run.inputs]
    for k, (new, replayed) in enumerate(new_and_replayed(args, batches)):
        made = [(n, begin, run.acted(n, begin, T)) for n, begin in new]
        behind = [k - version for *_, version in made]
        num_groups = len(new) // args.group_size
        if args.sync:  # who acts when follows from the flags
            assert made == in_turn.collect(num_groups, k)
        elif num_groups % (2 * num_actors) == 0:  # a batch takes all that there is room for
            assert 0 <= min(behind) and max(behind) <= 1
        segments |= {(n, begin): reference.act(n, begin, version) for n, begin, version in made}
        batch = [segments[name] for name in new + replayed]
        check_rows(*run.inputs[k], reference, batch)
        losses, targets = reference.learn(batch, run.decisions[k])
        _, (vs, _) = run.calls["vtrace"][k]
        np.testing.assert_allclose(vs, np.transpose(targets), rtol=2e-3, atol=2e-4)
        errors.append(errors_of(reference.weights[k + 1], run.weights[k + 1], run.weights[k]))
        reference.weights[k + 1] = run.weights[k + 1]
        updates.append((new, behind, losses))
    check_weights(errors)
    logs, ended = impala_logs(args, run.traces, updates)
    check_logs(run.run_dir, logs)
    check_episodes(run.run_dir, ended, frames=3 if args.env_id == "ShortBreakout-v0" else 0)
    check_seeds(run)
    acts = [
        (x, a)
        for made in segments.values()
        for x, a in zip(made.logprobs, made.trace.actions[made.begin :], strict=False)
    ]
    check_noise(acts)


# === Off-policy PPO ===


def ppo_args(**flags):
    flags = dict(env_id="Wander-v0", num_envs=4, batch_segments=4, num_steps=5, num_minibatches=2) | flags
    flags = dict(learning_rate=0.01, ent_coef=0.05, vf_coef=0.3, gamma=0.9, gae_lambda=0.8) | flags
    updates = flags.pop("updates", 6)
    args = ppo_async.Args(**dict(total_timesteps=10**5, device="cpu") | flags)
    args.total_timesteps = updates * args.batch_size
    return args


OFF_POLICY_PPO = {
    "default": dict(sync=True),
    "passes": dict(num_actors=2, num_steps=12, sample_reuse=2.5, bootstrap_truncated=True, max_grad_norm=5.0),
    "passes in turn": dict(sync=True, sample_reuse=3, target_kl=0.02, clip_vloss=False, norm_adv=False),
    "a part": dict(sync=True, num_steps=12, sample_reuse=0.5, anneal_clip=True, bootstrap_truncated=True),
    "behind": dict(num_envs=8, num_actors=2, batch_segments=2, bootstrap_truncated=True),
    "decoupled": dict(
        num_envs=8, num_actors=2, batch_segments=4, decoupled=True, sample_reuse=2, clip_coef=0.3
    ),
    "delay": dict(sync=True, num_steps=9, delay=2, decoupled=True, anneal_lr=False, num_minibatches=3),
    "dropped": dict(sync=True, num_envs=8, num_actors=2, batch_segments=6, max_staleness=0, updates=9),
    "dropped late": dict(sync=True, delay=1, max_staleness=0, updates=8, anneal_clip=True),
    "bounded": dict(num_envs=8, num_actors=2, batch_segments=4, max_staleness=1, updates=10),
    "image": dict(env_id="WanderImage-v0", learning_rate=1e-4, clip_coef=0.2),
    "Atari": dict(
        env_id="ShortBreakout-v0",
        updates=4,
        num_envs=2,
        batch_segments=2,
        num_steps=20,
        learning_rate=1e-4,
        bootstrap_truncated=True,
    ),  # fmt: skip
}


def segments_of(run, trained, args, reference):
    """(environment, first step, version) of the segments whose samples are in these minibatches."""
    names = {(n, t // args.num_steps * args.num_steps) for minibatch in trained for n, t in minibatch}
    steps = [(n, begin, run.acted(n, begin, args.num_steps)) for n, begin in sorted(names)]
    return [(n, begin, reference.versions.index(step)) for n, begin, step in steps]


def check_samples(samples, minibatches, calls):
    """Each sample as ppo_loss() was given it."""
    fields = dict(
        actions="action", logprobs="logprob", values="value", advantages="advantage", returns="target"
    )
    for names, ((batch, *_), _) in zip(minibatches, calls, strict=True):
        for theirs, ours in fields.items():
            expected = [samples[name][ours] for name in names]
            np.testing.assert_allclose(batch[theirs], expected, rtol=2e-3, atol=2e-4, err_msg=theirs)


def check_passes(passes, num_samples, reuse):
    """Each sample once in a pass, in the last one a part of them, in minibatches of one size."""
    for k, minibatches in enumerate(passes):
        names = sum(minibatches, [])
        assert len(set(names)) == len(names) == round(min(1.0, reuse - k) * num_samples)
        sizes = [len(minibatch) for minibatch in minibatches]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("flags", OFF_POLICY_PPO.values(), ids=OFF_POLICY_PPO)
def test_off_policy_ppo(flags, monkeypatch):
    delay, args = flags.get("delay", 0), ppo_args(**{name: x for name, x in flags.items() if name != "delay"})
    T, B, num_iterations = args.num_steps, args.batch_segments, args.total_timesteps // args.batch_size
    num_groups, is_atari = B // args.group_size, args.env_id == "ShortBreakout-v0"
    monkeypatch.setattr(ppo_async, "receive", held_back(ppo_async.receive, delay))
    run = Record(ppo_async, args, monkeypatch, ["ppo_loss"])
    trained = [run.samples(obs) for (obs,) in run.inputs]  # of each gradient step
    dropped = dict(scalars(run.run_dir, "staleness/dropped"))
    reward = np.sign if is_atari else float  # Atari's rewards are clipped
    reference = OffPolicyPPO(args, run.weights[0], run.traces, num_iterations, reward)
    in_turn, held = InTurn(args.num_actors, args.group_size, T), []
    logs, ended, acts, all_kept, errors = {}, [], [], [], []
    for k in range(num_iterations):
        begin, end, first = k * args.batch_size, (k + 1) * args.batch_size, len(reference.weights) - 1
        if args.sync:  # who acts when follows from the flags
            while len(held) <= delay:
                held.append(in_turn.collect(num_groups, reference.version))
            collected = held.pop(0)
            assert all(run.acted(n, t, T) == reference.versions[made] for n, t, made in collected)
            kept = [reference.is_kept(made) for *_, made in collected]
        else:
            pass_size = args.num_minibatches if dropped[end] < 1 else 0
            collected = segments_of(run, trained[first : first + pass_size], args, reference)
            kept = [True] * round(B * (1 - dropped[end]))
            behind = [reference.version - made for *_, made in collected]
            assert len(kept) == len(behind) and all(reference.is_kept(made) for *_, made in collected)
            if num_groups % (2 * args.num_actors) == 0:  # a batch takes all that there is room for
                assert max(behind, default=0) <= 1
        segments = [reference.act(*segment) for segment in collected]
        for segment in segments:
            acts += zip(segment.logprobs, segment.trace.actions[segment.begin :], strict=False)
            for t, *episode in ended_in(segment.trace, segment.begin, T):
                ended.append((begin + t * B, *episode))
        losses = {"staleness/dropped": 1 - sum(kept) / B, "charts/learning_rate": reference.lr}
        losses["charts/sample_reuse"] = 0.0
        if any(kept):
            all_kept += [segment[:2] for segment, is_kept in zip(collected, kept, strict=True) if is_kept]
            samples = reference.samples([x for x, is_kept in zip(segments, kept, strict=True) if is_kept])
            more, passes = reference.learn(samples, iter(trained[first:]), iter(run.decisions[first:]))
            losses |= more
            last = len(reference.weights) - 1
            check_passes(passes, len(samples), args.sample_reuse)
            check_samples(samples, trained[first:last], run.calls["ppo_loss"][first:last])
            errors.append(errors_of(reference.weights[last], run.weights[last], run.weights[first]))
            reference.weights[last] = run.weights[last]
        for tag, x in losses.items():
            logs.setdefault(tag, []).append((end, x))
    check_weights(errors)
    assert len(reference.weights) == len(run.weights) and len(set(all_kept)) == len(all_kept)
    check_logs(run.run_dir, logs)
    if args.max_staleness is None or args.sync:  # else nobody sees where the dropped ones were collected
        check_episodes(run.run_dir, ended, frames=3 if is_atari else 0)
    if args.max_staleness is not None and args.sync:
        assert 0 < np.mean(list(dropped.values())) < 1, "nothing was dropped, or all"
    check_seeds(run)
    check_noise(acts)


# === Both ===


SCRIPTS = {"impala_vtrace": (impala_vtrace, impala_args), "ppo_async": (ppo_async, ppo_args)}


@pytest.fixture(params=SCRIPTS)
def decoupled(request):
    return SCRIPTS[request.param]


def agreement(one, other):
    return np.mean(np.equal(one, other))


@pytest.mark.parametrize("sync", [False, True])
def test_all_environments_have_their_own_seeds_and_noise(decoupled, sync, monkeypatch):
    """Of two actors with two groups of two, with nearly uniform policies; and when the run is resumed."""
    script, make_args = decoupled
    flags = dict(num_envs=8, num_actors=2, batch_segments=8, num_steps=10, learning_rate=1e-5, sync=sync)
    args = make_args(**flags, updates=6)  # an actor may take the turn of another
    with monkeypatch.context() as patch:
        first = Record(script, args, patch, head=1)
    args.total_timesteps, args.resume = 2 * args.total_timesteps, str(first.run_dir)
    second = Record(script, args, monkeypatch, head=1)
    traces = [*first.traces, *second.traces]
    seeds = [seed for trace in traces for seed in trace.seeds if seed is not None]
    assert len(set(seeds)) == len(seeds) == len(traces) == 16  # one of each environment of each run
    assert len(np.unique([trace.obs[0][3:] for trace in traces], axis=0)) == 16
    acts = [np.array(trace.actions[:40]) for trace in traces]
    for k, actions in enumerate(acts):
        others = [*acts[:k], np.roll(actions, 10)]  # and itself, a segment later
        assert len(actions) == 40 and all(np.mean(actions == other) < 0.8 for other in others)


def test_rates_by_a_clock_that_only_the_test_moves(decoupled, monkeypatch):
    """A second for each step of an environment, and three for each loss; in turn."""
    script, make_args = decoupled
    seconds = [100.0]

    def slow(function, duration):
        def slowly(*args):
            seconds[0] += duration
            return function(*args)

        return slowly

    clock = dict(time=lambda: seconds[0], monotonic=lambda: seconds[0], time_ns=time.time_ns)
    monkeypatch.setattr(script, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(Wander, "step", slow(Wander.step, 1.0))
    is_ppo = script is ppo_async
    loss = "ppo_loss" if is_ppo else "vtrace"
    monkeypatch.setattr(script, loss, slow(getattr(script, loss), 3.0))
    flags = dict(sync=True, num_envs=8, num_actors=2, batch_segments=8)
    flags |= dict(sample_reuse=2) if is_ppo else dict(replay_fraction=0.5, batch_segments=16, log_every=2)
    run = Record(script, make_args(**flags), monkeypatch)
    acting, learning = 8 * 5, 3 * (4 if is_ppo else 1)  # seconds of an iteration, which collects 40 steps
    rate = acting / (acting + learning)
    for name, x in dict(SPS=rate, learner_wait=rate, queue_fill=0, actor_wait=1 - rate / 2).items():
        found = [y for _, y in scalars(run.run_dir, f"charts/{name}")]
        times = 3 if not is_ppo else 5 if name == "SPS" else 6  # from the second iteration on
        assert found == pytest.approx([x] * times), name
