"""The suites: what is run, and what others have published of it.

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
    steps: int
    targets: tuple[Target, ...]
    flags: tuple[str, ...] = ()
    variant: str = ""  # tells apart rows of the same script and task

    @property
    def name(self) -> str:
        """Of its results, without the seed."""
        task = self.env_id.split(":")[-1].replace("/", "-")
        return "__".join(filter(None, (task, self.script, self.variant)))


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
    return [Row(script, env_id, 500_000, targets) for env_id, *targets in rows]


def atari(script: str, scores: dict[str, tuple[Target, ...]], blog: str, theirs: str) -> list[Row]:
    return [
        Row(
            script,
            f"{game}NoFrameskip-v4",
            10_000_000,
            (
                curve("openai/baselines", theirs, f"{game}NoFrameskip-v4"),
                curve("the blog", blog, f"{game}NoFrameskip-v4"),
                *targets,
            ),
        )
        for game, targets in scores.items()
    ]


MICRORTS = "--no-normalize --num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4".split()
MICRORTS += "--learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01".split()

# IMPALA's defaults are those of Atari: vectors want smaller batches and larger steps
IMPALA = "--num-envs 8 --batch-unrolls 8 --learning-rate 5e-3 --vf-coef 0.05 --ent-coef 0.001".split()
IMPALA += "--bootstrap-truncated --device cpu".split()
ABLATION = [*IMPALA, "--batch-unrolls", "16", "--replay-fraction", "0.5"]

# an update every 80 steps instead of 640: what a run of 3M steps needs, not one of 200M
SMALL_BATCHES = tuple("--num-envs 16 --num-steps 10 --batch-unrolls 8".split())
LARGE_STEPS = (*SMALL_BATCHES, "--learning-rate", "1.5e-3")

ASYNC = "--num-envs 8 --segment-length 32 --batch-unrolls 8 --learning-rate 1e-3 --clip-coef 0.2".split()
ASYNC += ["--device", "cpu"]

R2D2 = tuple("--num-policies 1 --beta 0".split())
BONUSES = ("min-max", "batch-mean", "long-run-mean", "zero-mean", "unit-std")
CART = tuple("--num-steps 2".split())
PONG = "--amp --burn-in 5 --unroll 20 --period 20 --auxiliary-steps 5 --batch-sequences 8 --target-every 100"

MASKED = "--num-envs 16 --learning-rate 2e-3 --device cpu".split()

SUITES = {
    "classic": classic("ppo") + classic("ppo_shared"),
    "mujoco": [
        Row(
            "ppo_continuous",
            f"{task}-v4",
            1_000_000,
            (*targets, curve("openai/baselines", "ppo2", f"{task}-v2")),
        )
        for task, *targets in (
            ("HalfCheetah", cleanrl(1442.64, 46.03)),
            ("Hopper", cleanrl(2382.86, 271.74)),
            ("Walker2d", cleanrl(2287.95, 571.78)),
            ("InvertedPendulum", cleanrl(963.09, 22.20)),
            ("InvertedDoublePendulum",),
            ("Reacher",),
            ("Swimmer",),
        )
    ],
    "atari": atari(
        "ppo_atari",
        {
            "Pong": (cleanrl(20.36, 0.20), baselines(20.51, 0.50)),
            "Breakout": (cleanrl(414.66, 28.09), baselines(406.57, 31.55)),
            "BeamRider": (cleanrl(1915.93, 484.58), baselines(2642.97, 670.37)),
        },
        "ppo_atari.py(blog)",
        "openai_baselines_ppo2",
    ),
    "atari_lstm": atari(
        "ppo_lstm",
        {
            "Pong": (cleanrl(19.81, 0.62), baselines(19.79, 0.67)),
            "Breakout": (cleanrl(113.42, 5.85), baselines(138.98, 50.76)),
            "BeamRider": (cleanrl(1299.25, 509.90), baselines(1591.68, 372.95)),
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
            (*MICRORTS, "--no-mask-actions"),
        )
        for task in ("MicrortsMining", "MicrortsAttackShapedReward", "MicrortsRandomEnemyShapedReward3")
    ],
    "impala": [
        Row("impala_vtrace", "CartPole-v1", 500_000, (), (*IMPALA,)),
        Row("impala_vtrace", "CartPole-v1", 500_000, (), (*IMPALA, "--sync"), "sync"),
        Row(
            "impala_vtrace",
            "benchmark.tasks:MaskedCartPole-v0",
            300_000,
            (),
            (*IMPALA, "--lstm", "--vf-coef", "0.5"),  # returns of 25 at most, not of 500
            "lstm",
        ),
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
                variant,
            )
            for flags, variant in (((), ""), (SMALL_BATCHES, "small_batches"), (LARGE_STEPS, "large_steps"))
        ),
        Row(
            "impala_vtrace",
            "BreakoutNoFrameskip-v4",
            10_000_000,
            (
                curve("RLlib", "rllib_impala", "BreakoutNoFrameskip-v4"),
                curve("RLlib 2020", "rllib_impala_2020_torch", "BreakoutNoFrameskip-v4"),
            ),
        ),
    ],
    "ablation": [  # section 5.2.2 of IMPALA's paper on small tasks: half of each batch is replayed
        Row("impala_vtrace", env_id, steps, (), (*ABLATION, *flags, "--correction", kind), kind)
        for env_id, steps, flags in (
            ("CartPole-v1", 200_000, ()),
            ("benchmark.tasks:CliffWalk-v0", 100_000, "--rewards raw --ent-coef 0.01 --sync".split()),
        )
        for kind in ("vtrace", "one-step-is", "epsilon", "none")
    ],
    "async": [
        Row("ppo_async", "CartPole-v1", 500_000, (), (*ASYNC,)),
        Row("ppo_async", "CartPole-v1", 500_000, (), (*ASYNC, "--sync"), "sync"),
        Row(
            "ppo_async",
            "PongNoFrameskip-v4",
            10_000_000,
            (curve("the blog", "ppo_atari.py(blog)", "PongNoFrameskip-v4"),),
            tuple("--num-envs 8 --segment-length 128 --batch-unrolls 8 --sample-reuse 4 --amp".split()),
        ),
    ],
    "staleness": [  # figures of Berner et al. 2019, appendix M, on a small task: in turn, so exactly so stale
        Row("ppo_async", "CartPole-v1", 200_000, (), (*ASYNC, "--sync", *flags.split()), variant)
        for variant, flags in (
            *((f"delay_{k}", f"--artificial-delay {k}") for k in (0, 1, 2, 4, 8)),
            *((f"decoupled_{k}", f"--artificial-delay {k} --decoupled") for k in (0, 1, 2, 4, 8)),
            *((f"reuse_{r}", f"--sample-reuse {r}") for r in (0.5, 1, 2, 4, 8)),
        )
    ],
    "ngu": [  # the returns are those of the policy with beta 0
        Row("ngu_r2d2", "benchmark.tasks:MaskedCartPole-v0", 300_000, (), (*R2D2, *CART), "r2d2"),
        Row("ngu_r2d2", "MiniGrid-Empty-8x8-v0", 200_000, (), R2D2, "r2d2"),
        *(
            Row("ngu_r2d2", f"MiniGrid-{task}", 1_000_000, (), flags, variant)
            for task in ("DoorKey-8x8-v0", "MultiRoom-N4-S5-v1")
            for flags, variant in (((), ""), (R2D2, "r2d2"))
        ),
        Row("ngu_r2d2", "PongNoFrameskip-v4", 1_000_000, (), tuple(PONG.split())),
    ],
    "bonus": [  # other scales of the episodic reward, and a weight on an episode's last reward
        Row("ngu_r2d2", "MiniGrid-DoorKey-8x8-v0", 160_000, (), tuple(flags.split()), variant)
        for variant, flags in (
            *((bonus, f"--bonus {bonus}") for bonus in BONUSES),
            ("last_reward_10", "--last-reward-weight 10"),
        )
    ],
    "own": [  # nothing is published of these
        Row("ppo_lstm", "benchmark.tasks:MaskedCartPole-v0", 150_000, (), MASKED),
        Row("ppo", "benchmark.tasks:MaskedCartPole-v0", 150_000, (), MASKED),
        Row("ppo_multidiscrete", "HalfCheetah-v4", 1_000_000, ()),
        Row(
            "ppo_multidiscrete",
            "benchmark.microrts:MicrortsMining-v1",
            2_000_000,
            (),
            (*MICRORTS, "--mask-actions"),
            "masked",
        ),
    ],
}
