"""Every flag does something, in every script, and where it should.

FLAGS says of each field of Args another value and the first stage of a run that it changes: up to there, two
recorded runs are the same bit for bit, and at that stage they differ. Every such run also keeps the laws of
helpers/laws.py, which compute apart from the scripts what the flags demand at each place: a flag that reaches
one of two is seen.
"""

import functools
import shutil
import signal
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, one_line
from laws import check, ppo_numbers
from traced import SMALL, Run, Traced, hook_environments, record

ALL = SCRIPTS | OTHERS
# What a run shows, in the order of cause and effect; each stage from saved on stands for itself.
STAGES = "environments agent actions batch update run logged saved compiled tracked threads".split()

# field: (stage, flags of the second run, flags of both), or the name of a test of this file
COMMON = dict(
    env_id=("environments", dict(env_id="TracedTwin-v0"), {}),
    total_timesteps=("run", dict(total_timesteps=64), {}),
    env_kwargs="test_command_line.py",
    seed=("environments", dict(seed=2), {}),
    num_envs=("environments", dict(num_envs=4), {}),
    num_steps=("actions", dict(num_steps=4), {}),
    stall_seconds="test_stall_seconds",
    gamma=("batch", dict(gamma=0.6), dict(bootstrap_truncated=True)),
    learning_rate=("update", dict(learning_rate=0.003), {}),
    anneal_lr=("run", dict(anneal_lr=False), {}),
    max_grad_norm=("update", dict(max_grad_norm=0.03), {}),
    ent_coef=("update", dict(ent_coef=0.3), {}),
    vf_coef=("update", dict(vf_coef=0.2), {}),
    bootstrap_truncated=("batch", dict(bootstrap_truncated=True), {}),
    device="test_device",
    compile=("compiled", dict(compile=True), {}),
    track=("tracked", dict(track=True), {}),
    wandb_project_name=("tracked", dict(wandb_project_name="other"), dict(track=True)),
    wandb_entity=("tracked", dict(wandb_entity="other"), dict(track=True)),
    save_every=("saved", dict(save_every=1), {}),
    resume="test_resume",
    evaluate="test_evaluation",
    eval_episodes="test_evaluation",
    capture_video="test_evaluation",
)
PPO = COMMON | dict(
    gae_lambda=("batch", dict(gae_lambda=0.5), {}),
    update_epochs=("run", dict(update_epochs=3), {}),
    num_minibatches=("batch", dict(num_minibatches=4), {}),
    norm_adv=("update", dict(norm_adv=False), {}),
    clip_coef=("run", dict(clip_coef=0.02), {}),
    anneal_clip=("run", dict(anneal_clip=True), dict(clip_coef=0.1, total_timesteps=64)),
    clip_vloss=("run", dict(clip_vloss=False), dict(clip_coef=0.02)),
    target_kl=("run", dict(target_kl=1e-5), {}),
)
IMAGES = dict(env_id="TracedImage-v0", learning_rate=1e-3)
REPLAYED = dict(replay_fraction=0.5, num_envs=2, batch_segments=4, total_timesteps=64)
STALE = dict(batch_segments=3, total_timesteps=72)  # every other batch takes one that was left over
RETRACE = dict(target="retrace", cross_mixture=1.0, eval_epsilon=0.2, h_eps=0.1)
FLAGS = {
    "ppo": PPO,
    "ppo_shared": PPO,
    "ppo_atari": PPO
    | dict(
        env_id=("environments", dict(env_id="TracedGameTwin-v0"), {}),
        num_steps=("actions", dict(num_steps=2), {}),
        amp=("batch", dict(amp=True), {}),
    ),
    "ppo_continuous": PPO | dict(env_id=("environments", dict(env_id="TracedBoxTwin-v0"), {})),
    "ppo_lstm": PPO
    | dict(
        num_minibatches=("batch", dict(num_minibatches=1), {}),
        amp=("batch", dict(amp=True), {}),
    ),
    "ppo_multidiscrete": PPO
    | dict(
        env_id=("environments", dict(env_id="TracedMultiTwin-v0"), {}),
        num_bins=("agent", dict(num_bins=4), dict(env_id="TracedBox-v0")),
        normalize=("batch", dict(normalize=False), {}),
        mask_actions=("actions", dict(mask_actions=False), {}),
    ),
    "ppo_async": {name: row for name, row in PPO.items() if name != "update_epochs"}
    | dict(
        num_envs=("environments", dict(num_envs=4, batch_segments=4), {}),
        num_actors=("actions", dict(num_actors=2), dict(num_envs=8, batch_segments=8, num_steps=4)),
        sync="test_sync",
        sample_reuse=("run", dict(sample_reuse=2.5), {}),
        max_staleness=("run", dict(max_staleness=0), STALE),
        decoupled=("batch", dict(decoupled=True), STALE),
        batch_segments=("actions", dict(batch_segments=4), {}),
        amp=("batch", dict(amp=True), IMAGES),
        anneal_clip=("run", dict(anneal_clip=True), dict(clip_coef=0.02, sample_reuse=2.0)),
        clip_vloss=("run", dict(clip_vloss=False), dict(clip_coef=0.02, sample_reuse=2.0)),
        target_kl=("run", dict(target_kl=1e-5), dict(sample_reuse=2.0)),
    ),
    "impala_vtrace": COMMON
    | dict(
        num_envs=("environments", dict(num_envs=4, batch_segments=4), {}),
        num_actors=("actions", dict(num_actors=2), dict(num_envs=8, batch_segments=8, num_steps=4)),
        sync="test_sync",
        correction=("update", dict(correction="none"), REPLAYED | dict(rho_bar=0.7)),
        rho_bar=("update", dict(rho_bar=0.8), {}),
        c_bar=("update", dict(c_bar=0.8), {}),
        vtrace_lambda=("update", dict(vtrace_lambda=0.5), {}),
        rewards=("update", dict(rewards="raw"), {}),
        batch_segments=("actions", dict(batch_segments=4), {}),
        replay_fraction=("actions", dict(replay_fraction=0.5), dict(batch_segments=4)),
        replay_segments=("run", dict(replay_segments=3), REPLAYED),
        optimizer=("update", dict(optimizer="rmsprop"), {}),
        rmsprop_decay=("update", dict(rmsprop_decay=0.5), dict(optimizer="rmsprop")),
        rmsprop_eps=("update", dict(rmsprop_eps=0.5), dict(optimizer="rmsprop")),
        sync_every="test_sync_every",
        network=("agent", dict(network="deep"), IMAGES),
        lstm=("agent", dict(lstm=True), {}),
        amp=("batch", dict(amp=True), IMAGES),
        log_every=("logged", dict(log_every=2), {}),
    ),
    "ngu_r2d2": {
        name: row for name, row in COMMON.items() if name not in ("gamma", "anneal_lr", "ent_coef", "vf_coef")
    }
    | dict(
        total_timesteps=("run", dict(total_timesteps=64), {}),
        bootstrap_truncated=("batch", dict(bootstrap_truncated=False), {}),
        epsilon=("actions", dict(epsilon=0.9), {}),
        eval_epsilon=("update", dict(eval_epsilon=0.5), RETRACE),
        burn_in=("batch", dict(burn_in=2), {}),
        unroll=("batch", dict(unroll=4), {}),
        period=("batch", dict(period=3), {}),
        replay_steps=("run", dict(replay_steps=24), {}),
        learning_starts=("actions", dict(learning_starts=20), {}),
        priority_exponent=("run", dict(priority_exponent=0.1), {}),
        priority_eta=("run", dict(priority_eta=0.1), {}),
        importance_exponent=("run", dict(importance_exponent=0.1), {}),
        cross_mixture=("batch", dict(cross_mixture=1.0), {}),
        save_replay=("saved", dict(save_replay=True), {}),
        adam_eps=("update", dict(adam_eps=1e-2), {}),
        batch_sequences=("batch", dict(batch_sequences=8), {}),
        updates_per_rollout=("run", dict(updates_per_rollout=1), {}),
        target=("update", dict(target="retrace"), {}),
        n_step=("update", dict(n_step=1), {}),
        retrace_lambda=("update", dict(retrace_lambda=0.3), RETRACE),
        target_every=("run", dict(target_every=2), {}),
        h_eps=("update", dict(h_eps=0.1), {}),
        hidden_size=("agent", dict(hidden_size=12), {}),
        squash_reward=("batch", dict(squash_reward=False), {}),
        max_grad_norm=("update", dict(max_grad_norm=0.03), {}),
        num_policies=("agent", dict(num_policies=3), {}),
        beta=("update", dict(beta=0.5), {}),
        gamma_max=("update", dict(gamma_max=0.5), {}),
        gamma_min=("update", dict(gamma_min=0.5), {}),
        neighbors=("batch", dict(neighbors=3), {}),
        memory_size=("batch", dict(memory_size=2), {}),
        kernel_eps=("batch", dict(kernel_eps=0.1), {}),
        bonus=("batch", dict(bonus="batch-mean"), {}),
        rnd=("batch", dict(rnd=False), {}),
        rnd_max=("batch", dict(rnd_max=1.0), {}),
        train_embedding=("run", dict(train_embedding=False), {}),
        embedding_every=("run", dict(embedding_every=2), {}),
        auxiliary_steps=("run", dict(auxiliary_steps=1), {}),
        auxiliary_lr=("run", dict(auxiliary_lr=0.1), {}),
        last_reward_weight=("batch", dict(last_reward_weight=3.0), {}),
        amp=("batch", dict(amp=True), {}),
        log_every=("logged", dict(log_every=2), {}),
    ),
}
ROWS = [
    (name, field) for name, rows in FLAGS.items() for field, row in rows.items() if isinstance(row, tuple)
]


