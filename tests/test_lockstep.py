"""The six PPO scripts in lockstep with stable-baselines3 and sb3-contrib (SB3).

A script trains for a few iterations. Then SB3 trains, by its own learn(), on environments of its own with the
same seeds. It takes from the script only the initial weights, the actions and the order of the minibatches.
Everything else is its own: wrappers, running statistics, log-probabilities, values, bootstraps, advantages,
losses, gradients, Adam, schedules and logs; all of it is compared. Both compute in float64 and agree to 1e-9,
where float32 would hide small mistakes behind its rounding.

What differs by design is set equal:

- Time limits: SB3 always bootstraps, ours with --bootstrap-truncated. Without it, SB3 does not hear of them.
- Value loss: ours has a factor of 0.5, so SB3 gets half of vf_coef, and logs twice our value loss.
- Value clipping: SB3 takes the clipped value, ours the one with the larger error, which here
  `evaluate_actions` returns to SB3.
- Annealing: SB3 counts the rollout at hand as done, so its schedules are one iteration ahead.
- Minibatches: SB3's buffers get our order; RecurrentPPO's, which cuts anywhere, that of whole environments.
- LSTM: SB3 has two, or stops the value's gradient; here its `lstm_critic` is its `lstm_actor`.
- Logs: SB3 logs means over an update, ours the last minibatch, except for clipfrac; here SB3's `np.mean`
  returns both. SB3 has no old_approx_kl; it is computed here from SB3's log-probabilities. It logs no norm of
  gradients, which is what its `clip_grad_norm_` returns.
- Atari: SB3's wrappers get the numbers of no-ops that our emulators drew, and grey frames of ale-py, which
  gymnasium resizes and stacks, as SB3 converts colours and stacks black frames at first. Games are cut in the
  first frame of a step, for ale-py does not pool the frames of a whole step if it is the last.

Not compared: target_kl, which SB3 checks before each step of Adam, and masks that depend on the first
component, which SB3 does not have.
"""

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import scalars
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common import atari_wrappers
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from test_atari_envs import watch_noops
from torch import nn

import ppo
import ppo_atari
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete
import ppo_shared

# === Environments ============================================================================


class Drift(gym.Env):
    """Three numbers walk at random, pushed by actions. An episode ends where the first leaves its range.

    One step of each environment, at a time of its own, is so far off that normalization clips it.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, action_space: gym.Space):
        self.action_space, self.steps, self.outlier = action_space, 0, None

    def action_masks(self) -> np.ndarray:
        """What is valid of MultiDiscrete([2, 3]); in every state, something is of each component."""
        return np.array([self.x[0] < 0.5, True, True, self.x[1] < 0, self.x[2] < 0])

    def observe(self) -> tuple[np.ndarray, dict]:
        info = dict(action_mask=self.action_masks()) if self.action_space == SPACES["Multi"] else {}
        return self.x * [1.0, 3.0, 0.1] + [0.0, 2.0, 0.0], info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.outlier = self.outlier or self.np_random.integers(36, 48)
        self.x = self.np_random.normal(size=3)
        return self.observe()

    def step(self, action):
        push = np.resize(action, 3) * [0.5, -0.3, 0.2]
        self.x = 0.9 * self.x + push + 0.5 * self.np_random.normal(size=3)
        reward = self.x[1] - self.x[2] ** 2 + push.sum()
        self.steps += 1
        if self.steps == self.outlier:
            self.x[2], reward = 200.0, -300.0
        obs, info = self.observe()
        return obs, float(reward), bool(abs(self.x[0]) > 2), False, info


class DriftBoard(Drift):
    """Waves of the three numbers on 8 x 7 cells with 2 channels."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8, 7, 2), np.float64)

    def observe(self):
        obs, info = super().observe()
        return np.sin(np.outer(np.arange(8 * 7 * 2), obs)).sum(1).reshape(8, 7, 2), info


