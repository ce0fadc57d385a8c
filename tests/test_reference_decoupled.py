"""Whole recorded runs of impala_vtrace.py and ppo_async.py against plain references in float64.

A reference (tests/reference) is given the first weights, what the environments did, and which unrolls by
which version a batch had; that is seen from outside by their observations, and in a run that takes turns it
is computed, too. It computes all weights, targets and logs anew, from the papers, with no step in between
taken from the script.
"""

import time
from collections import deque
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

CLOSE = dict(rtol=1e-3, atol=1e-5)  # the script computes in float32


def check_weights(reference, script, before, share):
    """New weights: the error of each array is at most a share of what the update changed in it."""
    for name, x in reference.items():
        error, change = np.linalg.norm(script[name] - x), np.linalg.norm(x - before[name])
        assert error <= share * change + 1e-6, f"{name}: {error} in {change}"


def check_logs(run_dir, expected):
    """{tag: [(step, value)]}, all in the order in which they are logged."""
    for tag, points in expected.items():
        found = scalars(run_dir, tag)
        assert [step for step, _ in found] == [step for step, _ in points], tag
        np.testing.assert_allclose([x for _, x in found], [x for _, x in points], **CLOSE, err_msg=tag)


def check_episodes(run_dir, expected, frames=0):
    """(step, return, length) of each episode; those of one step in any order. Lengths may differ by frames."""
    returns, lengths = (scalars(run_dir, f"charts/episodic_{name}") for name in ("return", "length"))
    assert [step for step, _ in returns] == sorted(step for step, *_ in expected) and expected
    found = sorted((step, r, length) for (step, r), (_, length) in zip(returns, lengths, strict=True))
    found, expected = np.array(found), np.array(sorted(expected))
    np.testing.assert_allclose(found[:, :2], expected[:, :2], **CLOSE)
    assert (np.abs(found[:, 2] - expected[:, 2]) <= frames).all()


def check_versions(made, iteration, capacity):
    """No unroll was made by later weights, or by older ones than there is room for."""
    lags = [iteration - version for version in made]
    assert min(lags) >= 0 and max(lags) <= capacity, lags


def check_noise(samples):
    """Actions are drawn from the policy: their log-probability is minus the entropy, on average."""
    surprise = variance = 0.0
    for logprobs, action in samples:
        mean = (logprobs.exp() * logprobs).sum()
        surprise += logprobs[action] - mean
        variance += (logprobs.exp() * (logprobs - mean) ** 2).sum()
    assert variance > 0.3 and abs(surprise) < 5 * variance**0.5


# === IMPALA ===


def impala_args(**flags):
    flags = dict(env_id="Wander-v0", num_envs=4, batch_unrolls=4, num_steps=5, gamma=0.9) | flags
    flags = dict(learning_rate=0.02, ent_coef=0.05, vf_coef=0.3, device="cpu", log_every=1) | flags
    flags = dict(rho_bar=1.01) | flags  # with 1, rounding would decide whether a weight of 1 is clipped
    updates = flags.pop("updates", 6)
    args = impala_vtrace.Args(**dict(total_timesteps=10**5) | flags)
    args.total_timesteps = updates * args.batch_size
    return args


IMPALA = {
    "default": dict(sync=True),
    "vtrace": dict(num_actors=2, rho_bar=1.5, c_bar=0.8, vtrace_lambda=0.9, bootstrap_truncated=True),
    "lstm": dict(lstm=True, num_actors=2, bootstrap_truncated=True, max_grad_norm=2.0),
    "lstm in turn": dict(lstm=True, sync=True, bootstrap_truncated=True, num_steps=20, rmsprop_decay=0.9),
    "replay": dict(
        lstm=True, replay_fraction=0.5, batch_unrolls=8, replay_unrolls=6, bootstrap_truncated=True
    ),
    "replay in turn": dict(sync=True, replay_fraction=0.25, batch_unrolls=16, num_envs=12, num_actors=3),
    "behind": dict(num_envs=8, num_actors=2, batch_unrolls=2, rewards="raw", max_grad_norm=3.0),
    "behind in turn": dict(sync=True, num_envs=8, num_actors=2, batch_unrolls=2, anneal_lr=False),
    "one-step-is": dict(sync=True, correction="one-step-is", batch_unrolls=2, rho_bar=0.9),
    "epsilon": dict(sync=True, correction="epsilon", batch_unrolls=2, rewards="soft-asymmetric"),
    "none": dict(correction="none", num_envs=8, rmsprop_eps=0.1, rewards="soft-asymmetric"),
    "two tasks": dict(env_id="Wander-v0,Wild-v0", num_envs=8, batch_unrolls=8, num_steps=22, log_every=4),
    "tasks in turn": dict(env_id="Wander-v0,Wild-v0", num_envs=8, num_actors=2, sync=True, lstm=True),
    "shallow": dict(env_id="WanderImage-v0", lstm=True, learning_rate=1e-3),
    "deep": dict(env_id="WanderImage-v0", network="deep", sync=True, num_envs=2, batch_unrolls=2),
    "Atari": dict(
        env_id="BreakoutNoFrameskip-v4", num_envs=2, batch_unrolls=2, num_steps=30, learning_rate=1e-3
    ),
}


