"""Our PPO scripts and CleanRL's in lockstep: same weights, actions and order of minibatches, all in float64.

    git clone https://github.com/vwxyzjn/cleanrl && git -C cleanrl checkout fe8d8a0
    python benchmark/studies/lockstep.py cleanrl/cleanrl                   # the table of docs/lockstep.md
    python benchmark/studies/lockstep.py cleanrl/cleanrl --scripts ppo     # one script

Our script trains for a few iterations and leaves behind its first weights, its actions and its orders of
minibatches. CleanRL's file then trains with these; its text is not changed, and its own environments get the
same seeds. On Atari, where it draws its no-ops otherwise, it sees the frames and rewards that ours saw. After
each iteration, rewards, advantages, what is logged and the parameters of both are compared.

float64 is a switch: PyTorch's default, and what the names float32 and .float() mean to our script.
"""

import importlib
import os
import runpy
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch
import tyro
from cleanrl import STUDIES, source
from gymnasium.wrappers.utils import RunningMeanStd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail  # noqa: E402

FLAGS = """seed num_envs num_steps total_timesteps gamma gae_lambda learning_rate anneal_lr update_epochs
num_minibatches norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl""".split()
TAGS = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
BREAKOUT = dict(env_id="BreakoutNoFrameskip-v4", num_steps=32)
# our script, CleanRL's, our flags, and where CleanRL's observations and rewards come from
CASES = [
    ("ppo", "ppo", dict(env_id="CartPole-v1"), "its own"),
    (
        "ppo",
        "ppo",
        dict(env_id="Acrobot-v1", target_kl=0.004, clip_vloss=False, max_grad_norm=0.1),
        "its own",
    ),
    ("ppo_shared", "ppo_one_network", dict(env_id="CartPole-v1"), "its own"),
    ("ppo_continuous", "ppo_continuous_action", dict(env_id="Hopper-v4"), "as ours"),
    ("ppo_continuous", "ppo_continuous_action", dict(env_id="Hopper-v4"), "its own, normalized as ours"),
    ("ppo_continuous", "ppo_continuous_action", dict(env_id="Hopper-v4"), "its own"),
    ("ppo_continuous", "ppo_continuous_action", dict(env_id="HalfCheetah-v4"), "its own, normalized as ours"),
    ("ppo_continuous", "ppo_continuous_action", dict(env_id="HalfCheetah-v4"), "its own"),
    ("ppo_atari", "ppo_atari", BREAKOUT, "as ours"),
    ("ppo_lstm", "ppo_atari_lstm", BREAKOUT, "as ours"),
]
# CleanRL's names of our parameters
NAMES = {
    "ppo_continuous": lambda name: name.replace("log_std", "actor_logstd").replace("actor.", "actor_mean."),
}


@dataclass
class Args:
    folder: Annotated[Path, tyro.conf.Positional]  # of CleanRL's scripts
    scripts: tuple[str, ...] = tuple(dict.fromkeys(case[0] for case in CASES))
    iterations: int = 5