SPACES = dict(
    Discrete=gym.spaces.Discrete(3),
    Box=gym.spaces.Box(np.array([-0.4, -2.0]), np.array([1.5, 0.3]), dtype=np.float64),
    Multi=gym.spaces.MultiDiscrete([2, 3]),
)
kwargs = dict(max_episode_steps=6, disable_env_checker=True)
for space, action_space in SPACES.items():
    gym.register(f"Drift{space}-v0", Drift, kwargs=dict(action_space=action_space), **kwargs)
gym.register("DriftBoard-v0", DriftBoard, kwargs=dict(action_space=SPACES["Multi"]), **kwargs)

MAX_FRAMES = 141  # of Breakout, so that it is cut in the second life
breakout = gym.spec("BreakoutNoFrameskip-v4")
kwargs = breakout.kwargs | dict(max_num_frames_per_episode=MAX_FRAMES)
gym.register("ShortBreakoutNoFrameskip-v4", entry_point=breakout.entry_point, kwargs=kwargs)


def drift_env(args) -> gym.Env:
    """Drift, whose actions of MultiDiscrete are bins if it takes others."""
    env = Monitor(gym.make(args.env_id))
    low, high = getattr(env.action_space, "low", 0), getattr(env.action_space, "high", 0)
    if hasattr(args, "num_bins") and env.action_space != SPACES["Multi"]:
        width, bins = (high - low) / (args.num_bins - 1), gym.spaces.MultiDiscrete([args.num_bins] * len(low))
        env = gym.wrappers.TransformAction(env, lambda choices: low + choices * width, bins)
    return env


class GivenNoops(atari_wrappers.NoopResetEnv):
    def __init__(self, env: gym.Env, noops: Iterator[int]):
        super().__init__(env)
        self.noops = noops

    def reset(self, **kwargs):
        self.override_num_noops = next(self.noops)
        return super().reset(**kwargs)


def atari_env(args, noops: Iterator[int]) -> gym.Env:
    """A game through the wrappers of stable-baselines3, in the order of its AtariWrapper."""
    env = GivenNoops(gym.make("BreakoutNoFrameskip-v4", obs_type="grayscale"), noops)
    env = atari_wrappers.MaxAndSkipEnv(Monitor(gym.wrappers.TimeLimit(env, MAX_FRAMES)))
    env = atari_wrappers.FireResetEnv(atari_wrappers.EpisodicLifeEnv(env))
    env = atari_wrappers.ClipRewardEnv(gym.wrappers.ResizeObservation(env, (84, 84)))
    return gym.wrappers.FrameStackObservation(env, 1 if isinstance(args, ppo_lstm.Args) else 4)


# === What is compared with what ==============================================================


class TwoLayers(BaseFeaturesExtractor):
    """What ppo_shared.py and ppo_lstm.py have before their heads and their LSTM."""

    def __init__(self, space: gym.Space):
        super().__init__(space, 64)
        self.layers = nn.Sequential(nn.Linear(space.shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, obs):
        return self.layers(obs)


class TwoConvolutions(BaseFeaturesExtractor):
    """What ppo_multidiscrete.py has before its heads on a board of 8 x 7 cells and 2 channels."""

    def __init__(self, space: gym.Space):
        super().__init__(space, 128)
        convolutions = nn.Conv2d(2, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 2), nn.ReLU()
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 2 * 2, 128), nn.ReLU())

    def forward(self, obs):
        return self.layers(obs.permute(0, 3, 1, 2))


