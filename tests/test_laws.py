"""The laws of helpers/laws.py in a run of each algorithm with many flags at once, and what no law sees.

test_flags.py changes one flag at a time, which takes minutes. These runs take a fraction of a second.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from conftest import OTHERS, SCRIPTS, small_args
from laws import check
from traced import NAMES_OF_LOSS, SMALL, Traced, TracedBox, TracedMulti, record

import impala_vtrace
import ngu_r2d2
import ppo_async
import ppo_lstm

ALL = SCRIPTS | OTHERS
PPO = dict(bootstrap_truncated=True, clip_coef=0.02, anneal_clip=True, gamma=0.9, gae_lambda=0.8, vf_coef=0.2)
PPO |= dict(ent_coef=0.1, max_grad_norm=0.1)
IMPALA = dict(bootstrap_truncated=True, gamma=0.9, vf_coef=0.2, ent_coef=0.1, max_grad_norm=0.5)
IMPALA |= dict(replay_fraction=0.5, num_envs=2, batch_segments=4, total_timesteps=64)
NGU = dict(
    n_step=2, cross_mixture=0.3, priority_eta=0.7, last_reward_weight=3.0, num_policies=4, max_grad_norm=0.5
)
RUNS = [(name, PPO | dict(target_kl=3e-4)) for name in SCRIPTS]
RUNS += [
    ("ppo_async", PPO | flags) for flags in (dict(sample_reuse=1.5), dict(sample_reuse=2, decoupled=True))
]
RUNS += [("impala_vtrace", IMPALA | dict(rho_bar=1.1, c_bar=0.9, vtrace_lambda=0.8, rewards="raw"))]
RUNS += [("impala_vtrace", IMPALA | dict(correction=kind)) for kind in ("one-step-is", "epsilon", "none")]
RETRACE = dict(target="retrace", eval_epsilon=0.2, h_eps=0.1, retrace_lambda=0.8)
RUNS += [("ngu_r2d2", NGU | flags) for flags in (dict(bonus="zero-mean"), RETRACE | dict(bonus="min-max"))]
RUNS += [("ngu_r2d2", NGU | RETRACE | dict(eval_epsilon=0.0, burn_in=2, unroll=2, period=1))]
RUNS += [("ngu_r2d2", NGU | dict(bonus=kind)) for kind in ("batch-mean", "unit-std")]


@pytest.mark.parametrize("name,flags", RUNS)
def test_laws_hold_with_many_flags_at_once(name, flags):
    check(record(ALL[name], **flags))


# === Small numbers that are added to others ===


@pytest.mark.parametrize("name", ALL)
def test_gradients_that_are_as_small_as_what_is_added_to_their_norm(name, monkeypatch):
    """They are clipped as torch.nn.utils.clip_grad_norm_ does: times limit / (norm + 1e-6), at most 1."""
    script, loss_name = ALL[name], NAMES_OF_LOSS.get(name, "ppo_loss")
    loss = getattr(script, loss_name)

    def small(*args):
        value, *others = loss(*args)
        return value * 1e-7, *others

    monkeypatch.setattr(script, loss_name, small)
    for limit in (1e-7, 1.0):
        run = record(script, max_grad_norm=limit)
        steps = run.steps[:: 2 if name == "ngu_r2d2" else 1]
        for call, step in zip(run.losses, steps, strict=True):
            assert 1e-9 < call.norm < 1e-5
            expected = call.grad * min(1, limit / (call.norm + 1e-6))
            np.testing.assert_allclose(step.grad, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", [*SCRIPTS, "ppo_async"])
def test_advantages_that_are_as_small_as_what_is_added_to_their_deviation(name):
    """The loss at ratio 1 to 1.1 of advantages of 1e-8: (A - mean) / (unbiased deviation + 1e-8)."""
    advantages, ratios = 1e-8 * np.array([1.0, -2.0, 3.0, 0.5]), np.array([1.0, 1.05, 1.1, 1.02])
    zeros, current = torch.zeros(4), torch.tensor(np.log(ratios), dtype=torch.float32)
    dist = SimpleNamespace(log_prob=lambda actions: current, entropy=lambda: zeros)
    batch = dict.fromkeys(
        ("obs", "actions", "values", "returns", "logprobs", "masks", "state", "starts"), zeros
    )
    batch["advantages"] = torch.tensor(advantages, dtype=torch.float32)
    agent = lambda *inputs: (dist, zeros, *[zeros] * (name == "ppo_lstm"))  # noqa: E731
    _, info = ALL[name].ppo_loss(agent, batch, 0.2, ALL[name].Args(device="cpu"))
    normalized = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    assert info["policy_loss"].item() == pytest.approx(-(normalized * ratios).mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["ppo_continuous", "ppo_multidiscrete"])
def test_normalization_of_what_hardly_varies(name):
    """A variance of 0 counts as 1e-8. The first moments have the weight of 1e-4 observations."""
    script = ALL[name]
    norm = script.RunningNorm(np.array([[2.0, 1.0], [0.0, 1e-8], [1.0, 1.0]]))
    found = norm(np.array([[2.0 + 1e-5, 1.0 - 1e-4]]))
    np.testing.assert_allclose(found, [[0.1, -1e-4 / 2e-8**0.5]])
    envs = script.make_env(script.Args(**SMALL[name]), 2)
    np.testing.assert_array_equal(envs.statistics, np.repeat([[0.0], [1.0], [1e-4]], 4, axis=1))
    envs.frozen, envs.norm.var[-1] = True, 0.0
    ended, rewards = np.zeros(2, bool), np.array([1e-4, -2e-3])
    envs.env = SimpleNamespace(step=lambda actions: (np.zeros((2, 3)), rewards, ended, ended, {}))
    assert envs.step(None)[1].tolist() == pytest.approx([1, -10])


def test_epsilon_keeps_the_gradient_of_rare_actions_small():
    """--correction epsilon: -log(p + 1e-6) times the advantage, here of a p of about 1e-6."""
    dist = impala_vtrace.Categorical(torch.tensor([0.0, -13.5]).expand(2, 1, 2))
    values, zeros = torch.tensor([[0.5], [2.0]]), torch.zeros(2, 1)
    batch = dict(last_actions=torch.ones(2, 1, dtype=torch.int64), starts=zeros > 0, last_rewards=zeros + 1)
    batch |= dict(bootstraps=zeros, state=None, logprobs=torch.full((1, 1), -5.0))
    args = impala_vtrace.Args(correction="epsilon", device="cpu", gamma=0.9)
    _, info = impala_vtrace.impala_loss(lambda *inputs: (dist, values, None), batch, args)
    p = np.exp(-13.5) / (1 + np.exp(-13.5))
    assert info["policy_loss"].item() == pytest.approx(-np.log(p + 1e-6) * (1 + 0.9 * 2 - 0.5), rel=1e-5)


def test_scales_of_novelty_that_hardly_varies():
    """1e-8 is added to what is divided by; padding does not count."""
    novelty = 1e-8 * torch.tensor([[0.0, 5.0], [1.0, 7.0]], dtype=torch.float64)
    mask, deviation = torch.tensor([[True, False], [True, False]]), 0.5**0.5
    expected = {"min-max": [0, 1 / 2], "batch-mean": [0, 1 / 1.5], "unit-std": [0, 1 / (deviation + 1)]}
    expected["zero-mean"] = [-0.5 / (deviation + 1), 0.5 / (deviation + 1)]
    for how, numbers in expected.items():
        np.testing.assert_allclose(ngu_r2d2.rescaled(novelty, mask, how)[:, 0], numbers, rtol=1e-6)


def test_priority_of_a_sequence_without_a_step_to_train_on():
    errors, mask = torch.ones(3, 2), torch.tensor([[False, False], [False, True], [False, True]])
    assert ngu_r2d2.sequence_priority(errors, 0.25, mask).tolist() == [0, 1]


# === A run that goes on ===


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_learns_at_its_own_rates(name):
    """They are annealed on, or are those of the flags, whatever rates the checkpoint's optimizers have."""
    before = record(ALL[name], writes=True)
    flags = dict(
        resume=str(before.run_dir), total_timesteps=2 * before.args.total_timesteps, learning_rate=0.003
    )
    flags |= dict(adam_eps=1e-3, auxiliary_lr=0.004) if name == "ngu_r2d2" else {}
    run = record(ALL[name], **flags)
    if name == "ngu_r2d2":  # whose two optimizers step in turn
        expected = [0.003, 0.004] * len(run.losses)
        np.testing.assert_allclose([step.eps for step in run.steps], 1e-3)
    else:
        left = 1 - np.arange(run.args.num_iterations) / run.args.num_iterations
        last = zip(left[len(left) // 2 :], run.iterations(), strict=True)
        expected = [0.003 * share for share, calls in last for _ in calls]
    np.testing.assert_allclose([step.lr for step in run.steps], expected, rtol=1e-5)


# === Several processes, of which the others are made up ===


def as_one_of_two(patch, script, rank):
    """The script believes to be one of two processes; the other one always has the same numbers.

    Returns sizes of what is summed over both.
    """
    sizes = []

    def all_reduce(x, operation=torch.distributed.ReduceOp.SUM):
        sizes.append(x.numel())
        if operation == torch.distributed.ReduceOp.SUM:
            x.mul_(2)

    patch.setattr(script, "RANK", rank)
    patch.setattr(script, "WORLD_SIZE", 2)
    patch.setattr(script, "start_process", lambda args: script.seed_all(args.seed))
    patch.setattr(torch.distributed, "all_reduce", all_reduce)
    return sizes


def sized(name, count):
    """Flags of a run of so many processes, each with two environments."""
    size = SMALL[name]
    flags = {key: count * size[key] for key in ("total_timesteps", "num_envs")}
    flags |= {
        key: count * size[key] for key in ("batch_segments", "batch_sequences", "replay_steps") if key in size
    }
    return flags | (dict(epsilon=1.0) if name == "ngu_r2d2" else dict(max_grad_norm=1e9))


@pytest.mark.parametrize("name", ALL)
def test_two_processes_with_the_same_numbers_learn_as_one(name, monkeypatch):
    """Gradients, statistics and counts are averaged; IMPALA's gradients are summed (section 3)."""
    script = ALL[name]
    alone = record(script, **sized(name, 1))
    sizes = as_one_of_two(monkeypatch, script, rank=0)
    both = record(script, **sized(name, 2))
    num_parameters = sum(x.numel() for x in both.losses[0].agent.parameters())
    assert sizes.count(num_parameters) == len(both.losses)  # a gradient that is not summed would be the same
    if name == "impala_vtrace":
        assert both.losses[0].loss == alone.losses[0].loss
        np.testing.assert_allclose(both.steps[0].grad, 2 * alone.steps[0].grad, rtol=1e-5, atol=1e-6)
        return
    for x, y in zip(both.steps, alone.steps, strict=True):
        np.testing.assert_allclose(x.after, y.after, rtol=1e-5, atol=1e-6)
    for (tag, x, step), (other_tag, y, other_step) in zip(both.logged, alone.logged, strict=True):
        assert tag == other_tag and step == 2 * other_step
        times = 2 if tag == "charts/SPS" else 1
        np.testing.assert_allclose(x, times * y, rtol=1e-4, atol=1e-6, err_msg=tag)


def test_what_two_processes_drop_is_averaged(monkeypatch):
    def dropped(count):
        sizes = dict(num_envs=4 * count, batch_segments=5 * count, total_timesteps=200 * count)
        run = record(ppo_async, num_steps=8, num_actors=2, sample_reuse=1.5, max_staleness=0, **sizes)
        return [x for tag, x, _ in run.logged if tag == "staleness/dropped"]

    alone = dropped(1)
    as_one_of_two(monkeypatch, ppo_async, rank=0)
    assert 0 < max(alone) <= 1 and dropped(2) == alone


@pytest.mark.parametrize("name", ALL)
def test_processes_have_their_own_seeds_and_noise(name, monkeypatch):
    runs = []
    for rank in (0, 1):
        as_one_of_two(monkeypatch, ALL[name], rank)
        runs.append(record(ALL[name], **sized(name, 2)))
    seeds = [env.seeds[0] for run in runs for env in run.environments]
    assert seeds == [1, 2, 3, 4]
    actions = [[step[1].tolist() for env in run.environments for step in env.steps] for run in runs]
    assert len(actions[0]) == len(actions[1]) and actions[0] != actions[1]
    assert runs[0].logged and runs[0].saved and not runs[1].logged and not runs[1].saved


def test_processes_of_ngu_share_the_ladder_of_exploration(monkeypatch):
    def epsilons_of(rank):
        seen = []
        as_one_of_two(monkeypatch, ngu_r2d2, rank)
        with monkeypatch.context() as patch:
            step = ngu_r2d2.Actor.step
            patch.setattr(ngu_r2d2.Actor, "step", lambda actor, *x: seen.append(x[0]) or step(actor, *x))
            record(ngu_r2d2, **sized("ngu_r2d2", 2) | dict(epsilon=0.5))
        return seen[0].tolist()

    ladder = ngu_r2d2.epsilons(4, 0.5).tolist()
    assert epsilons_of(0) == ladder[::2] and epsilons_of(1) == ladder[1::2]


@pytest.mark.parametrize("name", ALL)
def test_everything_random_has_the_seed(name):
    """Also one that is negative, as hashes may be, or has more than 32 bits."""
    for seed in (5, -3, 2**40 + 7):
        ALL[name].seed_all(seed)
        drawn = random.random(), np.random.random(), torch.rand(1)
        assert drawn[0] == random.Random(seed).random()
        assert drawn[1] == np.random.RandomState(seed % 2**32).random()
        assert drawn[2] == torch.rand(1, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parameters_travel_around_the_ring(rank, monkeypatch):
    """--sync-every: to the next process, from the one before, and the mean is kept."""
    peers, none = [], SimpleNamespace(wait=lambda: None)

    def exchanged(operations):
        for kind, x, peer in operations:
            peers.append((kind, peer))
            x.add_(6.0) if kind is torch.distributed.irecv else None
        return [none, none]

    monkeypatch.setattr(impala_vtrace, "RANK", rank)
    monkeypatch.setattr(impala_vtrace, "WORLD_SIZE", 3)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *x: x)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", exchanged)
    flat = torch.tensor([2.0, 4.0])
    impala_vtrace.average_with_neighbor(flat)
    assert flat.tolist() == [4, 5]
    assert peers == [(torch.distributed.isend, (rank + 1) % 3), (torch.distributed.irecv, (rank + 2) % 3)]


# === Other ===


@pytest.mark.parametrize("name", ALL)
def test_evaluation_begins_with_the_seed(name, monkeypatch):
    seeds = []

    def first(seed):
        seeds.append(seed)
        raise StopAsyncIteration

    monkeypatch.setattr(ALL[name], "seed_all", first)
    with pytest.raises(StopAsyncIteration):
        ALL[name].evaluate(ALL[name].Args(seed=7, evaluate="nowhere", device="cpu"))
    assert seeds == [7]


@pytest.mark.parametrize("name", OTHERS)
def test_what_emulators_are_told(name, monkeypatch):
    """Raw rewards, 0 to 30 no-ops, resets within steps; the id's own chance to repeat an action."""
    script, told, init = ALL[name], [], AtariVectorEnv.__init__
    monkeypatch.setattr(AtariVectorEnv, "__init__", lambda self, **x: told.append(x) or init(self, **x))
    for env_id, chance in (("PongNoFrameskip-v4", 0.0), ("ALE/Pong-v5", 0.25)):
        args = script.Args(env_id=env_id, num_envs=4, device="cpu")
        envs = script.make_env(*[env_id] * (name == "impala_vtrace"), args, 2)
        assert envs.num_envs == 2 and told[-1]["repeat_action_probability"] == chance
        assert not told[-1]["reward_clipping"] and told[-1]["noop_max"] == 31 and told[-1]["game"] == "pong"
        assert told[-1]["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
        assert envs.single_action_space.n == (18 if name == "ngu_r2d2" else 6)


class Lives:
    """Emulators of three games that say how many lives are left; the last has none before it is over."""

    num_envs, lives = 3, [[3, 5, 1], [2, 5, 1], [2, 4, 0], [1, 4, 0], [3, 3, 1]]

    def reset(self, seed):
        self.t = 0
        return np.zeros((3, 1)), dict(lives=np.array(self.lives[0]))

    def send(self, actions):
        self.t += 1

    def recv(self):
        over, frames = np.array([self.t == 4, False, self.t == 4]), np.full(3, 4 * self.t)
        info = dict(lives=np.array(self.lives[self.t]), frame_number=frames)
        info["episode_frame_number"] = np.where(over, 0, frames)  # the next game has begun
        return np.zeros((3, 1)), np.ones(3), over, over & False, info


@pytest.mark.parametrize("script", [impala_vtrace, ppo_async], ids=lambda script: script.SCRIPT)
def test_a_life_is_an_episode_to_the_last(script):
    group, starts, episodes = script.Group("Game", Lives()), [], []
    group.is_atari = True
    group.reset(seed=1)
    assert group.row["starts"].all() and not group.row["last_rewards"].any()
    for _ in range(4):
        group.send(np.zeros(3, int))
        episodes += group.receive()[1]
        starts.append(group.row["starts"].tolist())
    assert starts == [[True, False, False], [False, True, False], [True, False, False], [True, True, True]]
    assert [episode["charts/episodic_return"] for episode in episodes] == [4, 4]
    assert [episode["charts/episodic_length"] for episode in episodes] == [16, 16]
    assert group.returns.tolist() == [0, 4, 0]


@pytest.mark.parametrize("script", [impala_vtrace, ppo_lstm], ids=lambda script: script.SCRIPT)
def test_an_lstm_runs_over_sixteen_steps_at_most(script):
    starts = torch.zeros(50, 3, dtype=torch.bool)
    starts[[0, 5, 5, 40], [0, 1, 2, 1]] = True
    found = [(part.start, part.stop) for part in script.sequences(starts)]
    assert found == [(0, 5), (5, 21), (21, 37), (37, 40), (40, 50)]
    assert script.sequences(starts[:1]) == script.sequences(starts[1:2]) == [slice(0, 1)]


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete"])
def test_no_checker_slows_the_environments(name):
    tasks = dict.fromkeys(("ppo_continuous", "ppo_multidiscrete"), "Pendulum-v1")
    envs = ALL[name].make_env(ALL[name].Args(env_id=tasks.get(name, "CartPole-v1"), device="cpu"), 1)
    assert "PassiveEnvChecker" not in str(envs.unwrapped.envs[0])


class Picture(gym.Env):
    """Images that change in place, as an environment with a buffer of its own may do."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape, dtype):
        low = np.arange(np.prod(shape)).reshape(shape) % 3
        self.observation_space = gym.spaces.Box(low.astype(dtype), (low + 7).astype(dtype), dtype=dtype)
        self.obs = self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        self.obs += 1
        return self.obs, {}


class InDictionary(gym.Wrapper):
    """Beside a direction, as MiniGrid's images are."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Dict(
            image=env.observation_space, direction=gym.spaces.Discrete(4)
        )

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return dict(image=obs, direction=0), info


@pytest.mark.parametrize("script", [impala_vtrace, ppo_async, ngu_r2d2], ids=lambda script: script.SCRIPT)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_have_their_channels_first(script, dtype):
    """And keep their type and limits; each is a copy. Small ones are vectors, but for ngu_r2d2.py."""
    for shape in ((36, 48, 3), (7, 5, 3)):
        env = Picture(shape, dtype)
        wrapped, space = script.as_array(env), env.observation_space
        is_flat = shape[0] < 36 and script is not ngu_r2d2
        moved = [x.reshape(-1) if is_flat else np.moveaxis(x, 2, 0) for x in (space.low, space.high)]
        assert wrapped.observation_space.dtype == dtype
        assert np.array_equal(wrapped.observation_space.low, moved[0])
        assert np.array_equal(wrapped.observation_space.high, moved[1])
        obs, _ = wrapped.reset()
        expected = env.obs.reshape(-1) if is_flat else np.moveaxis(env.obs, 2, 0)
        assert obs.dtype == dtype and np.array_equal(obs, expected)
        if not is_flat:
            assert not np.shares_memory(obs, env.obs)
        wrapped = script.as_array(InDictionary(env))
        assert wrapped.observation_space.shape == obs.shape
        assert np.array_equal(wrapped.reset()[0], obs + 1)


@pytest.mark.parametrize("script", [impala_vtrace, ppo_async, ngu_r2d2], ids=lambda script: script.SCRIPT)
@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84), (36, 36), (3, 36, 36), (4, 40, 40, 3)])
def test_images_of_another_order_are_refused(script, shape, capsys):
    """They would become vectors of bytes, or grids. Smaller shapes pass, matrices, and many channels."""
    for dtype in (np.uint8, np.float32) if len(shape) == 3 else (np.uint8,):
        with pytest.raises(SystemExit, match="2"):
            script.as_array(Picture(shape, dtype))
        assert f"{shape} is no image" in capsys.readouterr().err
    for passed in ((4, 35, 84), (3, 35, 35), (36, 36, 4), (84, 36, 50)):
        script.as_array(Picture(passed, np.uint8))
    for passed in ((64, 40), (4, 40, 40, 3)):
        script.as_array(Picture(passed, np.float32))


class Typed(Traced):
    """Observations of another type than float32."""

    def observe(self):
        return super().observe().astype(self.observation_space.dtype)


class TypedBox(Typed, TracedBox):
    pass


class TypedMulti(Typed, TracedMulti):
    pass


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
@pytest.mark.parametrize("name", [name for name in ALL if name != "ppo_atari"])  # which takes games alone
def test_observations_of_any_type(name, dtype, monkeypatch):
    kind = dict(ppo_continuous=TypedBox, ppo_multidiscrete=TypedMulti).get(name, Typed)
    monkeypatch.setattr(kind, "observation_space", gym.spaces.Box(-10, 10, (3,), dtype))
    monkeypatch.setitem(gym.registry, "Typed-v0", gym.envs.registration.EnvSpec("Typed-v0", kind))
    flags = dict(normalize=False) if name == "ppo_multidiscrete" else {}
    args = small_args(ALL[name], env_id="Typed-v0", bootstrap_truncated=True, eval_episodes=2, **flags)
    run_dir = ALL[name].train(args)
    assert len(ALL[name].evaluate(replace(args, evaluate=str(run_dir)))) >= 2