class NormalizeObservation(gym.ObservationWrapper):
    """As openai/baselines: an episode's last observation, which nobody learns from, is not counted."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float64)
        self.seen = RunningMeanStd(shape=env.observation_space.shape)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        self.seen.update(observation[None])
        return (observation - self.seen.mean) / np.sqrt(self.seen.var + 1e-8)

    def step(self, action: np.ndarray) -> tuple:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs if terminated or truncated else self.observation(obs), reward, terminated, truncated, info


class NormalizeReward(gym.Wrapper):
    """As openai/baselines: the discounted return begins anew after every end, also one by a time limit."""

    def __init__(self, env: gym.Env, gamma: float):
        super().__init__(env)
        self.gamma, self.seen, self.discounted = gamma, RunningMeanStd(shape=()), 0.0

    def step(self, action: np.ndarray) -> tuple:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.discounted = self.gamma * self.discounted + reward
        self.seen.update(np.array([self.discounted]))
        if terminated or truncated:
            self.discounted = 0.0
        return obs, reward / np.sqrt(self.seen.var + 1e-8), terminated, truncated, info


def twin(module: types.ModuleType, **names) -> types.SimpleNamespace:
    """A module, some of whose names mean something else."""
    return types.SimpleNamespace(**vars(module) | names)


@contextmanager
def float64() -> Iterator[None]:
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def run_ours(name: str, flags: dict, iterations: int) -> dict:
    """Trains, and returns all that a lockstep run needs and is compared with."""
    script, ours = importlib.import_module(name), dict(stream=[], orders=[], iterations=[])
    make_env, agent_class, compute_gae = script.make_env, script.Agent, script.compute_gae
    batch = script.Args(**flags, device="cpu").batch_size
    ours["args"] = args = script.Args(**flags, device="cpu", total_timesteps=iterations * batch)

    def recorded_env(*args):
        ours["envs"] = envs = make_env(*args)
        reset, step = envs.reset, envs.step

        def recorded_reset(**kwargs):
            ours["first"] = reset(**kwargs)[0].copy()
            return ours["first"].copy(), {}

        def recorded_step(actions):
            result = step(actions)
            ours["stream"].append((actions.copy(), *(x.copy() for x in result[:4])))
            return result

        envs.reset, envs.step = recorded_reset, recorded_step
        return envs

    def recorded_agent(*args):
        ours["agent"] = agent = agent_class(*args)
        ours["weights"] = parameters(agent)
        return agent

    def recorded_gae(rewards, *others):
        advantages = compute_gae(rewards, *others)
        ours["iterations"].append(dict(rewards=rewards.copy(), advantages=advantages))
        return advantages

    def recorded_order(*args, **kwargs):
        ours["orders"].append(torch.randperm(*args, **kwargs))
        return ours["orders"][-1]

    def recorded_log(self, losses, scalars, **data):
        logged = {name: float(x) for name, x in losses.items()}
        logged["explained_variance"] = float(scalars["losses/explained_variance"])
        ours["iterations"][-1] |= dict(logged=logged, parameters=parameters(ours["agent"]))

    with ExitStack() as stack:
        for key, x in dict(make_env=recorded_env, Agent=recorded_agent, compute_gae=recorded_gae).items():
            stack.enter_context(patch.object(script, key, x))
        stack.enter_context(patch.object(script.Run, "log", recorded_log))
        stack.enter_context(patch.object(script, "np", twin(np, float32=np.float64)))
        wide = twin(torch, float32=torch.float64, randperm=recorded_order)
        stack.enter_context(patch.object(script, "torch", wide))
        script.train(args)
    return ours


def parameters(agent: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone().contiguous() for name, x in agent.named_parameters()}


class Replay:
    """Environments that return what ours returned."""

    def __init__(self, ours: dict):
        self.ours, self.steps = ours, iter(ours["stream"])
        self.single_observation_space = ours["envs"].single_observation_space
        self.single_action_space = ours["envs"].single_action_space

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        return self.ours["first"], {}

    def step(self, actions: np.ndarray) -> tuple:
        ours, *result = next(self.steps)
        assert np.array_equal(actions, ours)
        return *result, {}

    def close(self):
        pass


def run_theirs(file: Path, name: str, ours: dict, kind: str) -> list[dict]:
    """What CleanRL's file computes in each iteration, with the weights, actions and orders of ours."""
    actions, orders = iter(ours["stream"]), iter(ours["orders"])
    found, logged, to_theirs = [], {}, NAMES.get(name, lambda name: name)

    class Adam(torch.optim.Adam):
        def __init__(self, *args, **kwargs):  # where the agent is ready to learn
            super().__init__(*args, **kwargs)
            self.agent = sys._getframe(1).f_globals["agent"]
            theirs = dict(self.agent.named_parameters())
            assert set(theirs) == {to_theirs(name) for name in ours["weights"]}, set(theirs)
            with torch.no_grad():
                for name, x in ours["weights"].items():
                    theirs[to_theirs(name)].copy_(x.view(theirs[to_theirs(name)].shape))

    def sample(self, *args):
        action = torch.as_tensor(next(actions)[0])
        return action.to(torch.get_default_dtype()) if action.is_floating_point() else action

    def shuffle(indices):  # at the begin of each epoch
        script = sys._getframe(1).f_globals
        if script["epoch"] == 0:
            found.append({key: script[key].numpy().copy() for key in ("rewards", "advantages")})
        indices[:] = next(orders).numpy()

    class Writer:
        def __init__(self, *args):
            pass

        def add_scalar(self, tag, value, step):
            logged[tag.removeprefix("losses/")] = np.mean(value)
            if tag == "charts/SPS":  # the last one of an iteration
                theirs = parameters(sys._getframe(1).f_globals["agent"])
                theirs = {name: theirs[to_theirs(name)].view(x.shape) for name, x in ours["weights"].items()}
                found[-1] |= dict(logged={key: logged[key] for key in TAGS}, parameters=theirs)

        def add_text(self, *args):
            pass

        close = add_text

    args, flags = ours["args"], ["--no-cuda", "--env-id", ours["args"].env_id]
    for name in FLAGS:
        value, flag = getattr(args, name), name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    with ExitStack() as stack:
        for module, key in ((gym.vector, "SyncVectorEnv"), (gym.wrappers, "TransformObservation")):
            stack.enter_context(patch.object(module, key, getattr(module, key)))  # ours needs today's again
        runpy.run_path(str(STUDIES / "cleanrl_today.py"))  # gives gymnasium its old names
        stack.enter_context(patch.object(torch.optim, "Adam", Adam))
        for kind_of in (torch.distributions.Categorical, torch.distributions.Normal):
            stack.enter_context(patch.object(kind_of, "sample", sample))
        stack.enter_context(patch.object(np.random, "shuffle", shuffle))
        stack.enter_context(patch("torch.utils.tensorboard.SummaryWriter", Writer))
        stack.enter_context(patch.object(sys, "argv", [str(file), *flags]))
        stack.enter_context(patch.object(sys, "path", [str(file.parent.parent), str(file.parent), *sys.path]))
        if kind == "as ours":
            stack.enter_context(patch.object(gym.vector, "SyncVectorEnv", lambda makers: Replay(ours)))
        elif kind == "its own, normalized as ours":
            for wrapper in (NormalizeObservation, NormalizeReward):
                stack.enter_context(patch.object(gym.wrappers, wrapper.__name__, wrapper))
        runpy.run_path(str(file), run_name="__main__")
    assert next(actions, None) is None and next(orders, None) is None
    return found


