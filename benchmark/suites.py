"""The suites: what is run, how often, and what others have published of it.

A target is a final score (mean and std over seeds of each seed's mean of its last 100 training episodes) or a
curve of published/curves.csv, or both. The first target of a row is the one that it is judged by.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    by: str  # whose number it is
    mean: float | None = None  # of the last 100 training episodes, over seeds
    std: float | None = None
    curve: tuple[str, str] | None = None  # algo and env_id in published/curves.csv


@dataclass(frozen=True)
class Row:
    script: str
    env_id: str
    steps: int  # of the whole schedule
    targets: tuple[Target, ...] = ()
    flags: str = ""
    label: str = ""  # tells apart rows of the same script and task in tables and figures
    seeds: int = 5  # how many run.py runs; 0: the row is only run if it is given seeds
    stop_at: int | None = None  # step at which run.py stops a run, on the whole schedule
    threads: int = 1  # of a run

    @property
    def task(self) -> str:
        return self.env_id.split(":")[-1]

    def options(self, more: str = "") -> dict[str, str]:
        """Flags by name; of one that is given twice, the last counts."""
        found = {}
        for word in f"{self.flags} {more}".split():
            if word.startswith("--"):
                name, _, found[name] = word[2:].partition("=")
            else:
                found[name] = f"{found[name]} {word}".strip()
        return found

    def name(self, more: str = "") -> str:
        """Of its results, without the seed: task, script and every flag."""
        flags = (f"{name}={x}" if x else name for name, x in self.options(more).items())
        return "__".join((self.task, self.script, *flags)).replace("/", "-").replace(" ", "+")


def cleanrl(mean: float, std: float) -> Target:
    return Target("CleanRL", mean, std)


def baselines(mean: float, std: float, env_id: str | None = None) -> Target:
    """openai/baselines's ppo2; its curve on an environment, if published."""
    return Target("openai/baselines", mean, std, ("ppo2", env_id) if env_id else None)


def curve(by: str, algo: str, env_id: str) -> Target:
    return Target(by, curve=(algo, env_id))


def classic(script: str) -> list[Row]:
    rows = (
        ("CartPole-v1", cleanrl(490.04, 6.12), baselines(497.54, 4.02)),
        ("Acrobot-v1", cleanrl(-86.36, 1.32), baselines(-81.82, 5.58)),
        ("MountainCar-v0", cleanrl(-200, 0), baselines(-200, 0)),
    )
    return [Row(script, env_id, 500_000, targets, seeds=10) for env_id, *targets in rows]


def atari(script: str, plan: dict[str, tuple], blog: str, theirs: str) -> list[Row]:
    """plan: of each game, the step at which to stop, the number of seeds and the targets."""
    rows = []
    for game, (stop_at, seeds, *targets) in plan.items():
        env_id = f"{game}NoFrameskip-v4"
        curves = curve("openai/baselines", theirs, env_id), curve("the blog", blog, env_id)
        more = dict(seeds=seeds, stop_at=stop_at, threads=2)
        rows.append(Row(script, env_id, 10_000_000, (*curves, *targets), **more))
    return rows


MICRORTS = "--no-normalize --num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4"
MICRORTS += " --learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01"

# IMPALA's defaults are those of Atari: vectors want smaller batches and larger steps
IMPALA = "--num-envs 8 --batch-unrolls 8 --learning-rate 5e-3 --vf-coef 0.05 --ent-coef 0.001"
IMPALA += " --bootstrap-truncated --device cpu"
REPLAY = f"{IMPALA} --batch-unrolls 16 --replay-fraction 0.5"

# an update every 80 steps instead of 640: what a run of 3M steps needs, not one of 200M
SMALL_BATCHES = "--num-envs 16 --num-steps 10 --batch-unrolls 8"

ASYNC = "--num-envs 8 --segment-length 32 --batch-unrolls 8 --learning-rate 1e-3 --clip-coef 0.2 --device cpu"

