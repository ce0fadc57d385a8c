"""Records a run of a decoupled script from outside: what its environments did, and by which weights.

Every observation names its environment and its place there, so whoever sees one can say which it is. The
learner's Agent writes down what it reads in each gradient step, and all copies of it which weights acted.
"""

import ale_py
import gymnasium as gym
import numpy as np
import torch


class Wander(gym.Env):
    """Episodes of 2 to 7 steps, by chance, which end, are cut or both. Rewards beyond 1 hang on the action.

    An environment keeps a list for each quantity, with an entry for each step: obs is what was acted upon,
    last_obs what the step led to before a reset, actor the weights that acted.
    """

    everyone, seen = [], {}  # environments in the order in which they were made, and weights by observation
    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Box(-100, 100, (6,), np.float32)

    def __init__(self, scale=2.0, blind=False):
        self.scale, self.blind = scale, blind
        self.number, self.clock, self.over = len(self.everyone), -1, True
        self.obs, self.last_obs, self.actions, self.rewards = [], [], [], []
        self.terminated, self.truncated, self.actors, self.seeds = [], [], [], []
        self.everyone.append(self)

    def observe(self):
        self.clock += 1
        noise = 0 * self.np_random.normal(size=3) if self.blind else self.np_random.normal(size=3)
        return np.array([self.number / 16, self.clock / 256, self.t / 8, *noise], np.float32)

    def reset(self, *, seed=None, options=None):
        assert self.over, "an episode was given up"
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t, self.total, self.over = 0, 0.0, False
        self.length, self.end = self.np_random.integers(2, 8), self.np_random.integers(3)
        self.now = self.observe()
        return self.now.copy(), {}

    def step(self, action):
        self.obs.append(self.now)
        self.actors.append(self.seen[name_of(self.now)])
        self.t += 1
        reward = float(np.float32(self.scale * self.np_random.normal() + (action - 1) * np.sin(self.t)))
        self.over = self.t >= self.length
        terminated, truncated = bool(self.over and self.end != 1), bool(self.over and self.end != 0)
        self.now = self.observe()
        self.last_obs.append(self.now)
        self.actions.append(int(action))
        self.rewards.append(reward)
        self.terminated.append(terminated)
        self.truncated.append(truncated)
        return self.now.copy(), reward, terminated, truncated, {}