@functools.cache
def cached(name: str, flags: tuple) -> tuple[Run, dict]:
    run = recorded(name, dict(flags))
    return run, stages(run)


def recorded(name: str, flags: dict) -> Run:
    """A recorded run, with a stand-in for Weights & Biases."""
    tracked = []
    init = lambda **kwargs: tracked.append((kwargs["project"], kwargs["entity"]))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
        run = record(ALL[name], **flags)
    run.tracked = tracked
    return run


def stages(run: Run) -> dict:
    first = run.losses[0]
    return dict(
        environments=[(env.unwrapped.spec.id, env.seeds[0]) for env in run.environments],
        agent=run.initial,
        actions=[
            step[1] for env in run.environments for step in env.steps[: first.count // len(run.environments)]
        ],
        batch={key: x.numpy() for key, x in first.batch.items()},
        update=run.steps[0].after,
        run=[len(run.losses), *(step.after for step in run.steps)],
        logged=run.logged,
        saved=[(state["iteration"], sorted(state)) for state in run.saved],
        compiled=len(run.compiled) > 0,
        tracked=run.tracked,
        threads=len(run.threads),
    )


def same(x, y) -> bool:
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return np.array_equal(x, y, equal_nan=isinstance(x, float))


# The numbers by default: of PPO those of "The 37 Implementation Details", of the others see docs/.
PPO = dict(num_envs=4, num_steps=128, total_timesteps=500_000, gamma=0.99, gae_lambda=0.95)
PPO |= dict(learning_rate=2.5e-4, update_epochs=4, num_minibatches=4, clip_coef=0.2, ent_coef=0.01)
PPO |= dict(vf_coef=0.5, max_grad_norm=0.5)
PPO_ATARI = PPO | dict(num_envs=8, total_timesteps=10_000_000, clip_coef=0.1)
PPO_MUJOCO = PPO | dict(num_envs=1, num_steps=2048, total_timesteps=1_000_000, learning_rate=3e-4)
PPO_MUJOCO |= dict(update_epochs=10, num_minibatches=32, ent_coef=0.0)
PPO_ASYNC = PPO_ATARI | dict(num_actors=1, batch_segments=8, sample_reuse=4.0)
del PPO_ASYNC["update_epochs"]
IMPALA = dict(num_envs=8, num_actors=1, num_steps=20, total_timesteps=10_000_000, gamma=0.99)
IMPALA |= dict(rho_bar=1.0, c_bar=1.0, vtrace_lambda=1.0, batch_segments=4, replay_fraction=0.0)
IMPALA |= dict(replay_segments=10_000, learning_rate=6e-4, rmsprop_decay=0.99, rmsprop_eps=0.01)
IMPALA |= dict(ent_coef=0.01, vf_coef=0.5, max_grad_norm=40.0, sync_every=1)
NGU = dict(num_envs=16, num_steps=4, total_timesteps=1_000_000, epsilon=0.4, eval_epsilon=0.01)
NGU |= dict(burn_in=10, unroll=40, period=40, replay_steps=100_000, learning_starts=10_000)
NGU |= dict(priority_exponent=0.9, priority_eta=0.9, importance_exponent=0.6, cross_mixture=0.5)
NGU |= dict(learning_rate=5e-4, adam_eps=1e-7, batch_sequences=16, updates_per_rollout=2, n_step=5)
NGU |= dict(retrace_lambda=0.95, target_every=50, h_eps=1e-3, hidden_size=128, max_grad_norm=40.0)
NGU |= dict(num_policies=2, beta=0.05, gamma_max=0.99, gamma_min=0.95, neighbors=10, memory_size=3000)
NGU |= dict(kernel_eps=1e-3, rnd_max=5.0, embedding_every=500, auxiliary_steps=20, auxiliary_lr=5e-4)
NGU |= dict(last_reward_weight=1.0)
DEFAULTS = dict(ppo=PPO, ppo_shared=PPO, ppo_atari=PPO_ATARI, ppo_lstm=PPO_ATARI, ppo_continuous=PPO_MUJOCO)
DEFAULTS |= dict(ppo_multidiscrete=PPO_MUJOCO | dict(num_bins=11), ppo_async=PPO_ASYNC, impala_vtrace=IMPALA)
DEFAULTS |= dict(ngu_r2d2=NGU)


@pytest.mark.parametrize("name", ALL)
def test_numbers_by_default(name):
    """All of them, but those of the seed, of saving, logging and evaluating."""
    others = ("seed", "save_every", "log_every", "stall_seconds", "eval_episodes")
    found = {key: x for key, x in vars(ALL[name].Args()).items() if type(x) in (int, float)}
    assert {key: x for key, x in found.items() if key not in others} == DEFAULTS[name]


@pytest.mark.parametrize("name", ALL)
def test_every_flag_has_a_row(name):
    assert FLAGS[name].keys() == {field.name for field in fields(ALL[name].Args)}
    elsewhere = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert all(row in globals() or row in elsewhere for row in FLAGS[name].values() if isinstance(row, str))


@pytest.mark.parametrize("name,field", ROWS, ids=[f"{name}-{field}" for name, field in ROWS])
def test_flag(name, field):
    stage, other, both = FLAGS[name][field]
    assert other[field] != (SMALL[name] | both).get(field, getattr(ALL[name].Args, field))
    _, before = cached(name, tuple(both.items()))
    run = recorded(name, both | other)
    after = stages(run)
    place = STAGES.index(stage)
    is_alone = place >= STAGES.index("saved")
    for earlier in STAGES if is_alone else STAGES[:place]:
        assert earlier == stage or same(before[earlier], after[earlier]), earlier
    assert not same(before[stage], after[stage])
    check(run)


def zero(agent: torch.nn.Module):
    for parameter in agent.parameters():
        parameter.zero_()


@pytest.mark.parametrize("name", ALL)
def test_seed_reaches_each_thing_that_is_random(name):
    """Weights, environments, actions (of an agent that sees nothing), minibatches and replay."""
    flags = dict(learning_rate=0.0, num_envs=8)
    flags |= dict(batch_segments=8) if name in ("impala_vtrace", "ppo_async") else {}
    flags |= dict(replay_fraction=0.5, batch_segments=16) if name == "impala_vtrace" else {}
    flags |= dict(epsilon=1.0, batch_sequences=16) if name == "ngu_r2d2" else {}
    flags["total_timesteps"] = 2 * 8 * SMALL[name]["num_steps"]
    one, again, other = (record(ALL[name], adapt=zero, seed=seed, **flags) for seed in (1, 1, 2))
    for what in (lambda run: run.initial, lambda run: run.orders or draws(run), actions_of):
        assert same(what(one), what(again)) and not same(what(one), what(other))
    T, actions = one.args.num_steps, actions_of(one)
    assert len({actions[n].tobytes() for n in range(8)}) == 8  # environments
    assert not same(actions[:, :T], actions[:, T : 2 * T])  # iterations
    drawn = one.orders or draws(one)
    assert len({x.tobytes() for x in drawn}) == len(drawn)


def actions_of(run: Run) -> np.ndarray:
    """(N, S, ...)"""
    return np.array([[step[1] for step in env.steps] for env in run.environments])


def draws(run: Run) -> list[np.ndarray]:
    """What is drawn from the replay for each batch: the policies to train, or the unrolls by their place."""
    if run.script.SCRIPT == "ngu_r2d2":
        return [call.batch["policies"][0].numpy() for call in run.losses]
    T, places = run.args.num_steps, {}
    for n, env in enumerate(run.environments):
        places |= {env.steps[t][0].tobytes(): (n, t) for t in range(0, len(env.steps), T)}
    return [np.array([places[x.tobytes()] for x in call.batch["obs"][0, 8:].numpy()]) for call in run.losses]


@pytest.mark.parametrize("name", ALL)
def test_compile(name):
    """Scripts with actors, and the one whose actions are drawn in NumPy, compile the update alone."""
    compiled = [function.__name__ for function in record(ALL[name], compile=True).compiled]
    assert sorted(compiled) == (["act", "update"] if name in SCRIPTS else ["update"])


@pytest.mark.parametrize("name", ["impala_vtrace", "ppo_async"])
def test_sync(name):
    """Environments work in other threads, but with --sync in the learner's."""
    assert record(ALL[name], sync=True).threads == {threading.current_thread().name}
    assert threading.current_thread().name not in record(ALL[name], sync=False).threads


@pytest.mark.parametrize("name", [name for name in FLAGS if "target_kl" in FLAGS[name]])
def test_target_kl_is_compared_with_the_last_minibatch(name):
    """Below the divergence of the first pass, by a percent, the passes end there; above it they go on."""
    batch_size = SMALL[name]["num_envs"] * SMALL[name]["num_steps"]
    flags = dict(total_timesteps=batch_size) | (dict(sample_reuse=2.0) if name == "ppo_async" else {})
    run = record(ALL[name], **flags)
    passes, size = len(run.losses) // run.args.num_minibatches, run.args.num_minibatches
    reached = ppo_numbers(run, size - 1)["approx_kl"]
    assert reached > 1e-5 and passes == 2
    assert len(record(ALL[name], target_kl=0.99 * reached, **flags).losses) == size
    assert len(record(ALL[name], target_kl=1.01 * reached, **flags).losses) == 2 * size


def test_sync_every(monkeypatch):
    """Two learners sum gradients in every update, or average parameters in every third."""
    script, summed, averaged = ALL["impala_vtrace"], [], []
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_: None)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda x, *_: summed.append(x) if x.numel() > 1 else None
    )
    monkeypatch.setattr(script, "average_with_neighbor", lambda flat: averaged.append(len(run_so_far)))
    run_so_far, original = [], script.vtrace
    monkeypatch.setattr(script, "vtrace", lambda *args: run_so_far.append(1) or original(*args))
    flags = dict(num_envs=4, batch_segments=4, num_steps=4, total_timesteps=16 * 6, max_grad_norm=1e9)
    one = record(script, sync_every=1, **flags)
    assert len(summed) == 6 and not averaged
    np.testing.assert_allclose(one.steps[0].grad, one.losses[0].grad, rtol=1e-4, atol=1e-6)
    summed.clear()
    run_so_far.clear()
    alone = record(script, sync_every=3, **flags)
    assert not summed and averaged == [3, 6]
    np.testing.assert_allclose(alone.steps[0].grad, 2 * alone.losses[0].grad, rtol=1e-4, atol=1e-6)


