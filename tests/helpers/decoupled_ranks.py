"""A process of torchrun, or a single one: IMPALA or off-policy PPO, the same whatever their number.

    python tests/helpers/decoupled_ranks.py SCRIPT FOLDER [flags]        # or torchrun --nproc-per-node 2 ...
    python tests/helpers/decoupled_ranks.py ppo_async FOLDER unequal [flags]    # 3 of 8 segments are too old

Environments and actions are the same in all. Writes FOLDER/RANK.pt: the agent's parameters after each update.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
import tyro

name, folder, sys.argv[1:] = sys.argv[1], sys.argv[2], sys.argv[3:]
unequal = sys.argv[1:2] == ["unequal"]
del sys.argv[1 : 1 + unequal]
script = importlib.import_module(name)
flags = dict(env_id="CartPole-v1", num_envs=8, batch_unrolls=8, num_steps=16, total_timesteps=128 * 5)
if name == "ppo_async":  # a batch is what is shared out
    flags |= dict(num_minibatches=1, norm_adv=False, sample_reuse=3, max_grad_norm=1e9)
args = tyro.cli(script.Args, default=script.Args(**flags, sync=True, device="cpu"))
script.Categorical.sample = lambda self: self.logprobs.argmax(-1)  # no noise, so none to share out
publish, parameters = script.Actors.publish, []


def record(self, agent, version):
    parameters.append(torch.cat([p.detach().flatten() for p in agent.parameters()]))
    publish(self, agent, version)


def age(actors):
    """Of 8 segments, those of environments 5, 6 and 7 are 100 versions older."""
    data, episodes = collect(actors)
    size = data["versions"].shape[1]
    environment = script.RANK * size + np.arange(size)
    return data | dict(versions=data["versions"] - 100 * (environment >= 5)), episodes


script.Actors.publish = record
if unequal:
    collect, script.collect, args.max_staleness = script.collect, age, 50
script.train(args)
torch.save(torch.stack(parameters), Path(folder) / f"{script.RANK}.pt")