# beginnings of the names of parameters, ours and theirs
HEADS = {"actor.": "action_net.", "critic.": "value_net."}
SHARED = HEADS | {"network.": "features_extractor.layers.", "lstm.": "lstm_actor."}
CNN = SHARED | {"network.7.": "features_extractor.linear.0.", "network.": "features_extractor.cnn."}
BOARD = {"network.0.": "features_extractor.layers.", "network.1.": "features_extractor.layers.5."} | HEADS
SEPARATE = {"actor.4.": "action_net.", "critic.4.": "value_net.", "log_std": "log_std"}
SEPARATE |= {"actor.": "mlp_extractor.policy_net.", "critic.": "mlp_extractor.value_net."}
TWO_LAYERS = dict(features_extractor_class=TwoLayers, net_arch=[])
TWO_CONVOLUTIONS = dict(features_extractor_class=TwoConvolutions, net_arch=[])
HIDDEN_SIZE = dict(lstm_hidden_size=128)
GAME = dict(num_envs=2, num_steps=24, total_timesteps=144, update_epochs=1)


@dataclass
class Case:
    script: types.ModuleType
    env_id: str
    names: dict[str, str]
    algorithm: type = PPO
    policy: str = "MlpPolicy"
    policy_kwargs: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)


CASES = {
    "ppo": Case(ppo, "DriftDiscrete-v0", SEPARATE),
    "ppo_shared": Case(ppo_shared, "DriftDiscrete-v0", SHARED, policy_kwargs=TWO_LAYERS),
    "ppo_continuous": Case(ppo_continuous, "DriftBox-v0", SEPARATE),
    "ppo_lstm": Case(
        ppo_lstm, "DriftDiscrete-v0", SHARED, RecurrentPPO, "MlpLstmPolicy", TWO_LAYERS | HIDDEN_SIZE
    ),
    "ppo_multidiscrete-masks": Case(ppo_multidiscrete, "DriftMulti-v0", SEPARATE, MaskablePPO),
    "ppo_multidiscrete-bins": Case(ppo_multidiscrete, "DriftBox-v0", SEPARATE, flags=dict(num_bins=5)),
    "ppo_multidiscrete-board": Case(
        ppo_multidiscrete, "DriftBoard-v0", BOARD, MaskablePPO,
        policy_kwargs=TWO_CONVOLUTIONS, flags=dict(normalize=False),
    ),
    "ppo_atari-game": Case(ppo_atari, "ShortBreakoutNoFrameskip-v4", CNN, policy="CnnPolicy", flags=GAME),
    "ppo_lstm-game": Case(
        ppo_lstm, "ShortBreakoutNoFrameskip-v4", CNN, RecurrentPPO, "CnnLstmPolicy", HIDDEN_SIZE, GAME
    ),
}  # fmt: skip
# Every flag of the algorithm differs from its default in one of them, and between them.
SMALL = dict(num_envs=4, num_steps=16, total_timesteps=192, update_epochs=3, num_minibatches=2, device="cpu")
FLAGS = dict(
    bootstrapped=dict(bootstrap_truncated=True, gamma=0.9, gae_lambda=0.8, learning_rate=3e-3, clip_coef=0.1)
    | dict(ent_coef=0.03, vf_coef=0.7, max_grad_norm=0.3),
    plain=dict(gamma=0.8, learning_rate=2e-3, anneal_lr=False, clip_coef=0.05, anneal_clip=True)
    | dict(norm_adv=False, clip_vloss=False, ent_coef=0.1, max_grad_norm=100.0),
)
RUNS = [(name, "bootstrapped") for name in CASES]
RUNS += [(name, "plain") for name in CASES if CASES[name].flags is not GAME]  # games are slow
ROLLOUT = ("obs", "actions", "rewards", "values", "logprobs", "advantages", "returns")


