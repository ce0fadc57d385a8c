"""A process of torchrun, or a single one: trains on the same environments and noise whatever their number.

    python tests/one_of_many.py SCRIPT FOLDER        # or torchrun --nproc-per-node 2 ...

Writes FOLDER/RANK.pt: the agent's parameters, a checksum of them after every update, the gradients, the seed.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

name, folder = sys.argv[1:]
sys.argv = sys.argv[:1]
script = importlib.import_module(name)
envs = 4
flags = dict(
    ppo=dict(), ppo_continuous=dict(env_id="Hopper-v4"), ppo_atari=dict(env_id="PongNoFrameskip-v4")
)[name]
flags |= dict(num_envs=envs, num_steps=16, total_timesteps=16 * envs, num_minibatches=1, update_epochs=5)
args = script.Args(**flags, norm_adv=False, anneal_lr=False, max_grad_norm=1e9, device="cpu")
share = envs // script.WORLD_SIZE
mine = slice(script.RANK * share, (script.RANK + 1) * share)


def noise(self, T, N):
    size = self.act_dim if name == "ppo_continuous" else self.num_actions
    return np.random.default_rng(0).gumbel(size=(T, envs, size)).astype(np.float32)[:, mine]


draws = np.random.default_rng(0)
script.Agent.noise = noise
if name == "ppo_continuous":  # statistics are merged after each rollout only: leave them at 0 and 1
    update_norm, script.RunningNorm.update = script.RunningNorm.update, lambda self, x: None
if name == "ppo_atari":
    sample = lambda self: (self.logprobs + torch.from_numpy(draws.gumbel(size=(envs, 6))[mine])).argmax(-1)  # noqa: E731
    script.Categorical.sample = sample
made, agents, sums, seeds, gradients = script.make_env, [], [], [], []


def make_env(args, num_envs):
    envs = made(args, num_envs)
    reset = envs.reset
    envs.reset = lambda seed: seeds.append(seed) or reset(seed=seed)
    return envs


class Agent(script.Agent):
    def __init__(self, envs):
        super().__init__(envs)
        agents.append(self)


def checksum(*_):
    flat = torch.cat([p.detach().flatten() for p in agents[0].parameters()])
    sums.append(hash(flat.numpy().tobytes()))


def gradient(optimizer, *_):
    gradients.append(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]))


script.make_env, script.Agent = make_env, Agent
register_optimizer_step_pre_hook(gradient)
register_optimizer_step_post_hook(checksum)
script.train(args)
result = dict(parameters=[p.detach().clone() for p in agents[0].parameters()], sums=sums, seeds=seeds)
result["gradients"] = torch.stack(gradients)
if name == "ppo_continuous":
    own = made(args, share)
    for x in np.random.default_rng(1).normal(3, 2, size=(100, envs, 11)):
        update_norm(own.obs_norm, x[mine])
    own.merge_statistics()
    result["statistics"] = torch.tensor(np.stack((own.obs_norm.mean, own.obs_norm.var)))
torch.save(result, Path(folder) / f"{script.RANK}.pt")