class WanderImage(Wander):
    """The same as an image, whose first pixel names it."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def observe(self):
        self.clock += 1
        image = self.np_random.integers(0, 256, (36, 36, 3)).astype(np.uint8)
        image[0, 0] = self.number, self.clock // 256, self.clock % 256
        return image.transpose(2, 0, 1).copy()

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs.transpose(1, 2, 0), info

    def step(self, action):
        obs, *rest = super().step(action)
        return obs.transpose(1, 2, 0), *rest


gym.register("Wander-v0", Wander, disable_env_checker=True)
gym.register("Wild-v0", Wander, disable_env_checker=True, kwargs=dict(scale=6.0))
gym.register("Blind-v0", Wander, disable_env_checker=True, kwargs=dict(blind=True))
gym.register("WanderImage-v0", WanderImage, disable_env_checker=True)
gym.register_envs(ale_py)
breakout = gym.spec(
    "BreakoutNoFrameskip-v4"
).kwargs  # a life lasts about 20 steps; a time limit cuts after 30
gym.register(
    "ShortBreakout-v0", "ale_py.env:AtariEnv", kwargs=breakout | dict(max_num_frames_per_episode=120)
)


class Game:
    """The trace of an Atari game within a vector of games. A lost life ends an episode, but not the game."""

    def __init__(self):
        self.number, self.clock, self.total = len(Wander.everyone), -1, 0.0
        self.obs, self.last_obs, self.actions, self.rewards = [], [], [], []
        self.terminated, self.truncated, self.actors, self.seeds = [], [], [], []
        self.games = []  # (last step, score, length in frames)
        Wander.everyone.append(self)

    def named(self, frames):
        self.clock += 1
        frames[-1, 0, :3] = self.number, self.clock // 256, self.clock % 256
        return frames.copy()

    def begin(self, frames, lives, count):
        self.now, self.lives, self.count = self.named(frames), lives, count

    def step(self, action, last, frames, reward, terminated, truncated, lives, count):
        self.obs.append(self.now)
        self.actors.append(Wander.seen[name_of(self.now)])
        self.total += reward
        if terminated or truncated:
            self.games.append(
                (len(self.actions), self.total, self.count + 4)
            )  # at most, as a game may end within 4
            self.total = 0.0
        self.actions.append(int(action))
        self.rewards.append(float(reward))
        self.terminated.append(bool(terminated or lives < self.lives))
        self.truncated.append(bool(truncated))
        self.last_obs.append(self.named(last) if truncated else None)
        self.begin(frames, lives, count)


def recorded_games(make_env):
    """make_env() for Atari, with a name in the pixels of each observation and a trace of each game."""

    def make(*inputs):
        envs = make_env(*inputs)
        games = [Game() for _ in range(envs.num_envs)]
        reset, send, recv, sent = envs.reset, envs.send, envs.recv, []

        def recorded_reset(seed):
            obs, info = reset(seed=seed)
            obs = obs.copy()
            for n, game in enumerate(games):
                game.seeds.append(seed + n)
                game.begin(obs[n], info["lives"][n], info["episode_frame_number"][n])
            return obs, info

        def recorded_send(actions):
            sent.append(np.copy(actions))
            send(actions)

        def recorded_recv():
            obs, rewards, terminated, truncated, info = recv()
            obs, actions = obs.copy(), sent.pop()
            rewards = rewards - 2 * (info["lives"] < [game.lives for game in games])  # more than is clipped
            last = info["final_obs"] = np.copy(info.get("final_obs", obs))
            steps = zip(
                actions, last, obs, rewards, terminated, truncated,
                info["lives"].copy(), info["episode_frame_number"].copy(), strict=True,
            )  # fmt: skip
            for game, step in zip(games, steps, strict=True):
                game.step(*step)
            return obs, rewards, terminated, truncated, info

        envs.reset, envs.send, envs.recv = recorded_reset, recorded_send, recorded_recv
        return envs

    return make


def names_of(obs):
    """(environment, clock) of observations, a list: of vectors (..., 6) by their first two numbers, of images
    (..., 3, 36, 36) by the first pixel's colours, of games (..., 4, 84, 84) by the last frame's first pixels.
    """
    obs = torch.as_tensor(obs)
    if obs.shape[-1] == 6:
        number, clock = (obs[..., :2].double() * torch.tensor([16, 256])).round().flatten(0, -2).long().T
        return list(zip(number.tolist(), clock.tolist(), strict=True))
    pixels = obs[..., 0, 0] if obs.shape[-1] == 36 else obs[..., -1, 0, :3]
    number, high, low = pixels.flatten(0, -2).long().T
    return list(zip(number.tolist(), (256 * high + low).tolist(), strict=True))


def name_of(obs):
    return names_of(obs[None])[0]


class Record:
    """A run of script.train(args): traces of its environments and the learner's gradient steps.

    weights: those before each gradient step and after the last, dictionaries of float64 arrays.
    inputs: what the agent read in each gradient step. began: steps begun in each environment by then.
    decisions: what its convolutional network decided in each gradient step, as reference.decoupled.Decisions
    takes it.
    """

    def __init__(self, script, args, monkeypatch, calls=(), head=200):
        self.weights, self.prints, self.inputs, self.began, self.learner = [], [], [], [], None
        self.decisions = []
        self.head = head  # times the policy's last weights: else all policies are nearly uniform
        self.calls = {name: [] for name in calls}  # of functions of the script: arguments and results
        self.traces = Wander.everyone = []
        Wander.seen.clear()
        monkeypatch.setattr(script, "Agent", self.recorded(script.Agent))
        if args.env_id == "ShortBreakout-v0":
            monkeypatch.setattr(script, "make_env", recorded_games(script.make_env))
        for name in calls:
            monkeypatch.setattr(script, name, self.spied(getattr(script, name), self.calls[name]))
        self.run_dir = script.train(args)
        self.snapshot(self.learner)
        self.place = {}  # (environment, clock) -> step
        for trace in self.traces:
            for t, obs in enumerate([*trace.obs, trace.now]):
                self.place[name_of(obs)] = trace.number, t
            trace.obs.append(trace.now)

    def recorded(self, Agent):
        record = self

        def decide(module, inputs, output):
            if not torch.is_grad_enabled():
                return
            if isinstance(module, torch.nn.ReLU):
                record.decisions[-1].append(output.detach() > 0)
            else:
                sizes = module.kernel_size, module.stride, module.padding
                _, taken = torch.nn.MaxPool2d(*sizes, return_indices=True)(inputs[0].detach())
                record.decisions[-1].append(taken)

        class Recorded(Agent):
            def __init__(self, *args):
                super().__init__(*args)
                record.learner = record.learner or self
                head = [x for x in self.actor.modules() if isinstance(x, torch.nn.Linear)][-1]
                with torch.no_grad():
                    head.weight *= record.head
                for module in self.network.modules():
                    if isinstance(module, torch.nn.ReLU | torch.nn.MaxPool2d):
                        module.register_forward_hook(decide)

            def forward(self, *inputs):
                if torch.is_grad_enabled():
                    record.snapshot(self)
                    record.inputs.append(copied(inputs))
                    record.decisions.append([])
                    record.began.append([len(trace.actions) for trace in record.traces])
                else:
                    obs = inputs[0]["obs"] if isinstance(inputs[0], dict) else inputs[0]
                    Wander.seen.update(dict.fromkeys(names_of(obs), fingerprint(self)))
                return super().forward(*inputs)

        return Recorded

    def spied(self, function, calls):
        def spy(*args):
            result = function(*args)
            calls.append((copied(args[1:] if callable(args[0]) else args), copied(result)))
            return result

        return spy

    def snapshot(self, agent):
        self.weights.append({name: x.detach().double().numpy() for name, x in agent.state_dict().items()})
        self.prints.append(fingerprint(agent))

    def acted(self, n, begin, length):
        """Gradient steps behind the weights that acted in a segment: one number, or it fails."""
        (steps,) = {self.prints.index(x) for x in self.traces[n].actors[begin : begin + length]}
        return steps

    def samples(self, obs):
        """(environment, step) of observations that were acted upon, or are yet to be."""
        return [self.place[name] for name in names_of(obs)]


def fingerprint(agent):
    return hash(b"".join(x.detach().numpy().tobytes() for x in agent.parameters()))


def copied(x):
    if isinstance(x, dict):
        return {name: copied(value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return [copied(value) for value in x]
    return (
        x.detach().clone() if isinstance(x, torch.Tensor) else np.copy(x) if isinstance(x, np.ndarray) else x
    )