def recorded(script: types.ModuleType, args, monkeypatch) -> tuple[str, list[dict], dict[str, torch.Tensor]]:
    """Trains; returns the run folder, what each iteration had before its update, the last state."""
    compute_gae, ppo_loss, randperm = script.compute_gae, script.ppo_loss, torch.randperm
    iterations, agents = [], []

    def recording_gae(rewards, *others):
        advantages = compute_gae(rewards, *others)
        iterations.append(dict(rewards=rewards.copy(), orders=[], minibatches=[]))
        return advantages

    def recording_randperm(*size, **kwargs):
        iterations[-1]["orders"].append(randperm(*size, **kwargs))
        return iterations[-1]["orders"][-1]

    def recording_loss(agent, batch, *others):
        now = iterations[-1]
        if not now["minibatches"]:
            now["state"] = {name: x.clone() for name, x in agent.state_dict().items()}
        if len(now["orders"]) == 1:  # the minibatches of the first epoch make up the rollout
            now["minibatches"].append({name: x.clone() for name, x in batch.items()})
        agents[:] = [agent]
        return ppo_loss(agent, batch, *others)

    monkeypatch.setattr(script, "compute_gae", recording_gae)
    monkeypatch.setattr(script, "ppo_loss", recording_loss)
    monkeypatch.setattr(torch, "randperm", recording_randperm)
    run_dir = script.train(args)
    axis = 1 if script is ppo_lstm else 0  # its minibatches are of environments
    for now in iterations:
        for name in set(ROLLOUT) - {"rewards"}:
            x = torch.cat([minibatch[name] for minibatch in now["minibatches"]], axis)
            x = x.index_select(axis, now["orders"][0].argsort())
            now[name] = (x if axis else x.unflatten(0, (args.num_steps, args.num_envs))).numpy()
    return run_dir, iterations, agents[0].state_dict()


# === stable-baselines3 =======================================================================


