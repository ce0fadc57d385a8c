"""--evaluate against the policy that the numbers in a checkpoint are, and Atari scores against ale-py's own.

All is seen from outside: what tasks and emulators get and give, what is printed and logged. Each action's
distribution is computed apart (reference/policies.py), and plain emulators play along (helpers/emulators.py).
"""

import runpy
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import emulators
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, scalars, small_args
from reference import policies
from scipy.special import softmax
from scipy.stats import chi2

import impala_vtrace
import ngu_r2d2
import ppo_async
import ppo_atari
import ppo_lstm

ROOT = Path(__file__).parent.parent
ALL = SCRIPTS | OTHERS


class Recorded(gym.Env):
    """Random observations, rewards far beyond [-1, 1], episodes of 1 to 6 steps; all steps are kept."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    seeds, steps = [], []

    def __init__(self, action_space, mask_shape=None):
        self.action_space, self.mask_shape = action_space, mask_shape

    def observe(self):
        self.obs = (1 + 2 * self.np_random.standard_t(2, 3)).astype(np.float32)  # some are far away
        self.mask = None
        if self.mask_shape:
            self.mask = self.np_random.random(self.mask_shape) < 0.6
            self.mask[..., [0, 3]] = True  # a choice of each component is valid
        return self.obs, {} if self.mask is None else {"action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            Recorded.seeds.append(seed)
        self.t, self.starts = 0, True
        return self.observe()

    def step(self, action):
        self.t += 1
        reward = 0.25 * float(self.np_random.integers(-20, 40))
        terminated, truncated = self.np_random.random() < 0.15, self.t == 6
        step = dict(obs=self.obs, masks=self.mask, starts=self.starts, actions=np.array(action))
        Recorded.steps.append(step | dict(rewards=reward, ends=terminated or truncated, cut=truncated))
        self.starts = False
        obs, info = self.observe()
        return obs, reward, terminated, truncated, info


# one component is so narrow that most of its actions are clipped; both are binned differently
BOX = gym.spaces.Box(np.float32([-8, -0.5]), np.float32([8, 0.25]))
MULTI = gym.spaces.MultiDiscrete([3, 4])
SPACES = {"discrete": (gym.spaces.Discrete(3),), "box": (BOX,), "multi": (MULTI,)}
SPACES |= {"masked": (MULTI, (7,)), "masked-by-first": (MULTI, (3, 5))}
for name, (space, *mask_shape) in SPACES.items():
    kwargs = dict(action_space=space, mask_shape=mask_shape[0] if mask_shape else None)
    gym.register(f"Recorded-{name}-v0", Recorded, kwargs=kwargs, disable_env_checker=True)


def evaluate(script, run_dir, capsys, *flags):
    """What the command line prints."""
    capsys.readouterr()
    argv, sys.argv = sys.argv, [f"{script.SCRIPT}.py", "--evaluate", str(run_dir), *map(str, flags)]
    try:
        runpy.run_path(str(ROOT / f"{script.SCRIPT}.py"), run_name="__main__")
    finally:
        sys.argv = argv
    return capsys.readouterr().out


def printed(returns):
    return f"return {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} episodes\n"


def sharpen(run_dir, logits=None):
    """Gives an agent weights by which its actions depend strongly on all it sees; its numbers, in float64.

    Statistics of observations differ from the task's and are of few steps, so that they would soon move, and
    many observations are clipped.
    logits: a function of such numbers; what it finds is spread evenly, by the last layer.
    """
    path, rng = run_dir / "checkpoint.pt", np.random.default_rng(0)
    state = torch.load(path)
    for name, x in state["agent"].items():
        if name == "_extra_state" and x.numel():
            mean, var = rng.normal(size=x.shape[1]), rng.uniform(0.05, 0.5, x.shape[1])
            x[:] = torch.as_tensor(np.stack((mean, var, np.full_like(mean, 10))))
        elif x.ndim == 2:
            # the last layer has few outputs; an encoder with ReLUs would drown what else an LSTM sees
            gain = 6 if len(x) < 20 else dict(lstm=4, encoder=0.5).get(name.split(".")[0], 1.5)
            x[:] = torch.as_tensor(rng.normal(size=x.shape) * gain / x.shape[1] ** 0.5)
            if name == "lstm.weight_ih_l0":
                x[:, -8:] *= 4  # what is seen beside features: actions, rewards and policies
        elif x.ndim == 1:
            x[:] = torch.as_tensor(0.3 * rng.normal(size=x.shape))
    for name, x in state.get("curiosity", {}).items():
        if name.endswith(("mean", "var", "count", "distances")):
            x *= torch.as_tensor(rng.uniform(0.1, 1, x.shape))
    if logits:
        found, head = logits(numbers(state["agent"])), "actor" if "curiosity" not in state else "advantage.2"
        weight, bias = (state["agent"][f"{head}.{part}"] for part in ("weight", "bias"))
        mean, scale = torch.as_tensor(found.mean(0)), torch.as_tensor(1.5 / found.std(0))
        weight *= scale[:, None]
        bias[:] = (bias - mean) * scale
    torch.save(state, path)
    return numbers(state["agent"]), numbers(state.get("curiosity", {}))


def numbers(state):
    return {name: x.double().numpy() for name, x in state.items()}


def assert_calibrated(probabilities, taken):
    """Of all actions that had a probability (..., n) of about p, a share p was taken (...)."""
    assert 0.35 < probabilities.max(-1).mean() < 0.98, "neither certain nor uniform, or this would say little"
    hits = np.arange(probabilities.shape[-1]) == taken[..., None]
    assert not (hits & (probabilities == 0)).any()
    bins, surprise, degrees = (probabilities * 10).astype(int), 0.0, 0
    for k in range(11):
        p, hit = probabilities[bins == k], hits[bins == k]
        variance = (p * (1 - p)).sum()
        if variance > 1:
            surprise += (hit.sum() - p.sum()) ** 2 / variance
            degrees += 1
    assert degrees and chi2.sf(surprise, degrees) > 1e-4, surprise


# script, task, flags
CASES = [("ppo", "discrete", {}), ("ppo_shared", "discrete", {}), ("ppo_async", "discrete", {})]
CASES += [("ppo_lstm", "discrete", {}), ("impala_vtrace", "discrete", dict(lstm=True))]
CASES += [("ngu_r2d2", "discrete", dict(num_policies=3)), ("ppo_continuous", "box", {})]
CASES += [("ppo_multidiscrete", "multi", {}), ("ppo_multidiscrete", "box", dict(num_bins=4))]
CASES += [("ppo_multidiscrete", name, dict(mask_actions=True)) for name in ("masked", "masked-by-first")]
CASES += [("ppo_multidiscrete", "masked", dict(mask_actions=False))]


def distribution(name, args, task, weights, curiosity, stream):
    """Probabilities (..., n) of the actions in a stream, and which were taken (...)."""
    actions = stream["actions"]
    if name == "ppo_continuous":  # by intervals, the outer ones of clipped actions
        edges = np.linspace(BOX.low, BOX.high, 17, axis=1) * (1 - 1e-6)
        return policies.gaussian(weights, stream, edges), (actions[..., None] > edges).sum(-1)
    if name == "ppo_multidiscrete":
        nvec, masks = MULTI.nvec, stream["masks"]
        if task == "box":
            nvec, bins = [args.num_bins] * 2, np.linspace(BOX.low, BOX.high, args.num_bins, axis=1)
            actions = np.abs(actions[..., None] - bins).argmin(-1)
            np.testing.assert_allclose(stream["actions"], bins[range(2), actions], atol=1e-6)
        if masks.ndim == 3:  # the first component's, and the others' by what was chosen
            masks = np.concatenate((masks[:, :, 0], masks[np.arange(len(masks)), actions[:, 0], 1:]), -1)
        if masks.dtype == object or not args.mask_actions:  # none
            masks = np.ones((len(actions), sum(nvec)), bool)
        return policies.multi(weights, stream | dict(masks=masks), nvec, args.normalize), actions
    if name == "ngu_r2d2":
        advantages = policies.advantages(weights, stream, policies.intrinsic_rewards(curiosity, stream, args))
        return policies.epsilon_greedy(advantages, args.eval_epsilon), actions
    logits = dict(ppo_shared=policies.shared, ppo_lstm=policies.recurrent, impala_vtrace=policies.impala)
    return softmax(logits.get(name, policies.separate)(weights, stream), -1), actions


def test_docs_name_the_exploration():
    text = (ROOT / "docs/ngu.md").read_text(encoding="utf-8")
    assert f"`--eval-epsilon` ({ngu_r2d2.Args().eval_epsilon})" in text


@pytest.mark.parametrize(
    "name, task, flags",
    CASES,
    ids=[f"{name}-{task}{'-ignored' * (not flags.get('mask_actions', True))}" for name, task, flags in CASES],
)
def test_it_acts_by_the_checkpoint(name, task, flags, capsys, monkeypatch):
    script, episodes = ALL[name], 300
    monkeypatch.setattr(Recorded, "seeds", seeds := [])
    monkeypatch.setattr(Recorded, "steps", steps := [])
    args = small_args(script, env_id=f"Recorded-{task}-v0", **flags)
    run_dir = script.train(args)
    script.train(replace(args, resume=str(run_dir), total_timesteps=2 * args.total_timesteps))
    weights, curiosity = sharpen(run_dir)
    trained_with = set(seeds)
    seeds.clear()
    steps.clear()
    more = ["--eval-epsilon", 0.05] if name == "ngu_r2d2" else []
    args = replace(args, eval_epsilon=0.05) if name == "ngu_r2d2" else args
    out = evaluate(script, run_dir, capsys, "--eval-episodes", episodes, *more)

    assert len(seeds) == 1 and not trained_with & set(seeds)
    stream = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    ends = stream["ends"].nonzero()[0] + 1
    assert len(ends) == episodes and ends[-1] == len(steps)
    assert out == printed([part.sum() for part in np.split(stream["rewards"], ends)[:-1]])
    probabilities, taken = distribution(name, args, task, weights, curiosity, stream)
    starts, after_cut = stream["starts"], np.array([False, *stream["cut"][:-1]])
    for where in (~starts, starts & ~after_cut, starts & after_cut):
        assert_calibrated(probabilities[where], taken[where])


# === Atari: scores, lengths and lives, against plain emulators ===

# Qbert: four lives, points by 25, and random play ends soon. Training cuts games that last longer than most.
kwargs = gym.spec("QbertNoFrameskip-v4").kwargs | dict(max_num_frames_per_episode=1240)
gym.register("CutQbertNoFrameskip-v4", "ale_py.env:AtariEnv", kwargs=kwargs)

# the script's own actions at the beginning of a game and of a next life: FIRE, the action after it, a no-op
WRAPPERS = dict(first=[1, 2], next_life=[0, 1, 2])
PLAYERS = {ppo_atari: WRAPPERS, ppo_lstm: WRAPPERS}
PLAYERS |= {script: dict(first=[], next_life=[]) for script in (ppo_async, impala_vtrace, ngu_r2d2)}


@pytest.fixture(params=PLAYERS, ids=lambda script: script.SCRIPT)
def player(request):
    return request.param


def small_atari_args(script, steps, **flags):
    num_envs = 2 if script in (ppo_atari, ppo_lstm) else 4  # in two groups, or not
    args = dict(env_id="CutQbertNoFrameskip-v4", num_envs=num_envs, num_steps=steps)
    args |= dict(total_timesteps=num_envs * steps)
    args |= dict(eval_episodes=3, device="cpu") | flags
    if script is ngu_r2d2:
        return script.Args(**args, beta=0, replay_steps=4000, learning_starts=4000, hidden_size=64)
    if script is impala_vtrace:
        args |= dict(lstm=True)
    else:
        args |= dict(num_minibatches=1)
    if script in (impala_vtrace, ppo_async):
        return script.Args(**args, sync=True, batch_segments=4)
    return script.Args(**args, update_epochs=1)


def play(script, tapes, env_id):
    own = PLAYERS[script]
    noops = {game.frames - (not own["first"]) for tape in tapes for game in tape if game.actions}
    assert len(noops) >= 3 and noops <= set(range(1 if own["first"] else 0, 31))
    played = [tape for tape in tapes if any(game.actions for game in tape)]
    # one is never played: it says where a game without no-ops begins
    assert len(tapes) - len(played) == bool(own["first"])
    return [emulators.play(tape, env_id, all_actions=script is ngu_r2d2, **own) for tape in played]


def test_training_on_atari(player, monkeypatch):
    """What is logged of games, what rewards the algorithm sees, and which steps end an episode."""
    tapes, seen = emulators.record(monkeypatch), []
    for name in ("compute_gae", "vtrace"):
        watch(monkeypatch, player, name, seen)
    args = small_atari_args(player, 640)
    monkeypatch.setattr(player, "Agent", coarse(player.Agent))
    run_dir = player.train(args)
    played = play(player, tapes, args.env_id)
    logged = [[x for _, x in scalars(run_dir, f"charts/episodic_{name}")] for name in ("return", "length")]
    finished = [game for one in played for game in one.finished]
    assert sorted(zip(*logged, strict=True)) == sorted(finished)
    assert all(len(one.finished) >= 2 for one in played) and max(score for score, _ in finished) >= 25
    assert len({frames // 4 for _, frames in finished}) >= 3  # they do not end at once
    lost, over = (np.array([getattr(one, name) for one in played]).T for name in ("lost", "over"))
    assert lost.sum() >= 10
    for rewards, ends in seen:
        np.testing.assert_array_equal(rewards, np.sign([one.rewards for one in played]).T)
        np.testing.assert_array_equal(ends, lost | over)
    assert len(seen) == (player is not ngu_r2d2)


def coarse(agent):
    """An agent that sees 7 x 7 pixels of a frame, which is quicker."""

    class Coarse(agent):
        def __init__(self, envs, *args):
            super().__init__(envs, *args)
            name = "encoder" if hasattr(self, "encoder") else "network"
            *_, linear, relu = getattr(self, name)
            size = 49 * envs.single_observation_space.shape[0]
            layers = torch.nn.AvgPool2d(12), torch.nn.Flatten(), torch.nn.Linear(size, linear.out_features)
            setattr(self, name, torch.nn.Sequential(*layers, relu))

    return Coarse


def watch(monkeypatch, script, name, seen):
    """Keeps rewards and ends (T, N) of a function of the algorithm, where the script has it."""
    original = getattr(script, name, None)

    def spy(*args):
        if name == "compute_gae":
            rewards, _, dones, *_ = args
            seen.append((rewards.copy(), dones.astype(bool)))
        else:
            _, rewards, discounts, *_ = args
            seen.append((rewards.numpy().copy(), discounts.numpy() == 0))
        return original(*args)

    if original:
        monkeypatch.setattr(script, name, spy)


def test_evaluation_on_atari(player, monkeypatch, capsys):
    """Whole games, raw scores, and actions by what plain emulators show."""
    args, is_ngu = small_atari_args(player, 8, env_id="QbertNoFrameskip-v4"), player is ngu_r2d2
    run_dir = player.train(args)
    actions = np.random.default_rng(0).integers(6, size=150).tolist()
    sample = emulators.play([emulators.Game(20, actions)], args.env_id, is_ngu, first=[], next_life=[])
    weights, _ = sharpen(run_dir, lambda weights: atari_logits(player, weights, sample))
    tapes = emulators.record(monkeypatch)
    out = evaluate(player, run_dir, capsys, *(["--eval-epsilon", 0.5] if is_ngu else []))
    (played,) = play(player, tapes, args.env_id)
    assert len(played.finished) == 3 and played.over[-1] and sum(played.lost) == 9
    assert out == printed([score for score, _ in played.finished])
    logits = atari_logits(player, weights, played)
    p = policies.epsilon_greedy(logits, 0.5) if is_ngu else softmax(logits, -1)
    assert_calibrated(p, np.array(played.actions))


def test_evaluation_is_in_the_precision_of_training(player, monkeypatch, capsys):
    """A run with --amp is evaluated in bfloat16, too."""
    short = dict(env_id="BreakoutNoFrameskip-v4", env_kwargs='{"max_num_frames_per_episode": 200}')
    run_dir = player.train(small_atari_args(player, 8, amp=True, **short))
    enabled, autocast = [], torch.autocast

    def spy(*args, **flags):
        context = autocast(*args, **flags)
        enabled.append(context._enabled)
        return context

    monkeypatch.setattr(torch, "autocast", spy)
    evaluate(player, run_dir, capsys)
    assert {*enabled} == {True}


def atari_logits(script, weights, played):
    """By what plain emulators show. LSTMs begin anew with each life; Never Give Up's with each game."""
    new_game = np.array([True, *played.over[:-1]])
    new_life = new_game | [False, *played.lost[:-1]]
    stream = dict(actions=np.array(played.actions), rewards=np.array(played.rewards, float), starts=new_life)
    if script in (ppo_lstm, ngu_r2d2):
        stream["obs"] = np.stack(played.frames)[:, None]
    elif script is ppo_atari:
        stream["obs"] = stacks(played.frames, new_life, is_filled=True)
    else:
        stream["obs"] = stacks(played.frames, new_game, is_filled=False)
    if script is ngu_r2d2:
        return policies.advantages(weights, stream | dict(starts=new_game), np.zeros(len(new_game)))
    logits = {ppo_lstm: policies.recurrent, impala_vtrace: policies.impala}
    return logits.get(script, policies.shared)(weights, stream)


