"""The other yardstick of speed.py: stable-baselines3 with a script's task, network and hyper-parameters.

    python benchmark/speed/sb3_ppo.py ppo --total-timesteps 50000
    python benchmark/speed/sb3_ppo.py ppo_atari --total-timesteps 10240 --device cuda

The flags are the script's own and so are the defaults; what stable-baselines3 lacks (--amp, --compile, masks)
has no effect. Atari games are wrapped and stepped as its documentation does, one after the other; ppo_lstm is
sb3-contrib's RecurrentPPO. Timed from the end of the first iteration, without logging; and it prints what the
last episodes returned.
"""

import importlib
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


class Hidden(BaseFeaturesExtractor):
    """The hidden layers that policy and value share."""

    def __init__(self, obs_space: gym.spaces.Box):
        super().__init__(obs_space, 64)
        hidden = [nn.Linear(obs_space.shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        self.network = nn.Sequential(*hidden)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.network(obs)


class Bins(gym.ActionWrapper):
    """A Box of actions cut into bins, as ppo_multidiscrete.py does."""

    def __init__(self, env: gym.Env, num_bins: int):
        super().__init__(env)
        self.bins = np.linspace(env.action_space.low, env.action_space.high, num_bins)  # (num_bins, K)
        self.action_space = gym.spaces.MultiDiscrete([num_bins] * self.bins.shape[1])

    def action(self, action: np.ndarray) -> np.ndarray:
        return np.take_along_axis(self.bins, action[None], 0)[0]


class Clock(BaseCallback):
    """Notes when each iteration began."""

    def _on_training_start(self):
        self.starts = []

    def _on_rollout_start(self):
        self.starts.append(time.perf_counter())

    def _on_step(self) -> bool:
        return True


def make_model(script: str, args) -> BaseAlgorithm:
    """stable-baselines3's twin of a script, args being the script's Args."""
    spec = gym.registry.get(args.env_id)
    is_atari, is_lstm = bool(spec) and spec.entry_point == "ale_py.env:AtariEnv", script == "ppo_lstm"

    def binned(env: gym.Env) -> gym.Env:
        is_box = isinstance(env.action_space, gym.spaces.Box)
        return Bins(env, args.num_bins) if script == "ppo_multidiscrete" and is_box else env

    if is_atari:
        envs = make_atari_env(args.env_id, args.num_envs, args.seed)
        envs = envs if is_lstm else VecFrameStack(envs, 4)
    else:
        torch.set_num_threads(1)  # as the script
        envs = make_vec_env(args.env_id, args.num_envs, args.seed, wrapper_class=binned)
    if getattr(args, "normalize", script == "ppo_continuous"):
        envs = VecNormalize(envs, gamma=args.gamma)
    network = dict(net_arch=[64, 64])  # separate ones
    if is_atari or is_lstm or script == "ppo_shared":
        network = dict(net_arch=[]) | ({} if is_atari else dict(features_extractor_class=Hidden))
    algorithm, policy = PPO, "CnnPolicy" if is_atari else "MlpPolicy"
    if is_lstm:
        algorithm, policy = RecurrentPPO, policy.replace("Policy", "LstmPolicy")
        network |= dict(lstm_hidden_size=128, shared_lstm=True, enable_critic_lstm=False)
    return algorithm(
        policy,
        envs,
        learning_rate=lambda left: args.learning_rate * (left if args.anneal_lr else 1),
        n_steps=args.num_steps,
        batch_size=args.batch_size // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef / 2,  # the scripts halve the squared error
        max_grad_norm=args.max_grad_norm,
        target_kl=args.target_kl,
        policy_kwargs=network,
        seed=args.seed,
        device=args.device,
    )


def main():
    if len(sys.argv) < 2 or not (ROOT / f"{sys.argv[1]}.py").exists():
        print("sb3_ppo.py: error: name a script first, such as ppo", file=sys.stderr)
        sys.exit(2)
    script = importlib.import_module(sys.argv.pop(1))
    args, clock = script.parse_args(), Clock()
    if args.num_iterations < 2:
        print("sb3_ppo.py: error: two iterations or more; the first is not timed", file=sys.stderr)
        sys.exit(2)
    model = make_model(script.__name__, args)
    steps = args.num_iterations * args.batch_size
    model.learn(steps, clock)
    returns = [episode["r"] for episode in model.ep_info_buffer]  # of the last 100 episodes, as in RESULTS.md
    print(f"return {np.mean(returns) if returns else np.nan:.2f} of the last {len(returns)} episodes")
    print(f"{(steps - args.batch_size) / (time.perf_counter() - clock.starts[1]):.1f} steps/s")


if __name__ == "__main__":
    main()
