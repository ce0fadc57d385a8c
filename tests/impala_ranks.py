"""A process of torchrun, or a single one: IMPALA on the same environments and actions whatever their number.

    python tests/impala_ranks.py FOLDER [flags]        # or torchrun --nproc-per-node 2 ...

Writes FOLDER/RANK.pt: the agent's parameters after every update.
"""

import sys
from pathlib import Path

import torch
import tyro

import impala_vtrace

folder, sys.argv[1:] = sys.argv[1], sys.argv[2:]
flags = dict(env_id="CartPole-v1", num_envs=8, batch_unrolls=8, num_steps=16, total_timesteps=128 * 5)
args = tyro.cli(impala_vtrace.Args, default=impala_vtrace.Args(**flags, sync=True, device="cpu"))
impala_vtrace.Categorical.sample = lambda self: self.logprobs.argmax(-1)  # no noise, so none to share out
publish, parameters = impala_vtrace.Actors.publish, []


def record(self, agent, version):
    parameters.append(torch.cat([p.detach().flatten() for p in agent.parameters()]))
    publish(self, agent, version)


impala_vtrace.Actors.publish = record
impala_vtrace.train(args)
torch.save(torch.stack(parameters), Path(folder) / f"{impala_vtrace.RANK}.pt")