def test_actors_get_the_parameters_that_were_averaged(monkeypatch):
    """Before each update, the agent that acts is the learner's."""
    script, published, same = ALL["impala_vtrace"], [], []
    publish, loss = script.publish, script.impala_loss
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    for name in ("init_process_group", "destroy_process_group", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, lambda *_: None)
    monkeypatch.setattr(script, "average_with_neighbor", lambda flat: flat.data.mul_(0.9))

    def published_to(agent, version, exchange, args):
        publish(agent, version, exchange, args)
        published.append(exchange.published[0])

    def compared(agent, *others):
        same.append(torch.equal(agent.actor.weight, published[-1].actor.weight))
        return loss(agent, *others)

    monkeypatch.setattr(script, "publish", published_to)
    monkeypatch.setattr(script, "impala_loss", compared)
    flags = dict(num_envs=4, batch_segments=4, num_steps=4, total_timesteps=16 * 6)
    script.train(script.Args(**SMALL["impala_vtrace"] | flags | dict(sync_every=2)))
    assert same == [True] * 6


@pytest.mark.parametrize("name", ALL)
def test_device(name, monkeypatch, capsys):
    """A GPU that is not there is named in one line; test_devices.py and test_gpu.py have what runs on one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cuda"])
    with pytest.raises(SystemExit, match="2"):
        ALL[name].parse_args()
    assert "no GPU" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("name", ALL)
def test_stall_seconds(name, monkeypatch, capsys):
    """main() alone starts a thread that watches the heartbeats, if it is asked to, and then forgets them."""
    script, watched, run_dir = ALL[name], [], str(finished(name).run_dir)

    class Thread:
        def __init__(self, target, args, daemon):
            self.start = lambda: watched.append((target, args, daemon))

    monkeypatch.setattr(script, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(script, "train", lambda args: script.heartbeat("iteration"))
    monkeypatch.setattr(script, "evaluate", lambda args: [float("evaluation" in script.HEARTBEATS)])
    for mode in ([], ["--evaluate", run_dir]):
        for seconds in (0, 7):
            monkeypatch.setattr(sys, "argv", ["x.py", *mode, "--stall-seconds", str(seconds)])
            script.main()
            assert watched == ([(script.watch_heartbeats, [seconds], True)] if seconds else [])
            assert script.HEARTBEATS == {}
            assert ("return 1.00" in capsys.readouterr().out) == bool(
                mode
            )  # making the environment counts, too
            watched.clear()


@functools.cache
def finished(name: str) -> Run:
    """A run whose checkpoint is on the disk."""
    return record(ALL[name], writes=True)


@pytest.mark.parametrize("name", ALL)
def test_resume(name):
    """Folder, iterations, parameters and the optimizer's state go on; environments begin new episodes."""
    before = finished(name)
    folder = Path(shutil.copytree(before.run_dir, "copy")).resolve()
    run = record(ALL[name], resume=str(folder), total_timesteps=2 * before.args.total_timesteps)
    assert run.run_dir == folder
    assert run.saved[-1]["iteration"] == 2 * before.saved[-1]["iteration"]
    np.testing.assert_array_equal(
        run.steps[0].before, [s for s in before.steps if len(s.after) == len(run.steps[0].before)][-1].after
    )
    seeds = [env.seeds[0] for env in run.environments]
    assert seeds == [before.args.seed + before.args.total_timesteps + n for n in range(before.args.num_envs)]
    taken = (before.saved[-1]["optimizer"], run.saved[0]["optimizer"])
    counts = [state["state"][0]["step"].item() for state in taken]
    assert counts[1] == counts[0] + len(run.losses)


