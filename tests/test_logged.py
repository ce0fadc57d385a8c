"""Everything that is logged or shown, in every script, beside a value computed apart from it, tag by tag.

A recorded run (helpers/traced.py) has the environments' answers, the batches of the loss, and a clock that
only environments and losses advance. From these, plain NumPy computes what each tag should have at each step.
A tag of which nothing is expected fails.
"""

import functools
import runpy
import sys
from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, scalars
from laws import clip_and_lr, impala_numbers, ngu_numbers, ppo_numbers, rollouts
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from traced import LOSS_SECONDS, STEP_SECONDS, Run, Traced, record

ALL = SCRIPTS | OTHERS
IN_STEP = dict(total_timesteps=64, gamma=0.9, clip_coef=0.05, vf_coef=0.3, ent_coef=0.02, anneal_clip=True)
IN_TURN = dict(num_envs=4, num_steps=8)
FLAGS = dict.fromkeys(SCRIPTS, IN_STEP) | {
    "ppo_atari": IN_STEP | dict(num_steps=8),
    # segments left over by one batch are a version old in the next
    "impala_vtrace": IN_TURN
    | dict(env_id="Traced-v0,TracedTwin-v0", batch_segments=6, replay_fraction=0.5, log_every=2, rho_bar=1.01)
    | dict(total_timesteps=8 * 3 * 7, bootstrap_truncated=True),
    "ppo_async": IN_TURN
    | dict(batch_segments=5, num_actors=2, sample_reuse=1.5, decoupled=True)
    | dict(total_timesteps=8 * 5 * 5, clip_coef=0.05, anneal_clip=True),
    "ngu_r2d2": dict(total_timesteps=160, log_every=3, learning_starts=20, rnd_max=1.5, beta=0.3, n_step=2)
    | dict(cross_mixture=0.3, embedding_every=1000, neighbors=3, kernel_eps=0.01, replay_steps=400),
}
FLAGS["ppo_async-dropped"] = FLAGS["ppo_async"] | dict(max_staleness=0, decoupled=False)
AT_THE_END = ("episodic_return", "episodic_length", "score")


@functools.cache
def logging_run(name: str) -> Run:
    script = ALL[name.split("-")[0]]
    with pytest.MonkeyPatch.context() as patch:
        notes = hook_ngu(script, patch) if name == "ngu_r2d2" else None
        run = record(script, writes=True, **FLAGS[name])
    run.notes = notes
    return run


