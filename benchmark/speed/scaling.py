"""Steps per second by environments and by processes of torchrun, and what to expect of larger machines.

    cd benchmark/results/speed && python ../../speed/scaling.py --csv scaling.csv --picture scaling.png
    python benchmark/speed/scaling.py --scripts ppo_atari --device cuda --processes 1 2 4 8

Each process has as many environments as the script's default, so that the batch grows with the processes.
What is expected of n processes: an iteration takes what it takes one process, and each of its updates waits
for an all-reduce of the gradients in a ring, 2 (n - 1) messages of a nth of their bytes. All is measured but
bandwidth and latency, in LINKS; on GPUs with --device cuda.
"""

import csv
import importlib
import os
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark import figures  # noqa: E402
from benchmark.files import fail  # noqa: E402
from benchmark.run import build, machine  # noqa: E402
from benchmark.speed.speed import TASKS, measure  # noqa: E402

LINKS = {  # processes, bytes a second each way, seconds a message: makers' figures, and rough latencies
    "8 processes, NVLink 4": (8, 450e9, 5e-6),
    "16 nodes, 400 Gbit/s": (16, 50e9, 10e-6),
    "16 nodes, 10 Gbit/s": (16, 1.25e9, 50e-6),
}
HEAD = "date script env_id device cpus num_envs processes what steps_per_s rounds".split()
HEAD += ["gradient_bytes", "update_ms", "commit", "changed", "machine", "versions"]


@dataclass
class Args:
    scripts: tuple[str, ...] = ("ppo", "ppo_atari")  # scripts to time
    envs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # numbers of environments, in one process
    processes: tuple[int, ...] = (1, 2, 4)  # numbers of processes on this machine
    iterations: int = 8  # of a run, of which the first is not timed
    rounds: int = 3  # runs of each; the median counts
    device: Literal["cpu", "cuda"] = "cpu"  # where the networks run
    csv: Path | None = None  # file to write the table to
    picture: Path | None = None  # and a picture of it


def allreduce_seconds(num_bytes: float, processes: int, bandwidth: float, latency: float) -> float:
    """Of a ring: each process sends 2 (n - 1) messages of a nth of the bytes."""
    return 2 * (processes - 1) * (num_bytes / processes / bandwidth + latency)


def expected(rate: float, batch: int, updates: int, num_bytes: int, link: tuple[int, float, float]) -> float:
    """Steps per second of link's processes, by the rate of one, whose iteration has `batch` steps."""
    processes, bandwidth, latency = link
    iteration = batch / rate + updates * allreduce_seconds(num_bytes, processes, bandwidth, latency)
    return processes * batch / iteration


def learner(script: str, device: str) -> tuple[int, float]:
    """Bytes of a script's gradients, and milliseconds that the loss of a minibatch and they take."""
    import torch

    module = importlib.import_module(script)
    args = replace(module.Args(), device=device)
    envs = module.make_env(args, args.num_envs)
    agent, size = module.Agent(envs).to(device), args.batch_size // args.num_minibatches
    obs = torch.zeros(size, *envs.single_observation_space.shape, device=device)
    obs = obs.to(torch.uint8) if envs.single_observation_space.dtype == "uint8" else obs
    batch = {name: torch.randn(size, device=device) for name in ("advantages", "returns", "values")}
    batch |= dict(obs=obs, actions=torch.zeros(size, dtype=torch.int64, device=device))
    batch["logprobs"] = agent(obs)[0].log_prob(batch["actions"]).detach()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        loss, info = module.ppo_loss(agent, batch, args.clip_coef, args)
        grads = torch.autograd.grad(loss, list(agent.parameters()))
        info["entropy"].item()  # waits for a GPU
        sum(x.sum() for x in grads).item()
        times.append(time.perf_counter() - start)
    envs.close()
    return sum(x.numel() * x.element_size() for x in grads), median(times) * 1000


def table(script: str, args: Args) -> list[list]:
    """Rows of the CSV."""
    env_id, rows = TASKS[script][0], []
    defaults = importlib.import_module(script).Args()
    num_bytes, update_ms = learner(script, args.device)

    def add(num_envs: int, processes: int, what: str, rate: float, *more):
        row = [date.today(), script, env_id, args.device, os.cpu_count(), num_envs, processes, what]
        measured = (round(rate), args.rounds, *(more or ("", "")))
        rows.append([*row, *measured, *build().values(), *machine().values()])
        where = f"{num_envs} environments, {processes} processes, {what}"
        print(f"{script}.py, {where}: {rate:.0f} steps/s", flush=True)

    def rate_of(num_envs: int, processes: int) -> float:
        steps = args.iterations * num_envs * defaults.num_steps
        flags = f"--env-id {env_id} --num-envs {num_envs} --total-timesteps {steps} --device {args.device}"
        program = f"{script}.py", *flags.split()
        return median(measure(*program, processes=processes)[0] for _ in range(args.rounds))

    for num_envs in args.envs:
        add(num_envs, 1, "environments", rate_of(num_envs, 1))
    one = None
    for processes in args.processes:
        rate = rate_of(processes * defaults.num_envs, processes)
        one = rate if processes == 1 else one
        add(processes * defaults.num_envs, processes, "processes", rate)
    updates = defaults.update_epochs * defaults.num_minibatches
    for name, link in LINKS.items() if one else ():
        rate = expected(one, defaults.batch_size, updates, num_bytes, link)
        add(link[0] * defaults.num_envs, link[0], f"expected: {name}", rate, num_bytes, f"{update_ms:.2f}")
    return rows


def draw(rows: list[list], path: Path):
    scripts = [*dict.fromkeys(row[1] for row in rows)]
    figure, axes = figures.panels(2 * len(scripts), columns=len(scripts), height=3.5)
    for k, script in enumerate(scripts):
        mine = [dict(zip(HEAD, row, strict=True)) for row in rows if row[1] == script]
        upper, lower = axes[k], axes[k + len(scripts)]
        for ax, what, x in (upper, "environments", "num_envs"), (lower, "processes", "processes"):
            points = [(row[x], row["steps_per_s"]) for row in mine if row["what"] == what]
            if points:
                ax.plot(*zip(*points, strict=True), "o-", color="tab:blue", label="measured")
                first = points[0]
                line = [(n, first[1] * n / first[0]) for n, _ in points]
                ax.plot(*zip(*line, strict=True), ":", color="gray", label="in proportion")
            ax.set(xscale="log", yscale="log")
            figures.finish(ax, f"{script}.py", xlabel=what, ylabel="environment steps per second")
        for row, color in zip(
            (x for x in mine if x["what"].startswith("expected")), figures.OURS[1:], strict=False
        ):
            lower.plot(row["processes"], row["steps_per_s"], "x", color=color, label=row["what"])
    figures.legend(figure)
    figures.save(figure, path)


def main():
    args = tyro.cli(Args)
    if unknown := set(args.scripts) - {"ppo", "ppo_shared", "ppo_atari"}:
        fail(f"scaling.py times ppo, ppo_shared and ppo_atari, not {', '.join(sorted(unknown))}")
    if args.rounds < 1:
        fail("--rounds must be at least 1")
    if args.iterations < 2:
        fail("--iterations must be at least 2, of which the first is not timed")
    rows = [row for script in args.scripts for row in table(script, args)]
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)  # what was measured is not lost
        with open(args.csv, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEAD, *rows])
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
