"""How near a script comes to what its machine allows: its steps per second over those of its parts alone.

    python benchmark/studies/ceiling.py --rounds 3          # --amp for bfloat16
    python benchmark/studies/ceiling.py --script impala_vtrace --steps 102400

The parts of an iteration of ppo_atari.py are 128 steps of 8 bare emulators, 128 forward passes of 8
observations and 16 passes forward and backward of a minibatch of 256; of impala_vtrace.py 20 steps of 2 times
16 emulators, 40 forward passes of 16 observations and one pass forward and backward of 32 segments. One after
the other, each with all cores, in the script's network and memory layout: no sampling, no storing, no
advantages, no loss but a mean, no optimizer, no log.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import impala_vtrace  # noqa: E402
import ppo_atari  # noqa: E402
from benchmark.files import fail  # noqa: E402
from benchmark.speed.speed import measure  # noqa: E402


@dataclass
class Args:
    script: Literal["ppo_atari", "impala_vtrace"] = "ppo_atari"  # which script
    env_id: str = "BreakoutNoFrameskip-v4"  # game
    amp: bool = False  # with bfloat16 convolutions
    steps: int = 10_240  # environment steps of each run of ppo_atari.py
    rounds: int = 3  # runs of each of the two, in turn
    parts_only: bool = False  # print the rate of the parts, in this process, and end


def parts_of_impala(args: Args) -> float:
    """Steps per second if an iteration had nothing but its parts."""
    script_args = impala_vtrace.Args(env_id=args.env_id, device="cpu", amp=args.amp)
    both = [impala_vtrace.make_env(args.env_id, script_args, 16) for _ in range(2)]
    groups = [impala_vtrace.Group(args.env_id, envs) for envs in both]
    for k, group in enumerate(groups):
        group.reset(seed=k)
    agent, rng, seconds = impala_vtrace.Agent(groups[0].envs, script_args), np.random.default_rng(1), []
    obs = torch.randint(0, 255, (21, 32, 4, 84, 84), dtype=torch.uint8)
    rows, state = dict(obs=obs, starts=torch.zeros(21, 32)), agent.initial_state(32)
    few = dict(obs=obs[:1, :16], starts=rows["starts"][:1, :16])
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(20):
            for group in groups:
                group.envs.send(rng.integers(agent.num_actions, size=16))
            for group in groups:
                group.envs.recv()
                with torch.no_grad():
                    agent(few, state[:, :16])
        dist, value, _ = agent(rows, state)
        (dist.logprobs.mean() + value.mean()).backward()
        seconds.append(time.perf_counter() - start)
    return 640 / statistics.median(seconds)


def parts(args: Args) -> float:
    """Steps per second if an iteration had nothing but its parts."""
    envs = ppo_atari.make_env(ppo_atari.Args(env_id=args.env_id, device="cpu"), 8)
    agent = ppo_atari.Agent(envs)
    agent.amp = args.amp
    envs.reset(seed=1)
    rng, seconds = np.random.default_rng(1), []
    obs = torch.randint(0, 255, (1024, 84, 84, 4), dtype=torch.uint8).permute(0, 3, 1, 2)
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(128):
            for game in envs.games:
                game.send(rng.integers(envs.single_action_space.n, size=1))
            for game in envs.games:
                game.recv()
            with torch.no_grad():
                agent(obs[:8])
        for _ in range(16):
            dist, value = agent(obs[torch.randperm(1024)[:256]])
            (dist.logprobs.mean() + value.mean()).backward()
        seconds.append(time.perf_counter() - start)
    return 1024 / statistics.median(seconds)


def main():
    args = tyro.cli(Args)
    if args.rounds < 1:
        fail(f"--rounds cannot be {args.rounds}")
    if args.parts_only:
        print(parts(args) if args.script == "ppo_atari" else parts_of_impala(args))
        return
    flags = ["--env-id", args.env_id, "--total-timesteps", str(args.steps), "--device", "cpu"]
    flags += ["--amp"] * args.amp
    rates = []
    for _ in range(args.rounds):
        command = [sys.executable, __file__, "--script", args.script, "--env-id", args.env_id, "--parts-only"]
        command += ["--amp"] * args.amp
        with tempfile.TemporaryDirectory() as folder:  # a process of its own: threads and caches as in a run
            out = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        rates.append((measure(f"{args.script}.py", *flags)[0], float(out)))
        print(f"{args.script}.py {rates[-1][0]:.0f} steps/s, its parts {rates[-1][1]:.0f}", flush=True)
    whole, ceiling = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"median {whole:.0f} of {ceiling:.0f}: {whole / ceiling:.0%} of the ceiling")


if __name__ == "__main__":
    main()