class Peer:
    """An algorithm of SB3 that takes actions and the order of minibatches from recorded iterations."""

    def __init__(self, case: Case, args, envs: VecEnv, iterations: list[dict], monkeypatch):
        self.args, self.ends, self.iterations = args, [], []
        self.actions = (torch.as_tensor(x) for now in iterations for x in now["actions"])
        self.orders = (order.numpy() for now in iterations for order in now["orders"])
        lag = 1 / args.num_iterations
        self.model = model = case.algorithm(
            case.policy,
            envs,
            learning_rate=lambda left: args.learning_rate * (left + lag if args.anneal_lr else 1),
            n_steps=args.num_steps,
            batch_size=args.batch_size // args.num_minibatches,
            n_epochs=args.update_epochs,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda,
            clip_range=lambda left: args.clip_coef * (left + lag if args.anneal_clip else 1),
            normalize_advantage=args.norm_adv,
            ent_coef=args.ent_coef,
            vf_coef=args.vf_coef / 2,
            max_grad_norm=args.max_grad_norm,
            policy_kwargs=dict(case.policy_kwargs),
            seed=args.seed,
            device="cpu",
        )
        self.is_recurrent = case.algorithm is RecurrentPPO
        if self.is_recurrent:
            model.policy.lstm_critic = model.policy.lstm_actor
        self.get_samples, self.evaluate, self.update = (
            model.rollout_buffer._get_samples, model.policy.evaluate_actions, model.train
        )  # fmt: skip
        model.rollout_buffer._get_samples = self.given_samples
        model.policy.evaluate_actions = self.evaluate_with_clipped_value
        model.train = self.recorded_update
        monkeypatch.setattr(nn.utils, "clip_grad_norm_", self.clip_and_note(nn.utils.clip_grad_norm_))
        monkeypatch.setattr(Distribution, "get_actions", lambda *_, **__: next(self.actions))
        monkeypatch.setattr(np.random, "permutation", self.begin_epoch)  # of PPO's and MaskablePPO's buffers
        monkeypatch.setattr(np.random, "randint", lambda size: self.begin_epoch(size)[0])  # of RecurrentPPO's
        mean_and_last = types.SimpleNamespace(**vars(np) | dict(mean=lambda xs: (np.average(xs), xs[-1])))
        monkeypatch.setattr(sys.modules[case.algorithm.__module__], "np", mean_and_last)

    def learn(self):
        self.model.learn(self.args.total_timesteps, self.after_step, log_interval=None)
        assert next(self.actions, None) is None and next(self.orders, None) is None

    def after_step(self, found: dict, _: dict) -> bool:
        """Called by SB3 after a step of the environments, before it bootstraps."""
        for is_over, info in zip(found["dones"], found["infos"], strict=True):
            if is_over:
                end = dict(step=self.model.num_timesteps, is_cut=info["TimeLimit.truncated"])
                if episode := info.get("episode"):  # of a game, not of a life
                    length = info.get("episode_frame_number", episode["l"])
                    end |= {"charts/episodic_return": episode["r"], "charts/episodic_length": length}
                self.ends.append(end)
                info["TimeLimit.truncated"] &= self.args.bootstrap_truncated
        return True

    def begin_epoch(self, size: int) -> np.ndarray:
        """Numbers of the steps; SB3 has one environment after the other, ours one step after the other."""
        order, T, N = next(self.orders), self.args.num_steps, self.args.num_envs
        if self.is_recurrent:
            self.order = (order[:, None] * T + np.arange(T)).flatten()
        else:
            self.order = order % N * T + order // N
        return np.arange(size)

    def given_samples(self, places: np.ndarray, *others):
        self.minibatch = self.get_samples(self.order[places], *others)
        return self.minibatch

    def evaluate_with_clipped_value(self, *inputs, **masks):
        values, logprobs, entropy = self.evaluate(*inputs, **masks)
        old, returns = self.minibatch.old_values, self.minibatch.returns
        is_step = getattr(self.minibatch, "mask", torch.ones_like(old)) > 0  # no padding
        self.old_approx_kl = (self.minibatch.old_log_prob - logprobs)[is_step].mean().item()
        if self.args.clip_vloss:
            clip = self.model.clip_range(self.model._current_progress_remaining)
            values, clipped = values.flatten(), old + (values.flatten() - old).clamp(-clip, clip)
            values = torch.where((clipped - returns).abs() > (values - returns).abs(), clipped, values)
        return values, logprobs, entropy

    def clip_and_note(self, clip_grad_norm):
        def clip(*inputs):
            self.grad_norm = clip_grad_norm(*inputs)

        return clip

    def recorded_update(self):
        buffer = self.model.rollout_buffer
        theirs = dict(obs="observations", logprobs="log_probs")
        now = {name: getattr(buffer, theirs.get(name, name)).copy() for name in ROLLOUT}
        now |= dict(parameters=self.parameters(), statistics=self.statistics())
        self.update()
        log = self.model.logger.name_to_value
        now["logs"] = {
            "losses/policy_loss": log["train/policy_gradient_loss"][1],
            "losses/value_loss": log["train/value_loss"][1] / 2,
            "losses/entropy": -log["train/entropy_loss"][1],
            "losses/old_approx_kl": self.old_approx_kl,
            "losses/approx_kl": log["train/approx_kl"][1],
            "losses/clipfrac": log["train/clip_fraction"][0],
            "losses/grad_norm": self.grad_norm.item(),
            "losses/explained_variance": log["train/explained_variance"],
            "charts/learning_rate": log["train/learning_rate"],
        }
        self.iterations.append(now)

    @torch.no_grad()
    def set_parameters(self, values: dict[str, torch.Tensor]):
        parameters = dict(self.model.policy.named_parameters())
        assert parameters.keys() == values.keys()
        for name, x in parameters.items():
            x.copy_(values[name])

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone() for name, x in self.model.policy.named_parameters()}

    def statistics(self) -> np.ndarray | None:
        """Means, variances and counts of the observations' components and, last, of discounted returns."""
        if not isinstance(envs := self.model.get_env(), VecNormalize):
            return None
        obs, returns = envs.obs_rms, envs.ret_rms
        counts = np.full_like(obs.mean, obs.count)
        rows = ((obs.mean, returns.mean), (obs.var, returns.var), (counts, returns.count))
        return np.stack([np.append(*row) for row in rows])