def play(name: str, **flags):
    """Returns of --evaluate, its environments, the folder for videos, and arguments of training."""
    script, run_dir, folders, beats = ALL[name], str(finished(name).run_dir), [], []
    saved = script.load_checkpoint(run_dir)["args"]
    with pytest.MonkeyPatch.context() as patch:
        hook_environments(script, patch)
        make_env = script.make_env

        def noted(*args):
            folders.append(args[-1])
            return make_env(*args[:-1])

        patch.setattr(script, "make_env", noted)
        heartbeat = script.heartbeat
        patch.setattr(script, "heartbeat", lambda loop: beats.append(loop) or heartbeat(loop))
        returns = script.evaluate(replace(saved, evaluate=run_dir, **flags))
        assert beats == ["evaluation"] * len(Traced.made[0].steps)
        return returns, Traced.made, folders, saved


@pytest.mark.parametrize("name", ALL)
def test_evaluation(name):
    """Returns are those that the environment gave, by its seed; videos, episodes, share of random actions."""
    returns, (env,), folders, saved = play(name, eval_episodes=3)
    sums, total = [], 0.0
    for *_, reward, _, terminated, truncated in (step[1:] for step in env.steps):
        total += reward
        if terminated or truncated:
            sums, total = [*sums, total], 0.0
    assert len(returns) == 3 and folders == [None]
    np.testing.assert_allclose(returns, sums, rtol=1e-5, atol=1e-5)
    assert env.seeds[0] == saved.seed + saved.total_timesteps + saved.num_envs  # none that training has seen
    more, (longer,), folders, _ = play(name, eval_episodes=5, capture_video=True)
    assert len(more) == 5 and more[:3] == returns and folders == [Path(finished(name).run_dir) / "videos"]
    assert play(name, eval_episodes=3, seed=7)[1][0].seeds[0] == env.seeds[0] + 6
    if name == "ngu_r2d2":
        actions = [
            [step[1] for step in play(name, eval_episodes=20, eval_epsilon=x)[1][0].steps] for x in (0, 0.9)
        ]
        assert not same(*actions)