def hook_ngu(script, patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Notes draws from the replay, the policies that played, and the curiosity before each loss."""
    notes = SimpleNamespace(places=[], policies=[], auxiliary=[], alphas=[])
    sample, step, loss = script.Replay.sample, script.Actor.step, script.Curiosity.loss
    forward, init = script.Curiosity.forward, script.Curiosity.__init__

    def sampled(self, *args):
        result = sample(self, *args)
        notes.places.append(result[0])
        return result

    def stepped(self, *args):
        result = step(self, *args)
        notes.policies.append(result[0]["policies"])
        return result

    def lost(self, *args):
        notes.auxiliary.append(deepcopy(self))
        return loss(self, *args)

    def rewarded(self, obs):
        result = forward(self, obs)
        notes.alphas.append(result[1].astype(np.float64))
        return result

    def begun(self, *args):
        init(self, *args)
        notes.embedding = deepcopy(self.embedding)

    patch.setattr(script.Replay, "sample", sampled)
    patch.setattr(script.Actor, "step", stepped)
    patch.setattr(script.Curiosity, "loss", lost)
    patch.setattr(script.Curiosity, "forward", rewarded)
    patch.setattr(script.Curiosity, "__init__", begun)
    return notes


# === Episodes, and the steps at which they ended ===


def ends(env: Traced) -> list[tuple[int, dict]]:
    """Of each episode: its last step (from 1), and what is to be logged."""
    found, total, length = [], 0.0, 0
    for t, (_, _, reward, _, terminated, truncated) in enumerate(env.steps, 1):
        total, length = total + reward, length + 1
        if terminated or truncated:
            score = 10.0 * len(found) + env.index
            found.append((t, dict(episodic_return=total, episodic_length=length, score=score)))
            total, length = 0.0, 0
    return found


def batches_in_turn(run: Run) -> list[SimpleNamespace]:
    """What --sync does: actors of two groups act in turn until a batch is full; the rest waits for the next.

    ready: segments that waited; taken: (version, environment, number of its segment); acted: segments made.
    """
    args, waiting, batches, counts = run.args, [], [], [0] * run.args.num_envs
    num_actors, size, turn = args.num_envs // 2, getattr(args, "new_segments", args.batch_segments), 0
    for version in range(args.num_iterations):
        ready, made = len(waiting), 0
        while len(waiting) < size:
            for n in (2 * (turn % num_actors), 2 * (turn % num_actors) + 1):
                waiting.append((version, n, counts[n]))
                counts[n] += 1
            turn, made = turn + 1, made + 2
        batches.append(SimpleNamespace(ready=ready, taken=waiting[:size], acted=made))
        waiting = waiting[size:]
    return batches


def episodes(run: Run) -> list[list[tuple[int, int, dict]]]:
    """Of each iteration: (step, environment, what is to be logged) of episodes that ended in it, by step."""
    args, found = run.args, []
    all_ends = [ends(env) for env in run.environments]
    T, N = args.num_steps, args.num_envs
    if not hasattr(args, "batch_segments"):
        for i in range(args.num_iterations):
            ended = [(t * N, n, e) for n in range(N) for t, e in all_ends[n] if i * T < t <= (i + 1) * T]
            found.append(sorted(ended, key=lambda x: x[0]))
        return found
    for i, batch in enumerate(batches_in_turn(run)):
        ended = []
        for _, n, k in batch.taken:
            for t, e in all_ends[n]:
                if k * T < t <= (k + 1) * T:
                    ended.append((i * args.batch_size + (t - k * T) * len(batch.taken), n, e))
        found.append(sorted(ended, key=lambda x: x[0]))
    return found


def expected_episodes(run: Run) -> dict[str, list]:
    tags = defaultdict(list)
    for step, n, episode in (x for ended in episodes(run) for x in ended):
        for name, value in episode.items():
            if name != "score" or run.script.SCRIPT != "ppo_atari":  # emulators report no such number
                tags[f"charts/{name}"].append((step, value))
        if run.script.SCRIPT == "impala_vtrace":
            tags[f"tasks/{run.args.env_ids[n // 2]}"].append((step, episode["episodic_return"]))
        if run.script.SCRIPT == "ngu_r2d2":
            policy = run.notes.policies[step // run.args.num_envs - 1][n]
            tags[f"policies/return_{policy}"].append((step, episode["episodic_return"]))
    return tags


# === Losses and rates ===


def seconds(num_steps: int, num_losses: int) -> float:
    return num_steps * STEP_SECONDS + num_losses * LOSS_SECONDS


def speeds(times: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Steps per second since the end of the first iteration, by steps and seconds at the end of each."""
    (first_step, start), *others = times
    return [(step, (step - first_step) / (now - start)) for step, now in others]


def expected_in_step(run: Run) -> dict[str, list]:
    """PPO whose rollouts and updates alternate."""
    tags, times, k, args = defaultdict(list), [], 0, run.args
    for i, (calls, rollout) in enumerate(rollouts(run)):
        step = (i + 1) * args.num_envs * args.num_steps
        numbers = [ppo_numbers(run, k + j) for j in range(len(calls))]
        k += len(calls)
        for name in ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl"):
            tags[f"losses/{name}"].append((step, numbers[-1][name]))
        tags["losses/grad_norm"].append((step, calls[-1].norm))
        tags["losses/clipfrac"].append((step, np.mean([x["clipped"].mean() for x in numbers])))
        left = (rollout["returns"] - rollout["values"]).var() / rollout["returns"].var()
        tags["losses/explained_variance"].append((step, 1 - left))
        tags["charts/learning_rate"].append((step, clip_and_lr(run, k - 1)[1]))
        times.append((step, seconds(step, k)))
    return tags | {"charts/SPS": speeds(times)}


def waits(batches: list, num_losses: int, run: Run) -> dict[str, float]:
    """Shares of the time between two logs in which the learner waits for actors, and they for it.

    An actor's time counts with the segments that it made, as they are taken.
    """
    T, num_actors, size = run.args.num_steps, run.args.num_envs // 2, len(batches[0].taken)
    acted, taken = (T * sum(x) for x in zip(*((b.acted, len(b.taken)) for b in batches), strict=True))
    time = seconds(acted, num_losses)
    return {
        "charts/learner_wait": acted * STEP_SECONDS / time,
        "charts/actor_wait": 1 - taken * STEP_SECONDS / time / num_actors,
        "charts/queue_fill": np.mean([batch.ready for batch in batches]) / max(2, size + size % 2),
    }


def expected_of_impala(run: Run) -> dict[str, list]:
    args, tags, batches, last = run.args, defaultdict(list), batches_in_turn(run), 0
    num_steps = np.cumsum([batch.acted * args.num_steps for batch in batches])
    ends = [((i + 1) * args.batch_size, seconds(x, i + 1)) for i, x in enumerate(num_steps)]
    speed = dict(speeds(ends))
    for i, (step, _) in enumerate(ends):
        if (i + 1) % args.log_every and i + 1 < args.num_iterations:
            continue
        since, numbers = batches[last : i + 1], impala_numbers(run, i)
        numbers.pop("loss")
        found = {f"losses/{name}": x for name, x in numbers.items()}
        found |= {"losses/grad_norm": run.losses[i].norm, "charts/learning_rate": clip_and_lr(run, i)[1]}
        found["charts/SPS"] = speed[step]
        found |= waits(since, len(since), run)
        lags = [last + k - version for k, batch in enumerate(since) for version, _, _ in batch.taken]
        found |= {"charts/policy_lag": np.mean(lags), "charts/policy_lag_max": max(lags)}
        for tag, x in found.items():
            tags[tag].append((step, x))
        last = i + 1
    return tags


def expected_of_async(run: Run) -> dict[str, list]:
    args, tags, batches, times, k = run.args, defaultdict(list), batches_in_turn(run), [], 0
    num_steps = np.cumsum([batch.acted * args.num_steps for batch in batches])
    for i, calls in enumerate(run.iterations()):
        step = (i + 1) * args.batch_size
        numbers, k = [ppo_numbers(run, k + j) for j in range(len(calls))], k + len(calls)
        times.append((step, seconds(num_steps[i], k)))
        names = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl"]
        names += ["behavior_kl"] if args.decoupled else []
        found = {f"losses/{name}": numbers[-1][name] for name in names}
        found["losses/grad_norm"] = calls[-1].norm
        clipped = np.concatenate([x["clipped"] for x in numbers])
        found["losses/clipfrac"] = clipped.mean()
        whole = {
            name: np.concatenate([call.batch[name] for call in calls[: args.num_minibatches]])
            for name in ("returns", "values")
        }
        found["losses/explained_variance"] = (
            1 - (whole["returns"] - whole["values"]).var() / whole["returns"].var()
        )
        _, found["charts/learning_rate"] = clip_and_lr(run, k - 1)
        stale = np.array([i - version for version, _, _ in batches[i].taken])
        is_kept = stale <= (np.inf if args.max_staleness is None else args.max_staleness)
        ages = np.concatenate([call.batch["staleness"] for call in calls])
        assert set(ages) == set(stale[is_kept])
        found |= {"staleness/mean": ages.mean(), "staleness/max": ages.max()}
        found |= {f"staleness/clipfrac_{age}": clipped[ages == age].mean() for age in set(ages)}
        found["staleness/dropped"] = 1 - is_kept.mean()
        size = is_kept.mean() * args.batch_size
        found["charts/sample_reuse"] = (size + round(size / 2)) / args.batch_size  # one and a half passes
        found |= waits(batches[i : i + 1], len(calls), run)
        for tag, x in found.items():
            tags[tag].append((step, x))
    assert 0 < np.mean([x for _, x in tags["staleness/dropped"]]) < 1 or args.max_staleness is None
    return tags | {"charts/SPS": speeds(times)}


# === NGU ===


def table_of_sequences(run: Run) -> list[list[int]]:
    """At each step, environments that complete a sequence: it is full, or the oldest at an episode's end."""
    args, length = run.args, run.args.burn_in + run.args.unroll
    begun, lasted, completed = [0] * args.num_envs, [0] * args.num_envs, []
    for step in zip(*(env.steps for env in run.environments), strict=True):
        completed.append([])
        for n, (*_, terminated, truncated) in enumerate(step):
            lasted[n] += 1
            if terminated or truncated or lasted[n] - begun[n] == length:
                completed[-1].append(n)
                begun[n] += args.period
            if terminated or truncated:
                begun[n] = lasted[n] = 0
    return completed


def novelties(run: Run) -> list[dict[str, float]]:
    """Of each step: mean episodic novelty and so on, by algorithm 1 of NGU with the first embedding."""
    args, embed = run.args, lambda obs: run.notes.embedding(torch.as_tensor(obs)[None])[0].detach().numpy()
    memories = [[embed(env.steps[0][0])] for env in run.environments]
    total, count, found = 0.0, 0.0, []

    def similarity(distances, mean):
        apart = np.maximum(distances / max(mean, 1e-12) - 0.008, 0)
        kernel = args.kernel_eps / (apart + args.kernel_eps)
        return np.sqrt(kernel.mean() * args.neighbors) + 0.001

    usual = similarity(np.ones(1), 1.0)
    for t, alpha in enumerate(run.notes.alphas):
        steps = [env.steps[t] for env in run.environments]
        arrived = [embed(step[3]) for step in steps]
        nearest = [
            np.sort([((x - y) ** 2).sum() for y in memory])[: args.neighbors]
            for x, memory in zip(arrived, memories, strict=True)
        ]
        total = 0.99 * total + sum(x.sum() for x in nearest)
        count = 0.99 * count + sum(len(x) for x in nearest)
        similarities = np.array([similarity(x, total / count) for x in nearest])
        novelty = np.minimum(np.where(similarities > 8, 0, usual / similarities), 1)
        for memory, x in zip(memories, arrived, strict=True):
            memory.append(x)
        info = dict(
            novelty=novelty.mean(), distance=total / count, memory=np.mean([len(x) for x in memories])
        )
        info |= dict(alpha=alpha.mean(), reward=(novelty * alpha).mean())
        info |= dict(alpha_at_least=(alpha == 1).mean(), alpha_at_most=(alpha == args.rnd_max).mean())
        found.append(info)
        for n, (*_, terminated, truncated) in enumerate(steps):
            if terminated or truncated:
                following = run.environments[n].steps
                memories[n] = [embed(following[t + 1][0])] if t + 1 < len(following) else []
    return found


def auxiliary_numbers(run: Run, k: int) -> dict[str, float]:
    """Inverse dynamics and the predictor's errors in the last steps of each sequence of the k-th batch."""
    batch, curiosity = {name: x.numpy() for name, x in run.losses[k].batch.items()}, run.notes.auxiliary[k]
    losses, errors, hits, std = [], [], [], np.sqrt(curiosity.whitening.var.numpy()[0] + 1e-8)
    for b, length in enumerate(batch["lengths"]):
        for t in range(max(0, length - run.args.auxiliary_steps), length):
            if batch["mask"][t, b]:
                before, after = (torch.as_tensor(batch["obs"][s, b])[None] for s in (t, t + 1))
                with torch.no_grad():
                    both = torch.cat((curiosity.embedding(before), curiosity.embedding(after)), -1)
                    logits = curiosity.inverse(both)[0].double().numpy()
                    x = ((after[0].numpy() - curiosity.whitening.mean.numpy()[0]) / std).clip(-5, 5)
                    x = torch.as_tensor(x)[None]
                    error = (curiosity.rnd_predictor(x) - curiosity.rnd_target(x)).numpy()
                action = batch["last_actions"][t + 1, b]
                losses.append(np.log(np.exp(logits).sum()) - logits[action])
                hits.append(logits.argmax() == action)
                errors.append((error**2).mean())
    return dict(inverse_loss=np.mean(losses), inverse_accuracy=np.mean(hits), rnd_loss=np.mean(errors))


def expected_of_ngu(run: Run) -> dict[str, list]:
    args, tags, completed = run.args, defaultdict(list), table_of_sequences(run)
    infos, priorities, times, k, last = novelties(run), np.zeros(0), [], 0, 0
    trained = np.cumsum([call.batch["mask"].sum().item() for call in run.losses])
    for i in range(args.num_iterations):
        for n in (n for at in completed[i * args.num_steps : (i + 1) * args.num_steps] for n in [len(at)]):
            largest = priorities.max(initial=0) or 1.0
            priorities = np.append(priorities, [largest] * n)
        step = (i + 1) * args.num_envs * args.num_steps
        for _ in range(args.updates_per_rollout if step >= args.learning_starts else 0):
            priorities[run.notes.places[k]] = run.losses[k].priorities + 1e-6
            k += 1
        times.append((step, seconds(step, k)))
        if (i + 1) % args.log_every and i + 1 < args.num_iterations:
            continue
        numbers = ngu_numbers(run, k - 1) | auxiliary_numbers(run, k - 1)
        names = ("td_loss", "q", "target", "intrinsic_reward", "inverse_loss", "inverse_accuracy", "rnd_loss")
        found = {f"losses/{name}": numbers[name] for name in names}
        found["losses/grad_norm"] = run.losses[k - 1].norm
        found["charts/SPS"] = dict(speeds(times))[step]
        found["charts/replay_ratio"] = trained[k - 1] / step
        found["replay/sequences"] = len(priorities)
        for name, x in dict(mean=priorities.mean(), std=priorities.std(), max=priorities.max()).items():
            found[f"replay/priority_{name}"] = x
        since = infos[last : (i + 1) * args.num_steps]
        found |= {f"curiosity/{name}": np.mean([info[name] for info in since]) for name in since[0]}
        last = (i + 1) * args.num_steps
        for tag, x in found.items():
            tags[tag].append((step, x))
    assert k == len(run.losses)
    return tags


EXPECTED = dict.fromkeys(SCRIPTS, expected_in_step) | {
    "impala_vtrace": expected_of_impala,
    "ppo_async": expected_of_async,
    "ppo_async-dropped": expected_of_async,
    "ngu_r2d2": expected_of_ngu,
}


@functools.cache
def expected(name: str) -> dict[str, list]:
    run = logging_run(name)
    return EXPECTED[name](run) | expected_episodes(run)


@functools.cache
def logged_tags(name: str) -> dict[str, list[str]]:
    events = EventAccumulator(str(logging_run(name).run_dir), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload().Tags()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_tag_is_expected_and_every_expected_tag_is_there(name):
    assert set(logged_tags(name)["scalars"]) == set(expected(name))
    assert logged_tags(name)["histograms"] == ["staleness/versions"] * name.startswith("ppo_async")
    assert len({tag.split("/")[0] for tag in expected(name)}) >= 2


@pytest.mark.parametrize("name", EXPECTED)
def test_values(name):
    """Each tag of the file, at each of its steps."""
    for tag, points in expected(name).items():
        found = scalars(logging_run(name).run_dir, tag)
        assert [step for step, _ in found] == [step for step, _ in points], tag
        wanted = np.array([x for _, x in points], np.float64)
        tolerance = 1e-3 * max(1e-3, np.abs(wanted).max())
        np.testing.assert_allclose([x for _, x in found], wanted, rtol=1e-3, atol=tolerance, err_msg=tag)


def test_histogram_of_staleness():
    """As many samples in each as were trained on."""
    run = logging_run("ppo_async")
    events = EventAccumulator(str(run.run_dir), size_guidance={"histograms": 0})
    histograms = events.Reload().Histograms("staleness/versions")
    assert len(histograms) == run.args.num_iterations
    for i, (found, calls) in enumerate(zip(histograms, run.iterations(), strict=True)):
        ages = np.concatenate([call.batch["staleness"].numpy() for call in calls])
        assert found.step == (i + 1) * run.args.batch_size and found.histogram_value.num == len(ages)
        assert found.histogram_value.sum == ages.sum() and found.histogram_value.max == ages.max()


@pytest.mark.parametrize("name", ALL)
def test_progress_bar(name):
    """It shows the mean of the last 100 returns, of all or of the policy without a bonus, and the waits."""
    run, done, words = logging_run(name), [], ["with beta 0"] * (name == "ngu_r2d2")
    logged = {tag: dict(points) for tag, points in expected(name).items()}
    for i, (ended, text) in enumerate(zip(episodes(run), run.bars, strict=True)):
        done, step = done + ended, (i + 1) * run.args.batch_size
        if step in logged.get("charts/learner_wait", ()):
            waits = [logged[f"charts/{who}_wait"][step] for who in ("learner", "actor")]
            if name == "impala_vtrace":
                age = f"lag {logged['charts/policy_lag'][step]:.1f}"
            else:  # of what is dropped, too
                versions = [version for version, _, _ in batches_in_turn(run)[i].taken]
                age = f"staleness {i - np.mean(versions):.1f}"
            words = [f"{age}, learner waits {waits[0]:.0%}, actor waits {waits[1]:.0%}"]
        number, *found = text.removeprefix("return ").split(" ", 1)
        mean = np.mean(shown_returns(run, done)[-100:] or np.nan)
        np.testing.assert_allclose(float(number.rstrip(",")), mean, atol=0.051)
        assert found == words


def shown_returns(run: Run, done: list[tuple[int, int, dict]]) -> list[float]:
    """Returns of the episodes so far whose mean the progress bar shows."""
    if run.script.SCRIPT == "ngu_r2d2":
        policies = run.notes.policies
        done = [x for x in done if policies[x[0] // run.args.num_envs - 1][x[1]] == 0]
    return [episode["episodic_return"] for *_, episode in done]


@pytest.mark.parametrize("name", [name for name in ALL if name != "ppo_atari"])
def test_printed_evaluation(name, monkeypatch, capsys):
    """Mean and deviation of the returns that the environments gave."""
    run_dir = logging_run(name).run_dir
    capsys.readouterr()  # the run's folder, if this test is the first that needs the run
    monkeypatch.setattr(Traced, "made", [])
    monkeypatch.setattr(sys, "argv", ["x.py", "--evaluate", str(run_dir), "--eval-episodes", "3"])
    runpy.run_path(ALL[name].__file__, run_name="__main__")
    returns = [[e["episodic_return"] for _, e in ends(env)] for env in Traced.made]
    together = np.concatenate(returns)
    shown = capsys.readouterr().out.splitlines()
    spread = f"{together.mean():.2f} +- {together.std():.2f}"
    assert shown[-1] == f"return {spread} over {len(together)} episodes"
    if name == "impala_vtrace":
        for env_id, x, line in zip(("Traced-v0", "TracedTwin-v0"), returns, shown, strict=False):
            assert line == f"{env_id}: return {np.mean(x):.2f} +- {np.std(x):.2f}"
