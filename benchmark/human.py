"""Returns of Atari runs on the scale of human play: 0 % is random play, 100 % a human's.

    python benchmark/human.py runs/NAME [runs/NAME ...]

It takes the mean of a run's last 100 episodes; in a run of several games that of each game (tasks/), and of
several policies (ngu_r2d2.py) that of the first. Of several runs of a game it takes the mean. It prints the
median over the games, and the mean of what is capped at 100 %. Scores of random and human play are those of
table C.1 of Espeholt et al. 2018 (https://arxiv.org/abs/1802.01561), in published/atari_random_human.csv.
"""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.files import fail  # noqa: E402

SCORES = Path(__file__).with_name("published") / "atari_random_human.csv"


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders


def bounds() -> dict[str, tuple[float, float]]:
    """Scores of random and of human play, by game."""
    with open(SCORES, encoding="utf-8") as file:
        return {row["game"]: (float(row["random"]), float(row["human"])) for row in csv.DictReader(file)}


def human_normalized(returns: dict[str, float]) -> dict[str, float]:
    """100 (return - random) / (human - random) by environment id; of ids that are Atari games."""
    found, scores = {}, bounds()
    for env_id, episodic_return in returns.items():
        game = re.sub(r"^ALE/|NoFrameskip|-v\d+$", "", env_id)
        if game in scores:
            random, human = scores[game]
            found[env_id] = 100 * (episodic_return - random) / (human - random)
    return found


def last_returns(run: Path) -> dict[str, float]:
    """Mean return by environment id, from a run's TensorBoard events."""
    if not run.is_dir():
        fail(f"{run}: there is no such folder")
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    tasks = {tag.removeprefix("tasks/"): tag for tag in tags if tag.startswith("tasks/")}
    if not tasks and "charts/episodic_return" not in tags:
        fail(f"{run} has no episodes")
    env_id = run.resolve().name.split("__")[0].replace("ALE-", "ALE/")
    of_first, has_policies = "policies/return_0", any(tag.startswith("policies/return_") for tag in tags)
    if has_policies and of_first not in tags:
        fail(f"{run}: no episode of the first policy has ended")
    tasks = tasks or {env_id: of_first if has_policies else "charts/episodic_return"}
    returns = {env_id: [event.value for event in events.Scalars(tag)] for env_id, tag in tasks.items()}
    return {env_id: float(np.mean(x[-100:])) for env_id, x in returns.items()}


def main():
    percent = {}
    for run in tyro.cli(Args).runs:
        for env_id, x in human_normalized(last_returns(run)).items():
            percent.setdefault(env_id, []).append(x)
    for env_id, each in percent.items():
        print(f"{env_id}: {np.mean(each):.1f} %" + f" of {len(each)} runs" * (len(each) > 1))
    if not percent:
        fail("no run is of an Atari game")
    values = np.array([np.mean(each) for each in percent.values()])
    print(f"median {np.median(values):.1f} %, mean of what is capped {values.clip(max=100).mean():.1f} %")


if __name__ == "__main__":
    main()