def new_and_replayed(args, batches):
    """Of each batch of (environment, first step): the new unrolls, which stand first, and the replayed."""
    stored = []
    for batch in batches:
        size = max(1, round(args.batch_unrolls * (1 - args.replay_fraction)))
        new, replayed = batch[:size], batch[size:]
        assert len(batch) == args.batch_unrolls and len(set(new)) == size and not set(new) & set(stored)
        stored += new
        assert set(replayed) <= set(stored[-args.replay_unrolls :]), "not in the replay any more"
        yield new, replayed


@pytest.mark.parametrize("name", IMPALA)
def test_impala(name, monkeypatch):
    flags = dict(IMPALA[name])
    args = impala_args(**flags)
    T, num_updates = args.num_steps, args.total_timesteps // args.batch_size
    run = Record(impala_vtrace, args, monkeypatch, ["vtrace"])
    assert len(run.inputs) == num_updates
    share = 2e-2 if run.traces[0].obs[0].ndim > 1 else 1e-3  # ReLUs on the edge
    batches = [[] for _ in run.inputs]
    for batch, (rows, _) in zip(batches, run.inputs, strict=True):
        batch += run.samples(rows["obs"][0])
    reference = Impala(args, run.weights[0], run.traces, num_updates)
    in_turn = InTurn(len(args.env_id.split(",")) * args.num_actors, args.num_envs // args.num_groups, T)
    unrolls, lags, ended, logs = {}, [], [], {}
    tasks = {task: [] for task in args.env_id.split(",")}
    for k, (new, replayed) in enumerate(new_and_replayed(args, batches)):
        made = []
        for n, begin in new:
            by = {run.prints.index(x) for x in run.traces[n].actors[begin : begin + T]}
            assert len(by) == 1, "an unroll by several versions"
            made += by
            unrolls[n, begin] = reference.act(n, begin, *by)
        if args.sync:
            scheduled = in_turn.collect(len(new) // args.group_size, k)
            assert scheduled == [(n, begin, version) for (n, begin), version in zip(new, made, strict=True)]
        groups = len(new) // args.group_size
        check_versions(made, k, 1 + (max(2 * len(tasks) * args.num_actors, groups) - 1) // groups)
        lags += [k - version for version in made]

        # what the learner reads, row by row
        batch = [unrolls[x] for x in new + replayed]
        rows, state = run.inputs[k]
        for j, unroll in enumerate(batch):
            expected = [reference.row(unroll.trace, t) for t in range(unroll.begin, unroll.begin + T + 1)]
            for field, column in zip(("obs", "last_actions", "last_rewards", "starts"), zip(*expected)):
                if field == "obs" or args.lstm:
                    np.testing.assert_allclose(rows[field][:, j], np.array(column), rtol=1e-6, err_msg=field)
            np.testing.assert_allclose(state[:, j], torch.stack(unroll.state), **CLOSE)

        losses, targets = reference.learn(batch)
        np.testing.assert_allclose(run.calls["vtrace"][k][1][0], np.transpose(targets), rtol=2e-3, atol=2e-4)
        check_weights(reference.weights[k + 1], run.weights[k + 1], run.weights[k], share)

        # what is logged
        step = k * args.batch_size
        for n, begin in new:
            task = list(tasks)[n // (2 * args.group_size) % len(tasks)]
            for t, total, length in episodes(run.traces[n]):
                if begin <= t < begin + T:
                    ended.append((step + (t - begin + 1) * len(new), total, length))
                    tasks[task].append((k, new.index((n, begin)) // args.group_size, t, n, total))
        if (k + 1) % args.log_every == 0 or k + 1 == num_updates:
            losses = {f"losses/{name}": x for name, x in losses.items()}
            losses |= {"charts/policy_lag": np.mean(lags), "charts/policy_lag_max": max(lags)}
            losses |= {"charts/learning_rate": reference.lr}
            losses |= {"charts/sample_reuse": len(batch) / len(new)}
            if len(tasks) > 1:
                returns = {
                    task: [total for *_, total in sorted(found)[-100:]] for task, found in tasks.items()
                }
                losses |= {f"tasks/{task}": np.mean(x) for task, x in returns.items() if x}
            for tag, x in losses.items():
                logs.setdefault(tag, []).append((step + args.batch_size, x))
        if k % args.log_every == args.log_every - 1:
            lags = []
    check_logs(run.run_dir, logs)
    check_episodes(run.run_dir, ended, 3 if name == "Atari" else 0)
    check_noise([(x, a) for u in unrolls.values() for x, a in zip(u.logprobs, u.trace.actions[u.begin :])])
    assert len({trace.seeds[0] for trace in run.traces}) == args.num_envs == len(run.traces)


# === Off-policy PPO ===


def ppo_args(**flags):
    flags = dict(env_id="Wander-v0", num_envs=4, batch_unrolls=4, num_steps=5, num_minibatches=2) | flags
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
    "behind": dict(num_envs=8, num_actors=2, batch_unrolls=2, gae_on_learner=True, bootstrap_truncated=True),
    "decoupled": dict(
        num_envs=8, num_actors=2, batch_unrolls=4, decoupled=True, sample_reuse=2, clip_coef=0.3
    ),
    "delay": dict(
        sync=True, num_steps=9, artificial_delay=2, decoupled=True, anneal_lr=False, num_minibatches=3
    ),
    "dropped": dict(sync=True, num_envs=8, num_actors=2, batch_unrolls=6, max_staleness=0, updates=9),
    "dropped late": dict(sync=True, artificial_delay=1, max_staleness=0, updates=8, anneal_clip=True),
    "bounded": dict(num_envs=8, num_actors=2, batch_unrolls=4, max_staleness=1, updates=10),
    "image": dict(env_id="WanderImage-v0", learning_rate=1e-4, clip_coef=0.2),
    "Atari": dict(
        env_id="BreakoutNoFrameskip-v4", num_envs=2, batch_unrolls=2, num_steps=30, learning_rate=1e-4
    ),
}
PPO_FIELDS = dict(
    actions="action", logprobs="logprob", values="value", advantages="advantage", returns="target"
)


@pytest.mark.parametrize("name", OFF_POLICY_PPO)
def test_off_policy_ppo(name, monkeypatch):
    args = ppo_args(**OFF_POLICY_PPO[name])
    T, B, num_iterations = args.num_steps, args.batch_unrolls, args.total_timesteps // args.batch_size
    run = Record(ppo_async, args, monkeypatch, ["ppo_loss"])
    trained = [run.samples(obs) for (obs,) in run.inputs]  # of each gradient step
    reward = np.sign if name == "Atari" else float  # Atari's rewards are clipped
    reference = OffPolicyPPO(args, run.weights[0], run.traces, num_iterations, reward)
    in_turn = InTurn(args.num_actors, args.group_size, T)
    steps, held, logs, ended, noise, kept_once = 0, deque(), {}, [], [], set()
    share = 2e-2 if run.traces[0].obs[0].ndim > 1 else 1e-3  # ReLUs on the edge
    dropped = dict(scalars(run.run_dir, "staleness/dropped"))
    for k in range(num_iterations):
        end = (k + 1) * args.batch_size
        if args.sync:  # who acts when follows from the flags
            while len(held) <= args.artificial_delay:
                held.append(in_turn.collect(B // args.group_size, reference.version))
            collected = held.popleft()
            kept = [x for x in collected if reference.is_kept(x[2])]
        else:  # it is seen: these are the segments of the first pass
            size = round(B * (1 - dropped[end]))
            first = sum(trained[steps : steps + args.num_minibatches], []) if size else []
            kept = []
            for n, begin in sorted({(n, t // T * T) for n, t in first}):
                made = {run.prints.index(x) for x in run.traces[n].actors[begin : begin + T]}
                assert len(made) == 1, "a segment by several versions"
                kept.append((n, begin, reference.versions.index(*made)))
            assert len(kept) == size and all(reference.is_kept(made) for *_, made in kept)
            collected = kept
        assert not kept_once & set(kept), "a segment is there twice"
        kept_once |= set(kept)
        segments = [reference.act(*segment) for segment in collected]
        for segment, (n, begin, made) in zip(segments, collected, strict=True):
            acted = {run.prints.index(x) for x in run.traces[n].actors[begin : begin + T]}
            assert acted == {reference.versions[made]}, "not the version that acted"
            noise += list(zip(segment.logprobs, run.traces[n].actions[begin:]))
            for t, total, length in episodes(run.traces[n]):
                if begin <= t < begin + T:
                    ended.append((end - args.batch_size + (t - begin + 1) * B, total, length))
        logged = {"staleness/dropped": 1 - len(kept) / B}
        logged["charts/learning_rate"] = reference.lr
        if kept:
            samples = reference.samples([x for x in segments if reference.is_kept(x.version)])
            losses, passes = reference.learn(samples, iter(trained[steps:]))
            logged |= losses
            for j, minibatches in enumerate(passes):  # each sample once, in a last pass a part of them
                taken = sum(minibatches, [])
                part = min(1.0, args.sample_reuse - j)
                assert len(set(taken)) == len(taken) == round(part * len(samples))
                sizes = [len(minibatch) for minibatch in minibatches]
                assert max(sizes) - min(sizes) <= 1
            first, steps = steps, len(reference.weights) - 1
            for names, (called, _) in zip(
                trained[first:steps], run.calls["ppo_loss"][first:steps], strict=True
            ):
                for field, ours in PPO_FIELDS.items():
                    expected = [samples[name][ours] for name in names]
                    np.testing.assert_allclose(
                        called[0][field], expected, rtol=2e-3, atol=2e-4, err_msg=field
                    )
            check_weights(reference.weights[-1], run.weights[steps], run.weights[first], share)
        else:
            logged["charts/sample_reuse"] = 0.0
        for tag, x in logged.items():
            logs.setdefault(tag, []).append((end, x))
    assert steps == len(trained), "steps that the reference does not know"
    check_logs(run.run_dir, logs)
    if args.sync or args.max_staleness is None:  # else nobody sees where the dropped ones were collected
        check_episodes(run.run_dir, ended, 3 if name == "Atari" else 0)
    if args.sync and args.max_staleness is not None:
        assert 0 < np.mean(list(dropped.values())) < 1, "nothing was dropped, or all"
    check_noise(noise)
    assert len({trace.seeds[0] for trace in run.traces}) == args.num_envs == len(run.traces)


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
    flags = dict(num_envs=8, num_actors=2, batch_unrolls=8, num_steps=10, learning_rate=1e-5, sync=sync)
    args = make_args(**flags, updates=4)
    with monkeypatch.context() as patch:
        first = Record(script, args, patch, head=1)
    args.total_timesteps, args.resume = 2 * args.total_timesteps, str(first.run_dir)
    second = Record(script, args, monkeypatch, head=1)
    seeds = [
        seed for run in (first, second) for trace in run.traces for seed in trace.seeds if seed is not None
    ]
    assert len(set(seeds)) == len(seeds) == 16  # one of each environment of each run
    acts = [trace.actions[:40] for run in (first, second) for trace in run.traces]
    assert {len(actions) for actions in acts} == {40}
    for k, actions in enumerate(acts):
        assert all(agreement(actions, other) < 0.8 for other in acts[:k])
        assert agreement(actions[:-10], actions[10:]) < 0.8  # from unroll to unroll
    starts = [trace.obs[0][3:].tolist() for run in (first, second) for trace in run.traces]
    assert len(np.unique(starts, axis=0)) == 16


def test_rates_by_a_clock_that_only_the_test_moves(decoupled, monkeypatch):
    """A second for each step of an environment and three for each loss; in turn, with logs every 2 updates."""
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
    flags = dict(sample_reuse=2) if is_ppo else dict(replay_fraction=0.5, batch_unrolls=16, log_every=2)
    run = Record(
        script, make_args(num_envs=8, num_actors=2, sync=True, **dict(batch_unrolls=8) | flags), monkeypatch
    )
    acting, learning = 8 * 5, 3 * (4 if is_ppo else 1)  # seconds of an iteration
    collected = acting / (acting + learning)
    expected = {
        "charts/collected_SPS": collected,
        "charts/trained_SPS": 2 * collected,
        "charts/SPS": collected,
    }
    expected |= {
        "charts/learner_wait": collected,
        "charts/actor_wait": 1 - collected / 2,
        "charts/queue_fill": 0,
    }
    for tag, x in expected.items():
        found = scalars(run.run_dir, tag)
        assert len(found) == (6 if is_ppo else 3) and [y for _, y in found] == pytest.approx(
            [x] * len(found)
        ), tag
