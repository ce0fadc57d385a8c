"""The suites: what is run, how often, and what others have published of it.

A target is a score of published/scores.csv (mean and std over runs, mostly of each run's mean of its last 100
training episodes) or a curve of published/curves.csv. What CleanRL's own scripts did here is in
published/cleanrl/, which studies/cleanrl.py makes.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

PUBLISHED = Path(__file__).with_name("published")
# the scripts of CleanRL that do what ours do with their defaults
CLEANRL = {
    "ppo": "ppo",
    "ppo_shared": "ppo_one_network",
    "ppo_continuous": "ppo_continuous_action",
    "ppo_atari": "ppo_atari",
    "ppo_lstm": "ppo_atari_lstm",
}
# flags that had other names when the first results were made, by script; files of results keep those
RENAMED = {
    "impala_vtrace": {"batch-segments": "batch-unrolls", "replay-segments": "replay-unrolls"},
    "ppo_async": {"batch-segments": "batch-unrolls", "num-steps": "segment-length"},
}


@dataclass(frozen=True)
class Target:
    by: str  # whose number it is
    env_id: str  # theirs, which may be another version
    mean: float | None = None  # at the end of the row's schedule; None: it is a curve
    spread: float | None = None  # None: a single run
    runs: int | None = None
    is_std: bool = True  # spread is a standard deviation over runs; else the source does not say what it is
    curve: str | None = None  # algo in published/curves.csv


@dataclass(frozen=True)
class Row:
    script: str
    env_id: str
    steps: int  # of the whole schedule
    targets: tuple[Target, ...] = ()
    flags: str = ""
    label: str = ""  # tells apart rows of the same task in tables and figures
    seeds: int = 5  # how many run.py runs; 0: the row is only run if it is given seeds
    stop_at: int | None = None  # step at which run.py stops a run, on the whole schedule
    threads: int = 1  # of a run
    panel: str = ""  # of the suite's figure; else rows of the same task share one
    is_drawn: bool = True  # in the suite's figure
    has_peers: bool = True  # false where nobody's runs had this schedule, or this version of the task

    @property
    def task(self) -> str:
        return self.env_id.split(":")[-1]

    @property
    def is_comparable(self) -> bool:
        """Whether CleanRL has the same script and task, with the same flags."""
        is_theirs = self.script in CLEANRL and not self.flags and "." not in self.env_id
        return is_theirs and self.has_peers

    @property
    def file(self) -> str:
        """What is run: the script, or the study that gives it a flag."""
        is_delayed = "artificial-delay" in self.options()
        return "benchmark/studies/staleness.py" if is_delayed else f"{self.script}.py"

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
        """Name of its results, without the seed: task, script and every flag."""
        first = RENAMED.get(self.script, {})
        options = self.options(more).items()
        flags = (f"{first.get(name, name)}={x}" if x else name for name, x in options)
        return "__".join((self.task, self.script, *flags)).replace("/", "-").replace(" ", "+")


def score(source: str, env_id: str) -> tuple[Target, ...]:
    """Of scores.csv."""
    with open(PUBLISHED / "scores.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["source"], row["env_id"]) == (source, env_id)]
    return tuple(
        Target(
            "openai/baselines" if row["algo"].startswith("PPO2") else "CleanRL",
            env_id,
            float(row["mean"]),
            float(row["std"]) if row["std"] else None,
            int(row["n_seeds"]),
        )
        for row in rows
    )


def curve(by: str, algo: str, env_id: str, is_std: bool = True) -> Target:
    return Target(by, env_id, curve=algo, is_std=is_std)


def classic() -> list[Row]:
    tasks = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
    drawn = {task: task != "MountainCar-v0" for task in tasks}  # nobody's PPO learns it
    rows = [
        Row("ppo", task, 500_000, score("f1", task) + score("f10", task), seeds=10, is_drawn=drawn[task])
        for task in tasks
    ]
    return rows + [Row("ppo_shared", task, 500_000, seeds=10, is_drawn=drawn[task]) for task in tasks]


def mujoco(task: str, seeds: int, flags: str = "", label: str = "") -> Row:
    targets = score("f8", f"{task}-v4") + score("f131", f"{task}-v2")
    # of August 2018: a table without a spread, so that is the one of the page's curve at its end
    curve_of_page = dict(by="openai/baselines 2018", curve="ppo2", is_std=False)
    targets += tuple(replace(x, **curve_of_page) for x in score("f132", f"{task}-v2"))
    targets += score("f133", f"{task}-v4")  # the PPO beside which CleanRL shows its RPO
    return Row("ppo_continuous", f"{task}-v4", 1_000_000, targets, flags, label, seeds)


def atari(script: str, game: str, stop_at: int | None, seeds: int, flags: str = "", label: str = "") -> Row:
    env_id, lstm = f"{game}NoFrameskip-v4", script == "ppo_lstm"
    scores = [score(x, env_id) for x in (("f3", "f12") if lstm else ("f2", "f11", "f130"))]
    curves = (
        curve("openai/baselines", f"openai_baselines_ppo2{'_cnn_lstm' * lstm}", env_id),
        curve("the blog", f"ppo_atari{'_lstm' * lstm}.py(blog)", env_id),
    )
    if not lstm:
        curves += (curve("openai/baselines 2018", "ppo2", env_id, is_std=False),)
    targets = (*sum(scores, ()), *curves)
    return Row(script, env_id, 10_000_000, targets, flags, label, seeds, stop_at, threads=2)


def impala(game: str, stop_at: int, seeds: int, *targets: Target) -> Row:
    env_id, schedule = f"{game}NoFrameskip-v4", 10_000_000
    return Row("impala_vtrace", env_id, schedule, targets, seeds=seeds, stop_at=stop_at, threads=2)


MICRORTS = "--no-normalize --num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4"
MICRORTS += " --learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01"

# IMPALA's defaults are those of Atari: vectors want larger steps and the paper's optimizer
IMPALA = "--optimizer rmsprop --num-envs 8 --batch-segments 8 --learning-rate 5e-3 --vf-coef 0.05"
IMPALA += " --ent-coef 0.001 --bootstrap-truncated --device cpu"
REPLAY = "--optimizer rmsprop --batch-segments 16 --replay-fraction 0.5 --learning-rate 5e-3"
REPLAY += " --vf-coef 0.05 --ent-coef 0.001 --bootstrap-truncated --device cpu"

ASYNC = "--num-envs 8 --num-steps 32 --batch-segments 8 --learning-rate 1e-3 --clip-coef 0.2 --device cpu"
ASYNC += " --sample-reuse 1"
ONE_PASS = "--num-envs 16 --batch-segments 16 --sample-reuse 1"  # the defaults until 28 November 2026

R2D2 = "--num-policies 1 --beta 0"
PONG = "--amp --burn-in 5 --unroll 20 --period 20 --auxiliary-steps 5 --batch-sequences 8 --target-every 100"

HIDDEN = "benchmark.tasks:MaskedCartPole-v0"
HIDDEN_PPO = "--num-envs 16 --learning-rate 2e-3 --device cpu"

MUJOCO = ("HalfCheetah", "Hopper", "Walker2d", "InvertedPendulum", "InvertedDoublePendulum", "Reacher")
MUJOCO = (*MUJOCO, "Swimmer", "Humanoid")

SUITES = {
    "classic": classic(),
    "mujoco": [
        *(mujoco(task, 10) for task in MUJOCO),
        mujoco("InvertedDoublePendulum", 5, "--bootstrap-truncated", "bootstrapped at time limits"),
        Row(  # the same reward as in the curve, which has no clipping of actions
            "ppo_continuous",
            "benchmark.tasks:UnclippedReacher-v4",
            1_000_000,
            (curve("openai/baselines 2018", "ppo2", "Reacher-v2", is_std=False),),
            is_drawn=False,
        ),
    ],
    "mujoco_v5": [Row("ppo_continuous", f"{task}-v5", 1_000_000, has_peers=False) for task in MUJOCO],
    "mujoco_11_bins": [  # the same tasks with Gaussians are in the MuJoCo suite
        Row("ppo_multidiscrete", f"{task}-v4", 1_000_000)
        for task in ("HalfCheetah", "Hopper", "Walker2d", "Humanoid")
    ],
    "atari": [
        atari("ppo_atari", "Breakout", None, 3),
        atari("ppo_atari", "Pong", 3_000_000, 1),
        atari("ppo_atari", "BeamRider", 2_400_000, 1),
    ],
    "atari_amp": [atari("ppo_atari", "Breakout", None, 1, "--amp", "bfloat16")],
    "atari_lstm": [
        atari("ppo_lstm", "Breakout", 2_000_000, 1),
        atari("ppo_lstm", "Pong", 2_000_000, 1),
        atari("ppo_lstm", "BeamRider", None, 0),
    ],
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
        impala(
            "Pong",
            10_000_000,
            2,
            curve("RLlib, 32 workers", "rllib_impala_lowlatency-32", "PongNoFrameskip-v4"),
        ),
        impala(
            "Breakout",
            10_000_000,
            2,
            curve("RLlib", "rllib_impala", "BreakoutNoFrameskip-v4"),
            curve("RLlib 2020", "rllib_impala_2020_torch", "BreakoutNoFrameskip-v4"),
            curve("RLlib 2020, TensorFlow", "rllib_impala_2020_tf", "BreakoutNoFrameskip-v4"),
        ),
        *(impala(game, 5_000_000, 1) for game in ("BeamRider", "Qbert", "SpaceInvaders")),
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
        *(
            Row(
                "ppo_async",
                f"{game}NoFrameskip-v4",
                10_000_000,
                (curve("the blog", "ppo_atari.py(blog)", f"{game}NoFrameskip-v4"),),
                flags,
                label,
                seeds,
                threads=2,
            )
            for flags, label, seeds in (("", "", 1), (ONE_PASS, "one pass", 0))
            for game in ("Breakout", "Pong")
        ),
    ],
    "staleness": [  # figures of Berner et al. 2019, appendix M, on a small task: in turn, so exactly so stale
        Row("ppo_async", "CartPole-v1", 200_000, (), f"{ASYNC} --sync {flags}", label, panel=panel)
        for panel, label, flags in (
            *(("staleness", f"{k}", f"--artificial-delay {k}") for k in (0, 1, 2, 4, 8)),
            *(("decoupled", f"{k}", f"--artificial-delay {k} --decoupled") for k in (0, 1, 2, 4, 8)),
            *(("reuse", f"{r}", f"--sample-reuse {r}") for r in (0.5, 1, 2, 4, 8)),
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