def difference(ours, theirs) -> float:
    """The largest difference, relative to the largest value."""
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    return np.abs(ours - theirs).max() / max(np.abs(ours).max(), 1e-300)


def compare(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    """Largest difference of each quantity over all iterations."""
    worst = dict.fromkeys(("rewards", "advantages", "logged", "parameters"), 0.0)
    for x, y in zip(ours, theirs, strict=True):
        found = {key: difference(x[key], y[key]) for key in ("rewards", "advantages")}
        for name, keys in (("logged", TAGS), ("parameters", x["parameters"])):
            found[name] = np.max([difference(x[name][key], y[name][key]) for key in keys])
        worst = {key: np.maximum(value, found[key]) for key, value in worst.items()}  # NaN stays NaN
    return worst


def main():
    args = tyro.cli(Args, description=__doc__)
    if not (args.folder / "ppo.py").is_file():
        fail(f"{args.folder} is not the folder of CleanRL's scripts: it has no ppo.py")
    if unknown := set(args.scripts) - {name for name, *_ in CASES}:
        fail(f"no script {', '.join(sorted(unknown))}; there are {', '.join(Args.scripts)}")
    args.folder = args.folder.resolve()
    torch.set_num_threads(1)
    print("| script | CleanRL's | task | observations and rewards |", end="")
    print(" rewards | advantages | logged | parameters |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, their_name, flags, kind in CASES:
        if name not in args.scripts:
            continue
        with tempfile.TemporaryDirectory() as folder, float64(), ExitStack() as stack:
            file, start = source(args, their_name, Path(folder)), Path.cwd()
            os.chdir(folder)
            stack.callback(os.chdir, start)
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                ours = run_ours(name, flags, args.iterations)
                theirs = run_theirs(file, name, ours, kind)
        worst = compare(ours["iterations"], theirs)
        cells = " | ".join(f"{x:.0e}" for x in worst.values())
        print(f"| `{name}` | `{their_name}` | {flags['env_id']} | {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
