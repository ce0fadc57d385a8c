"""The yardstick of speed.py: PPO written the plain way, for vectors, Atari and MuJoCo, without logging.

Plain means what most single-file scripts do: torch.distributions with validation, gymnasium's SyncVectorEnv
with Python wrappers, tensors made from every reward and done, float32 observations, unfused Adam.

    python benchmark/speed/plain_ppo.py CartPole-v1 50000
    python benchmark/speed/plain_ppo.py BreakoutNoFrameskip-v4 10240
    python benchmark/speed/plain_ppo.py HalfCheetah-v4 20480
"""

import sys
import time
from typing import NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical, Normal


class NoopReset(gym.Wrapper):
    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, 31)):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.last_two = np.zeros((2, *env.observation_space.shape), np.uint8)

    def step(self, action):
        total = 0.0
        for k in range(4):
            obs, reward, terminated, truncated, info = self.env.step(action)
            if k >= 2:
                self.last_two[k - 2] = obs
            total += float(reward)
            if terminated or truncated:
                break
        return self.last_two.max(axis=0), total, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    lives, game_over = 0, True

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        lives = self.unwrapped.ale.lives()
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return obs, reward, terminated, truncated, info

    def reset(self, **kwargs):
        if self.game_over:
            obs, info = self.env.reset(**kwargs)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset(**kwargs)
        self.lives = self.unwrapped.ale.lives()
        return obs, info


class FireReset(gym.Wrapper):
    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        for action in (1, 2):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset(**kwargs)
        return obs, info


def make_atari(env_id: str) -> gym.Env:
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
    env = EpisodicLife(MaxAndSkip(NoopReset(env)))
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    env = gym.wrappers.TransformReward(env, np.sign)
    env = gym.wrappers.GrayscaleObservation(gym.wrappers.ResizeObservation(env, (84, 84)))
    return gym.wrappers.FrameStackObservation(env, 4)


def make_vector(env_id: str) -> gym.Env:
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


def make_continuous(env_id: str) -> gym.Env:
    env = gym.wrappers.RecordEpisodeStatistics(gym.wrappers.FlattenObservation(gym.make(env_id)))
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
    env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def layer(module, std=2**0.5):
    nn.init.orthogonal_(module.weight, std)
    nn.init.constant_(module.bias, 0.0)
    return module


class VectorAgent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape))

        def mlp(out, std):
            hidden = [layer(nn.Linear(size, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh()]
            return nn.Sequential(*hidden, layer(nn.Linear(64, out), std))

        self.actor, self.critic = mlp(int(envs.single_action_space.n), 0.01), mlp(1, 1.0)

    def value(self, x):
        return self.critic(x)

    def act(self, x, action=None):
        dist = Categorical(logits=self.actor(x))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(x)


class ContinuousAgent(VectorAgent):
    def __init__(self, envs):
        nn.Module.__init__(self)
        size, out = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        hidden = [layer(nn.Linear(size, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh()]
        self.actor = nn.Sequential(*hidden, layer(nn.Linear(64, out), 0.01))
        hidden = [layer(nn.Linear(size, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh()]
        self.critic = nn.Sequential(*hidden, layer(nn.Linear(64, 1), 1.0))
        self.log_std = nn.Parameter(torch.zeros(1, out))

    def act(self, x, action=None):
        mean = self.actor(x)
        dist = Normal(mean, torch.exp(self.log_std.expand_as(mean)))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action).sum(1), dist.entropy().sum(1), self.critic(x)


class AtariAgent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.network = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(), nn.Flatten(),
            layer(nn.Linear(3136, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor, self.critic = (
            layer(nn.Linear(512, int(envs.single_action_space.n)), 0.01),
            layer(nn.Linear(512, 1), 1.0),
        )

    def value(self, x):
        return self.critic(self.network(x / 255.0))

    def act(self, x, action=None):
        hidden = self.network(x / 255.0)
        dist = Categorical(logits=self.actor(hidden))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(hidden)


def fail(message: str) -> NoReturn:
    print(f"plain_ppo.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def run(env_id: str, total_timesteps: int) -> float:
    """Train for total_timesteps; steps per second, the first iteration (warm-up) left out."""
    import ale_py

    gym.register_envs(ale_py)
    with gym.make(env_id) as env:
        action_space, atari = env.action_space, "ale" in dir(env.unwrapped)
    if atari:
        make_env, make_agent, T, N, minibatches, epochs, clip = make_atari, AtariAgent, 128, 8, 4, 4, 0.1
    elif isinstance(action_space, gym.spaces.Box):
        make_env, make_agent, T, N, minibatches, epochs, clip = (
            make_continuous,
            ContinuousAgent,
            2048,
            1,
            32,
            10,
            0.2,
        )
    else:
        make_env, make_agent, T, N, minibatches, epochs, clip = make_vector, VectorAgent, 128, 4, 4, 4, 0.2
    if not atari:
        torch.set_num_threads(1)
    torch.manual_seed(1)
    env_fns = [lambda: make_env(env_id)] * N
    envs = gym.vector.SyncVectorEnv(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    agent = make_agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.zeros((T, N) + envs.single_observation_space.shape)
    actions = torch.zeros((T, N) + envs.single_action_space.shape)
    logprobs, rewards, dones, values = (torch.zeros((T, N)) for _ in range(4))
    next_obs, next_done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(N)
    num_iterations = total_timesteps // (T * N)
    if num_iterations < 2:
        fail(f"the steps must be {2 * T * N} or more: two iterations, of which the first is not timed")
    for iteration in range(num_iterations):
        if iteration == 1:
            start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - iteration / num_iterations)
        for t in range(T):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.act(next_obs)
            actions[t], logprobs[t], values[t] = action, logprob, value.flatten()
            next_obs, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
            rewards[t] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(np.logical_or(terminated, truncated))
        with torch.no_grad():
            next_value = agent.value(next_obs).reshape(1, -1)
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(T)):
                alive = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                after = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + 0.99 * after * alive - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * alive * last
            returns = advantages + values
        flat = [x.reshape((-1,) + x.shape[2:]) for x in (obs, actions, logprobs, advantages, returns, values)]
        b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values = flat
        order = np.arange(T * N)
        for _ in range(epochs):
            np.random.shuffle(order)
            for first in range(0, T * N, T * N // minibatches):
                index = order[first : first + T * N // minibatches]
                b_action = b_actions[index] if make_env is make_continuous else b_actions.long()[index]
                _, new_logprob, entropy, new_value = agent.act(b_obs[index], b_action)
                logratio = new_logprob - b_logprobs[index]
                ratio = logratio.exp()
                with torch.no_grad():
                    (-logratio).mean(), ((ratio - 1) - logratio).mean()
                    ((ratio - 1.0).abs() > clip).float().mean().item()
                adv = b_advantages[index]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - clip, 1 + clip)).mean()
                new_value = new_value.view(-1)
                unclipped = (new_value - b_returns[index]) ** 2
                clipped = b_values[index] + torch.clamp(new_value - b_values[index], -clip, clip)
                v_loss = 0.5 * torch.max(unclipped, (clipped - b_returns[index]) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    return (num_iterations - 1) * T * N / (time.perf_counter() - start)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        fail("give a task and steps, such as CartPole-v1 50000")
    print(f"{run(sys.argv[1], int(sys.argv[2])):.1f} steps/s")
