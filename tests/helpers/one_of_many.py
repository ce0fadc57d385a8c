"""A process of torchrun, or a single one: trains on the same environments and noise whatever their number.

    python tests/helpers/one_of_many.py FOLDER SCRIPT ...        # or torchrun --nproc-per-node 2 ...

One after the other, for a start of Python takes longer than they do. Writes FOLDER/SCRIPT-RANK.pt: the
agent's parameters, a checksum of them after every update, the gradients, the seeds of environments.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

folder, *names = sys.argv[1:]
sys.argv = sys.argv[:1]
envs = 4
agents, sums, seeds, gradients = [], [], [], []
TASKS = dict(ppo_continuous="Hopper-v4", ppo_multidiscrete="Hopper-v4", ppo_atari="PongNoFrameskip-v4")


def checksum(*_):
    flat = torch.cat([p.detach().flatten() for p in agents[0].parameters()])
    sums.append(hash(flat.numpy().tobytes()))


def gradient(optimizer, *_):
    gradients.append(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]))


def train(name):
    script = importlib.import_module(name)
    flags = dict(num_envs=envs, num_steps=16, total_timesteps=16 * envs, num_minibatches=1, update_epochs=5)
    flags |= dict(norm_adv=False, anneal_lr=False, max_grad_norm=1e9, device="cpu")
    args = script.Args(env_id=TASKS.get(name, "CartPole-v1"), **flags)
    share = envs // script.WORLD_SIZE
    mine = slice(script.RANK * share, (script.RANK + 1) * share)
    draws, made = np.random.default_rng(0), script.make_env

    def exponential(self):  # the noise of a rollout (T, N, num_actions), whoever acts in NumPy
        drawn = np.random.default_rng(0).exponential(size=(len(self), envs, self.shape[2]))
        return self.copy_(torch.from_numpy(drawn[:, mine]))

    def normal(T, N, size):  # the same for Gaussian actions
        drawn = np.random.default_rng(0).normal(size=(T, envs, size)).astype(np.float32)
        return torch.from_numpy(drawn[:, mine])

    def sample(self):  # the same for those that draw in every step
        axis = self.logprobs.ndim - 2 - (name == "ppo_multidiscrete")  # of the environments
        shape = list(self.logprobs.shape)
        shape[axis] = envs
        drawn = torch.from_numpy(draws.gumbel(size=shape)).narrow(axis, mine.start, share)
        return (self.logprobs + drawn).argmax(-1)

    def make_env(args, num_envs):
        envs = made(args, num_envs)
        reset = envs.reset
        envs.reset = lambda seed: seeds.append(seed) or reset(seed=seed)
        return envs

    class Agent(script.Agent):
        def __init__(self, envs):
            super().__init__(envs)
            agents.append(self)

    torch.Tensor.exponential_, torch.randn = exponential, normal
    if not hasattr(script.Agent, "actor_in_numpy"):
        script.Categorical.sample = sample
    if hasattr(script, "RunningNorm"):  # statistics are merged after each rollout only: leave them at 0 and 1
        update_norm, script.RunningNorm.update = script.RunningNorm.update, lambda self, x: None
    script.make_env, script.Agent = make_env, Agent
    script.train(args)
    result = dict(parameters=[p.detach().clone() for p in agents[0].parameters()])
    result |= dict(sums=list(sums), seeds=list(seeds), gradients=torch.stack(gradients))
    if hasattr(script, "RunningNorm"):
        own = made(args, share)
        for x in np.random.default_rng(1).normal(3, 2, size=(100, envs, 11)):
            update_norm(own.obs_norm, x[mine])
        own.merge_statistics()
        result["statistics"] = torch.tensor(np.stack((own.obs_norm.mean, own.obs_norm.var)))
    torch.save(result, Path(folder) / f"{name}-{script.RANK}.pt")
    for recorded in (agents, sums, seeds, gradients):
        recorded.clear()
    if script.WORLD_SIZE > 1:  # the first one has begun the group of processes, and ends it
        torch.distributed.init_process_group = torch.distributed.destroy_process_group = lambda *_: None


register_optimizer_step_pre_hook(gradient)
register_optimizer_step_post_hook(checksum)
for name in names:
    train(name)