def stacks(frames, begins, is_filled):
    """The last four frames (T, 4, 84, 84); where one begins, of copies or behind zeros."""
    result, stack = [], None
    for frame, is_new in zip(frames, begins, strict=True):
        if is_new:
            stack = [frame if is_filled else np.zeros_like(frame)] * 4
        stack = [*stack[1:], frame]
        result.append(np.stack(stack))
    return np.stack(result)


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("script", [ppo_atari, ppo_lstm], ids=lambda script: script.SCRIPT)
def test_bfloat16_is_that_of_training(script, amp, monkeypatch):
    """The first convolution of the agent that is evaluated; the others get --amp with their arguments."""
    args = small_atari_args(script, 8, amp=amp, evaluate="run")
    Path("run").mkdir()
    script.save_checkpoint(Path("run"), args, dict(agent=script.Agent(script.make_env(args, 1))), {})
    seen = set()

    def stop(self, inputs, output):
        seen.add(output.dtype)
        raise InterruptedError

    class Spied(script.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            [x for x in self.modules() if isinstance(x, torch.nn.Conv2d)][0].register_forward_hook(stop)

    monkeypatch.setattr(script, "Agent", Spied)
    with pytest.raises(InterruptedError):
        script.evaluate(args)
    assert seen == {torch.bfloat16 if amp else torch.float32}


# === Videos ===

gym.register("Few/Cart-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=9)
kwargs = gym.spec("QbertNoFrameskip-v4").kwargs | dict(max_num_frames_per_episode=200)  # 40 to 50 steps
gym.register("Short/QbertNoFrameskip-v4", "ale_py.env:AtariEnv", kwargs=kwargs)


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"ppo_atari"}))
def test_which_episodes_are_filmed(name, monkeypatch):
    """As many as are evaluated, of an environment that renders; none without a folder."""
    script, filmed = ALL[name], []

    def film(env, folder, episode_trigger, **kwargs):
        filmed.append((env.render_mode, folder, [episode_trigger(n) for n in range(5)], kwargs))
        return env

    monkeypatch.setattr(gym.wrappers, "RecordVideo", film)
    is_box = name in ("ppo_continuous", "ppo_multidiscrete")
    args = small_args(script, env_id="Pendulum-v1" if is_box else "gymnasium:Few/Cart-v0", eval_episodes=3)
    task = [args.env_id] if script is impala_vtrace else []
    envs = script.make_env(*task, args, 2)
    assert not filmed and envs.unwrapped.envs[0].render_mode is None
    args.env_kwargs = '{"render_mode": "human"}'  # no images
    script.make_env(*task, args, 1, Path("run/videos"))
    prefix = dict(name_prefix="gymnasium-Few-Cart-v0") if script is impala_vtrace else {}
    assert filmed == [("rgb_array", "run/videos", [True] * 3 + [False] * 2, prefix)]


