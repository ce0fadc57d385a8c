"""A process of torchrun that trains Never Give Up on CartPole; writes what it ends with to FOLDER/RANK.pt.

torchrun --nproc-per-node 2 tests/helpers/ngu_ranks.py FOLDER
"""

import sys
from pathlib import Path

import torch

import ngu_r2d2

folder, sys.argv[1:] = Path(sys.argv[1]), []
flags = dict(
    env_id="CartPole-v1", num_envs=4, num_steps=8, total_timesteps=960, burn_in=2, unroll=8, period=8
)
flags |= dict(batch_sequences=4, learning_starts=64, replay_steps=800, hidden_size=8, embedding_every=7)
made, drawn, epsilons = {}, [], []


def keep(name):
    original = getattr(ngu_r2d2, name)

    class Kept(original):
        def __init__(self, *args):
            super().__init__(*args)
            made.setdefault(name, self)  # not the target network, which is a copy

    setattr(ngu_r2d2, name, Kept)


for name in ("Agent", "Curiosity", "Replay"):
    keep(name)
sample = ngu_r2d2.Replay.sample
ngu_r2d2.Replay.sample = lambda self, size, rng: (drawn.append(size), sample(self, size, rng))[1]
step = ngu_r2d2.Actor.step
ngu_r2d2.Actor.step = lambda self, epsilon, rng: (epsilons.append(epsilon), step(self, epsilon, rng))[1]
ngu_r2d2.train(ngu_r2d2.Args(**flags, device="cpu"))
curiosity = made["Curiosity"].state_dict()
ended = dict(parameters={f"agent.{name}": x for name, x in made["Agent"].state_dict().items()})
ended["parameters"] |= {f"curiosity.{name}": x for name, x in curiosity.items()}
ended |= dict(drawn=drawn, capacity=made["Replay"].size, played=torch.from_numpy(made["Replay"].rows["obs"]))
ended["epsilon"] = torch.from_numpy(epsilons[0])
torch.save(ended, folder / f"{ngu_r2d2.RANK}.pt")