def by_their_names(state: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    found = {}
    for name, x in state.items():
        if name != "_extra_state":  # the statistics
            begin = max((begin for begin in names if name.startswith(begin)), key=len)
            found[names[begin] + name.removeprefix(begin)] = x
    return found


# === Tests ===================================================================================


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """Whoever asks for float32 gets float64, in the scripts as in SB3."""
    import torch._dynamo  # noqa: F401  Adam would import it now, and its tables of types outlive this test

    np.testing.assert_allclose(0, 0)  # likewise, it imports numpy.testing
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(np, "float32", np.float64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def noops(monkeypatch) -> list[list[int]]:
    """The numbers of no-ops at the begin of each game of each environment of ppo_atari.py or ppo_lstm.py."""
    drawn = []

    class WatchedEnvs(ppo_atari.AtariEnvs):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            drawn.extend(watch_noops(self))

    monkeypatch.setattr(ppo_atari, "AtariEnvs", WatchedEnvs)
    monkeypatch.setattr(ppo_lstm, "AtariEnvs", WatchedEnvs)
    return drawn


@pytest.mark.parametrize(("name", "flags"), RUNS)
def test_lockstep(name, flags, noops, monkeypatch):
    case = CASES[name]
    args = case.script.Args(env_id=case.env_id, **SMALL | FLAGS[flags] | case.flags)
    run_dir, ours, last_state = recorded(case.script, args, monkeypatch)
    if noops:  # where none was drawn, it was drawn again
        assert noops[0] != noops[1]
        makes = [lambda drawn=drawn: atari_env(args, iter([n for n in drawn if n])) for drawn in noops]
    else:
        makes = [lambda: drift_env(args)] * args.num_envs
    envs = DummyVecEnv(makes)
    if is_normalized := "_extra_state" in last_state and last_state["_extra_state"].numel() > 0:
        envs = VecNormalize(envs, gamma=args.gamma)
    peer = Peer(case, args, envs, ours, monkeypatch)
    peer.set_parameters(by_their_names(ours[0]["state"], case.names))
    peer.learn()
    theirs = peer.iterations

    assert len(ours) == len(theirs) == args.num_iterations
    cut = sum(end["is_cut"] for end in peer.ends)
    assert 2 <= cut <= len(peer.ends) - 2
    if is_normalized:
        assert theirs[-1]["obs"].max() == -theirs[-1]["rewards"].min() == 10
    if case.flags is not GAME:  # whose few updates are small
        assert any(0 < now["logs"]["losses/clipfrac"] < 1 for now in theirs)
    for i in range(args.num_iterations):
        for key in ROLLOUT:
            assert_close(ours[i][key], theirs[i][key].reshape(ours[i][key].shape), f"{key} of iteration {i}")
        if is_normalized:
            assert_close(ours[i]["state"]["_extra_state"], theirs[i]["statistics"], f"statistics {i}")
    states = [*(now["state"] for now in ours), last_state]
    for i, parameters in enumerate([*(now["parameters"] for now in theirs), peer.parameters()]):
        for key, x in by_their_names(states[i], case.names).items():
            assert_close(x, parameters[key], f"{key} after {i} iterations")

    for tag in theirs[0]["logs"]:
        expected = [((i + 1) * args.batch_size, now["logs"][tag]) for i, now in enumerate(theirs)]
        assert_logged(run_dir, tag, expected)
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        assert_logged(run_dir, tag, [(end["step"], end[tag]) for end in peer.ends if tag in end])


def assert_close(ours, theirs, name: str):
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=name)


def assert_logged(run_dir, tag: str, expected: list[tuple[int, float]]):
    """TensorBoard keeps float32, and SB3's Monitor six digits behind the point."""
    np.testing.assert_allclose(scalars(run_dir, tag), expected, rtol=1e-6, atol=1e-6, err_msg=tag)