@pytest.mark.parametrize("seed", [1, 9])  # with 9, the first game is reset again, as it drew no no-ops
def test_each_game_is_filmed_from_its_begin_to_its_end(player, seed, monkeypatch):
    """The twin in colour stays in step; a file for each game has a frame for each step, and none is lost."""
    clips, last, filmed = [], {}, []

    class Clip:
        def __init__(self, frames, fps=None):
            self.frames, self.fps = frames, fps

        def write_videofile(self, path, logger="bar"):
            Path(path).touch()
            clips.append((str(path), self.frames))
            assert (self.fps, logger) == (15, None)

    moviepy = ModuleType("moviepy")
    moviepy.__spec__, moviepy.ImageSequenceClip = ModuleSpec("moviepy", None), Clip
    monkeypatch.setitem(sys.modules, "moviepy", moviepy)
    Path("run").mkdir()
    args, folder = small_atari_args(player, 8, env_id="Short/QbertNoFrameskip-v4"), Path("run/videos")
    if player in (ppo_async, impala_vtrace):
        inputs = [args.env_id, args] if player is impala_vtrace else [args]
        group = player.Group(args.env_id, player.make_env(*inputs, 1, folder), folder)
        envs, game, reset, step = group.envs, group.envs, group.reset, group.send
    else:
        group = envs = player.make_env(args, 1, folder)
        game, reset, step = envs.games[0] if hasattr(envs, "games") else envs, envs.reset, envs.step
    recv, film = game.recv, envs.camera.step

    def received():
        result = recv()
        last["game"] = result[-1]
        return result

    def film_step(actions):
        result = film(actions)
        last["twin"] = result[-1]
        filmed.append(result[0][0, 0].copy())
        return result

    game.recv, envs.camera.step, games = received, film_step, 0
    reset(seed=seed)
    for action in np.random.default_rng(0).integers(6, size=(170, 1)):
        result = step(action)
        games += bool(group.receive()[1]) if result is None else "final_info" in result[-1]
        last |= dict(game=result[-1]) if player is ngu_r2d2 else {}
    for name in ("lives", "episode_frame_number", "frame_number"):
        np.testing.assert_array_equal(last["game"][name], last["twin"][name])
    prefix = "Short-QbertNoFrameskip-v4-" if player in (ppo_async, impala_vtrace) else ""
    assert games >= 3 and [path for path, _ in clips] == [f"run/videos/{prefix}{n}.mp4" for n in range(games)]
    np.testing.assert_array_equal([x for _, frames in clips for x in frames] + group.video, filmed)
    assert filmed[0].shape == (210, 160, 3) and all(40 <= len(frames) <= 60 for _, frames in clips)
