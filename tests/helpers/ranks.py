"""Runs of several processes: forked from one that has imported everything, so that a start takes a moment.

What each of them does is recorded at what a script calls: its loss, its environments, torch.randperm.
"""

import atexit
import importlib
import os
from copy import deepcopy
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from forks import FORKS, start_server

LOSSES = dict.fromkeys(("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm"), "ppo_loss")
LOSSES |= dict(ppo_multidiscrete="ppo_loss", ppo_async="ppo_loss", impala_vtrace="impala_loss")
LOSSES |= dict(ngu_r2d2="q_loss")


def side_by_side(function, name: str, *arguments, seconds: float = 60) -> list:
    """function(script, *arguments) in each of two processes, as torchrun would start them; their results.

    The store in which they find each other is here, as torchrun's is in its agent: it takes a free port
    itself, so that nobody else can take it.
    """
    start_server()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, WORLD_SIZE=2)
    environment |= dict(TORCHELASTIC_USE_AGENT_STORE=True)
    ranks = []
    for rank in range(2):
        ours = environment | dict(RANK=rank, LOCAL_RANK=rank)
        ranks.append(FORKS.Process(target=one_rank, args=(os.getcwd(), ours, function, name, arguments)))
        ranks[-1].start()
    try:
        for rank in ranks:
            rank.join(seconds)
            assert rank.exitcode == 0, f"{name}: a process ended with {rank.exitcode}"
    finally:  # one that is left would wait for the other
        for rank in ranks:
            rank.kill()
            rank.join()
    return [torch.load(f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]


def one_rank(folder: str, environment: dict, function, name: str, arguments: tuple):
    os.chdir(folder)
    os.environ.update({key: str(x) for key, x in environment.items()})
    script, rank = importlib.import_module(name), environment["RANK"]
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # read when the script was imported
        setattr(script, key, environment[key])
    torch.save(function(script, *arguments), f"{name}-{rank}.pt")
    atexit._run_exitfuncs()  # which multiprocessing leaves out


def recorded(
    script, flags: dict, kls: list | None = None, old_from: int | None = None, is_late: bool = False
) -> dict:
    """Trains. Returns what the process did, on the way and at its end.

    losses: of each call of the loss, the parameters of its networks and its other arguments. resets: seeds of
    environments. steps: actions, raw observations, rewards and ends. permutations and draws: what
    torch.randperm gave, and states of generators that drew from a replay. kls: what the loss is to report as
    approx_kl, by call and rank. old_from: segments of this environment and of those after it are 100 versions
    older. is_late: segments come an iteration later, the first ones at once.
    """
    names = ("losses", "resets", "steps", "permutations", "draws", "auxiliary", "looks", "errors", "ladder")
    record = {name: [] for name in names}
    loss = LOSSES[script.SCRIPT]
    setattr(script, loss, partial(note_loss, record, getattr(script, loss), script.RANK, kls))
    envs = gym.vector.SyncVectorEnv
    envs.step, reset = note_step(record, envs.step), note_reset(record, envs.reset)
    envs.reset = reset
    torch.randperm = note_result(record["permutations"], torch.randperm)
    if script.SCRIPT == "ppo_atari":
        script.AtariEnvs.reset = note_reset(record, script.AtariEnvs.reset)
        script.AtariEnvs.step = note_step(record, script.AtariEnvs.step)
    if hasattr(script, "Replay"):
        script.Replay.sample = note_draws(record, script.Replay.sample)
    if script.SCRIPT == "ngu_r2d2":
        note_curiosity(script, record)
    if old_from is not None:
        script.receive = partial(aged, script, script.receive, old_from)
    if is_late:
        script.receive = partial(late, script.receive, [])
    record["args"] = script.Args(**flags)
    record["run_dir"] = script.train(record["args"])
    record["after"] = [flat(x) for x in record.pop("networks", [])]
    return record


def flat(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in network.parameters()])


def note_loss(record: dict, loss, rank: int, kls: list | None, *arguments):
    networks = [x for x in arguments if isinstance(x, torch.nn.Module)]
    others = [x for x in arguments if not isinstance(x, torch.nn.Module)]
    if "networks" not in record:
        record |= dict(networks=networks, at_first=deepcopy(networks))
    statistics = deepcopy(getattr(networks[0], "statistics", None))
    record["losses"].append(([flat(x) for x in networks], statistics, deepcopy(others)))
    result = loss(*arguments)
    if kls:
        result[1]["approx_kl"] = torch.tensor(kls[len(record["losses"]) - 1][rank])
    return result


def note_result(results: list, function):
    def noted(*arguments, **more):
        results.append(function(*arguments, **more))
        return results[-1]

    return noted


def note_reset(record: dict, reset):
    def noted(self, *, seed=None, **more):
        obs, info = reset(self, seed=seed, **more)
        record["resets"].append((seed, self.num_envs, np.array(obs)))
        return obs, info

    return noted


def note_step(record: dict, step):
    def noted(self, actions):
        obs, rewards, terminated, truncated, info = step(self, actions)
        record["steps"].append((np.array(actions), np.array(obs), np.array(rewards), terminated | truncated))
        return obs, rewards, terminated, truncated, info

    return noted


def note_draws(record: dict, sample):
    def noted(self, size, rng):
        record["draws"].append((size, rng.bit_generator.state["state"]["state"]))
        record["replay_size"] = getattr(self, "size", None)
        return sample(self, size, rng)

    return noted


def note_curiosity(script, record: dict):
    """Arguments of its loss, what it looks at while acting, its errors there; epsilons and first policies."""
    forward, loss, step = script.Curiosity.forward, script.Curiosity.loss, script.Actor.step
    errors = script.Curiosity.prediction_errors

    def noted_forward(self, obs):
        script.Curiosity.prediction_errors = note_result(record["errors"], errors)
        record["looks"].append(obs.copy())
        result = forward(self, obs)
        script.Curiosity.prediction_errors = errors
        record["curiosity"] = self
        return result

    def noted_loss(self, *arguments):
        if not record["auxiliary"]:
            record["curiosity_at_first"] = deepcopy(self)
        record["auxiliary"].append(deepcopy((self.state_dict(), arguments)))
        return loss(self, *arguments)

    def noted_step(self, epsilon, rng):
        record["ladder"].append((epsilon, self.row["policies"].copy()))
        return step(self, epsilon, rng)

    script.Curiosity.forward, script.Curiosity.loss, script.Actor.step = noted_forward, noted_loss, noted_step


def aged(script, receive, old_from: int, exchange, turns, args):
    batch = receive(exchange, turns, args)
    for k, segments in enumerate(batch):
        environment = (script.RANK * len(batch) + k) * args.group_size
        if environment >= old_from:
            segments.version -= 100
    return batch


def late(receive, held: list, *arguments):
    held += [receive(*arguments) for _ in range(1 if held else 2)]
    return held.pop(0)