R2D2 = "--num-policies 1 --beta 0"
PONG = "--amp --burn-in 5 --unroll 20 --period 20 --auxiliary-steps 5 --batch-sequences 8 --target-every 100"

HIDDEN = "benchmark.tasks:MaskedCartPole-v0"
HIDDEN_PPO = "--num-envs 16 --learning-rate 2e-3 --device cpu"

SUITES = {
    "classic": classic("ppo") + classic("ppo_shared"),
    "mujoco": [
        Row(
            "ppo_continuous",
            f"{task}-v4",
            1_000_000,
            (*targets, curve("openai/baselines", "ppo2", f"{task}-v2")),
            seeds=seeds,
        )
        for task, seeds, *targets in (
            ("HalfCheetah", 10, cleanrl(1442.64, 46.03)),
            ("Hopper", 10, cleanrl(2382.86, 271.74)),
            ("Walker2d", 10, cleanrl(2287.95, 571.78)),
            ("InvertedPendulum", 5, cleanrl(963.09, 22.20)),
            ("InvertedDoublePendulum", 5),
            ("Reacher", 5),
            ("Swimmer", 5),
        )
    ],
    "mujoco_11_bins": [Row("ppo_multidiscrete", "HalfCheetah-v4", 1_000_000)],
    "atari": atari(
        "ppo_atari",
        {
            "Breakout": (None, 1, cleanrl(414.66, 28.09), baselines(406.57, 31.55)),
            "Pong": (3_000_000, 1, cleanrl(20.36, 0.20), baselines(20.51, 0.50)),
            "BeamRider": (2_000_000, 1, cleanrl(1915.93, 484.58), baselines(2642.97, 670.37)),
        },
        "ppo_atari.py(blog)",
        "openai_baselines_ppo2",
    ),
    "atari_lstm": atari(
        "ppo_lstm",
        {
            "Breakout": (2_000_000, 1, cleanrl(113.42, 5.85), baselines(138.98, 50.76)),
            "Pong": (2_000_000, 1, cleanrl(19.81, 0.62), baselines(19.79, 0.67)),
            "BeamRider": (None, 0, cleanrl(1299.25, 509.90), baselines(1591.68, 372.95)),
        },
        "ppo_atari_lstm.py(blog)",
        "openai_baselines_ppo2_cnn_lstm",
    ),
    "microrts": [
        Row(
            "ppo_multidiscrete",
            f"benchmark.microrts:{task}-v1",
            2_000_000,
            (
                curve("the blog", "ppo_multidiscrete.py(blog)", f"{task}-v1"),
                curve("openai/baselines", "openai_baselines_ppo2_multidiscrete", f"{task}-v1"),
            ),
            f"{MICRORTS} --{masks}",
            label,
            seeds,
            stop_at=1_000_000,
        )
        for task, masks, label, seeds in (
            ("MicrortsMining", "no-mask-actions", "", 2),
            ("MicrortsMining", "mask-actions", "masked", 2),
            ("MicrortsAttackShapedReward", "no-mask-actions", "", 0),
            ("MicrortsRandomEnemyShapedReward3", "no-mask-actions", "", 0),
        )
    ],
    "impala": [
        Row("impala_vtrace", "CartPole-v1", 500_000, flags=IMPALA),
        Row("impala_vtrace", "CartPole-v1", 500_000, flags=f"{IMPALA} --sync", label="sync"),
        *(
            Row(
                "impala_vtrace",
                "PongNoFrameskip-v4",
                10_000_000,
                tuple(
                    curve(f"RLlib, {n} workers", f"rllib_impala_lowlatency-{n}", "PongNoFrameskip-v4")
                    for n in (32, 64, 128)
                ),
                flags,
                label,
                seeds=1,
                stop_at=3_000_000,
                threads=2,
            )
            for flags, label in (
                ("", ""),
                (SMALL_BATCHES, "small batches"),
                (f"{SMALL_BATCHES} --learning-rate 1.5e-3", "small batches, large steps"),
            )
        ),
        Row(
            "impala_vtrace",
            "BreakoutNoFrameskip-v4",
            10_000_000,
            (
                curve("RLlib", "rllib_impala", "BreakoutNoFrameskip-v4"),
                curve("RLlib 2020", "rllib_impala_2020_torch", "BreakoutNoFrameskip-v4"),
            ),
            seeds=0,
            threads=2,
        ),
    ],
    "vtrace_ablation": [  # section 5.2.2 of IMPALA's paper on small tasks: half of each batch is replayed
        Row("impala_vtrace", env_id, steps, flags=f"{REPLAY} {flags} --correction {kind}", label=kind)
        for env_id, steps, flags in (
            ("CartPole-v1", 200_000, ""),
            ("benchmark.tasks:CliffWalk-v0", 100_000, "--rewards raw --ent-coef 0.01 --sync"),
        )
        for kind in ("vtrace", "one-step-is", "epsilon", "none")
    ],
    "off_policy_ppo": [
        Row("ppo_async", "CartPole-v1", 500_000, flags=ASYNC),
        Row("ppo_async", "CartPole-v1", 500_000, flags=f"{ASYNC} --sync", label="sync"),
        Row(
            "ppo_async",
            "PongNoFrameskip-v4",
            10_000_000,
            (curve("the blog", "ppo_atari.py(blog)", "PongNoFrameskip-v4"),),
            "--num-envs 8 --segment-length 128 --batch-unrolls 8 --sample-reuse 4 --amp",
            seeds=1,
            stop_at=1_000_000,
            threads=2,
        ),
    ],
    "staleness": [  # figures of Berner et al. 2019, appendix M, on a small task: in turn, so exactly so stale
        Row("ppo_async", "CartPole-v1", 200_000, flags=f"{ASYNC} --sync {flags}", label=label)
        for label, flags in (
            *((f"delay_{k}", f"--artificial-delay {k}") for k in (0, 1, 2, 4, 8)),
            *((f"decoupled_{k}", f"--artificial-delay {k} --decoupled") for k in (0, 1, 2, 4, 8)),
            *((f"reuse_{r}", f"--sample-reuse {r}") for r in (0.5, 1, 2, 4, 8)),
        )
    ],
    "ngu": [  # the returns are those of the policy with beta 0; the defaults were tuned on DoorKey
        *(
            Row("ngu_r2d2", f"MiniGrid-{task}", steps, flags=flags, label=label)
            for task, steps in (
                ("DoorKey-8x8-v0", 300_000),
                ("MultiRoom-N4-S5-v1", 300_000),
                ("KeyCorridorS3R2-v0", 500_000),
            )
            for flags, label in (("", "Never Give Up"), (R2D2, "R2D2"))
        ),
        Row("ngu_r2d2", "PongNoFrameskip-v4", 1_000_000, flags=PONG, seeds=0, threads=2),
    ],
    "ngu_bonus_scales": [  # other scales of the episodic reward, and a weight on an episode's last reward
        Row("ngu_r2d2", "MiniGrid-DoorKey-8x8-v0", 160_000, flags=flags, label=label, seeds=0)
        for label, flags in (
            ("min-max", "--bonus min-max"),
            ("batch-mean", "--bonus batch-mean"),
            ("long-run-mean", "--bonus long-run-mean"),
            ("zero-mean", "--bonus zero-mean"),
            ("unit-std", "--bonus unit-std"),
            ("last reward 10", "--last-reward-weight 10"),
        )
    ],
    "memory": [  # CartPole without its velocities, whose best return is 25
        Row("ppo", HIDDEN, 150_000, flags=HIDDEN_PPO, label="no memory"),
        Row("ppo_lstm", HIDDEN, 150_000, flags=HIDDEN_PPO),
        Row("impala_vtrace", HIDDEN, 300_000, flags=f"{IMPALA} --lstm --vf-coef 0.5", label="LSTM"),
        Row("ngu_r2d2", HIDDEN, 300_000, flags=f"{R2D2} --num-steps 2", label="R2D2"),
    ],
}
