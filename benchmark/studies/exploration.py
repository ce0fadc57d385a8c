"""How many different cells of the Random Disco Maze agents visit in an episode of at most 500 steps.

    python benchmark/studies/exploration.py train --env-id benchmark.studies.maze:RandomDiscoMaze-v0 \
        --num-policies 1 --no-rnd --kernel-eps 1e-2 --burn-in 0 --unroll 20 --period 20 --num-envs 32 \
        --epsilon 0.2 --gamma-max 0.92 \
        --target retrace --retrace-lambda 0.97 --updates-per-rollout 4 --target-every 100 \
        --auxiliary-steps 10 --auxiliary-lr 1e-3 --learning-starts 5000 --total-timesteps 200000
    python benchmark/studies/exploration.py runs/NAME [runs/NAME ...] --csv maze.csv

From the repository's folder; with --no-train-embedding, too. `train` is ngu_r2d2.py with an encoder for maps.
There is no reward: an agent of Never Give Up explores for novelty alone. Random actions are few, as most end
the episode, and none where cells are counted. Without runs, it is walks of no agent: one that avoids the
walls visits 29 cells, a uniform one 1.4.
"""

import csv
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import benchmark.studies.maze  # noqa: E402, F401  registers it
import ngu_r2d2  # noqa: E402
from benchmark.files import fail  # noqa: E402


class Peaks(torch.nn.Module):
    """The maximum of each channel, wherever on a map it is, and its mean place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.linspace(-5, 5, n, device=x.device) for n in x.shape[2:])
        p = x.flatten(2).softmax(-1).unflatten(-1, x.shape[2:])
        return torch.cat((x.amax((2, 3)), p.sum(3) @ rows, p.sum(2) @ columns), 1)


def map_encoder(shape: tuple[int, ...], num_features: int) -> torch.nn.Sequential:
    """Features of a map, which is larger than what MiniGrid's agents see: takes the place of encoder()."""
    relu, Conv2d = torch.nn.ReLU(inplace=True), torch.nn.Conv2d
    layers = [Conv2d(shape[0], 16, 3), relu, Conv2d(16, 32, 3, padding=1), relu, Peaks()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(96, num_features), relu)


HEAD = ["agent", "seed", "steps", "embedding", "episodes", "cells_mean", "cells_std", "length_mean"]


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()  # run folders of ngu_r2d2.py
    episodes: int = 100  # of each agent, or a few more: as many in each of 16 environments
    epsilon: float = 0.0  # share of random actions
    csv: Path | None = None  # file to append to


@torch.no_grad()
def of_run(run: str, episodes: int, epsilon: float) -> tuple[list, list[tuple[int, int]]]:
    """What the agent is, and (cells, length) of its episodes."""
    torch.set_num_threads(1)
    checkpoint = ngu_r2d2.load_checkpoint(run)
    args, rng, found = checkpoint["args"], np.random.default_rng(0), []
    args.device = "cpu"
    torch.manual_seed(0)
    envs = ngu_r2d2.make_env(args, 16)
    agent, curiosity = ngu_r2d2.Agent(envs, args), ngu_r2d2.Curiosity(envs, args)
    ngu_r2d2.load_checkpoint(run, dict(agent=agent, curiosity=curiosity))
    actor = ngu_r2d2.Actor(replace(args, num_policies=1), envs, agent, curiosity)
    actor.reset(seed=10**6)
    left = np.full(16, math.ceil(episodes / 16))  # as many of each: the first to end are the short ones
    while left.any():
        mazes = [env.unwrapped for env in envs.envs]
        before = [(maze.visited, maze.steps) for maze in mazes]
        arrival, _, _ = actor.step(np.full(16, epsilon), rng)
        for n in (arrival["ends"] & (left > 0)).nonzero()[0]:
            visited, steps = before[n]
            found.append((len(visited), steps + 1))
            left[n] -= 1
    what = "trained" if args.train_embedding else "untrained"
    return [Path(run).name, args.seed, checkpoint["iteration"] * args.batch_size, what], found


def of_walk(avoids_walls: bool, episodes: int) -> tuple[list, list[tuple[int, int]]]:
    env, rng, found = gym.make("RandomDiscoMaze-v0"), np.random.default_rng(0), []
    for episode in range(episodes):
        env.reset(seed=None if episode else 0)
        maze, over = env.unwrapped, False
        while not over:
            free = [a for a in range(4) if not (avoids_walls and maze.walls[tuple(maze.at + maze.moves[a])])]
            *_, terminated, truncated, info = env.step(rng.choice(free))
            over = terminated or truncated
        found.append((info["cells"], maze.steps))
    return ["walk that avoids walls" if avoids_walls else "uniform walk", 0, 0, "none"], found


def main():
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
        ngu_r2d2.encoder = map_encoder
        ngu_r2d2.main()
        return
    args = tyro.cli(Args)
    if args.episodes < 1:
        fail(f"--episodes cannot be {args.episodes}")
    ngu_r2d2.encoder = map_encoder
    results = [of_run(run, args.episodes, args.epsilon) for run in args.runs] or [
        of_walk(avoids_walls, args.episodes) for avoids_walls in (True, False)
    ]
    rows = []
    for what, found in results:
        cells, lengths = np.array(found).T
        rows.append([*what, len(found), f"{cells.mean():.1f}", f"{cells.std():.1f}", f"{lengths.mean():.0f}"])
        print(", ".join(f"{name} {x}" for name, x in zip(HEAD, rows[-1], strict=True)))
    if args.csv:
        is_new = not args.csv.exists()
        args.csv.parent.mkdir(parents=True, exist_ok=True)  # what was measured is not lost
        with open(args.csv, "a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEAD, *rows] if is_new else rows)


if __name__ == "__main__":
    main()
