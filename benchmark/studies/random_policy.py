"""What random actions return on the tasks of the suites, and no action on Reacher: means of 100 episodes.

    python benchmark/studies/random_policy.py    # writes results/random_policy.csv

compare.py gives no verdict where random actions would pass, or were not measured. Scores of Atari's random
play are those of table C.1 of Espeholt et al. 2018, in published/atari_random_human.csv. Gym-microRTS, which
needs Java, is left out.
"""

import csv
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.human import bounds  # noqa: E402
from benchmark.suites import SUITES  # noqa: E402

EPISODES = 100


def returns(env_id: str, idle: bool = False) -> np.ndarray:
    env, found = gym.make(env_id), []
    env.action_space.seed(1)
    for episode in range(EPISODES):
        env.reset(seed=1 if episode == 0 else None)
        total, over = 0.0, False
        while not over:
            action = np.zeros(env.action_space.shape) if idle else env.action_space.sample()
            _, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
        found.append(total)
    env.close()
    return np.array(found)


def line(name: str, x: np.ndarray) -> list[str]:
    return [name, f"{x.mean():.2f}", f"{x.std():.2f}", f"{EPISODES} episodes"]


def main():
    rows = {}
    for row in (row for rows in SUITES.values() for row in rows):
        if row.task in rows or "microrts" in row.env_id:
            continue
        game = row.task.removesuffix("NoFrameskip-v4")
        if game != row.task:
            rows[row.task] = [row.task, f"{bounds()[game][0]:g}", "", "table C.1 of Espeholt et al. 2018"]
        else:
            x = returns(f"minigrid:{row.env_id}" if row.task.startswith("MiniGrid") else row.env_id)
            rows[row.task] = line(row.task, x)
        print(*rows[row.task], flush=True)
    rows["idle"] = line("Reacher-v4 without actions", returns("Reacher-v4", idle=True))
    with open(ROOT / "benchmark/results/random_policy.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["task", "mean", "std", "of"], *rows.values()])


if __name__ == "__main__":
    main()
