"""AtariEnvs against the wrappers of openai/baselines, written here in plainest form: details 14 to 20."""

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
from conftest import games

import ppo_atari
import ppo_lstm

gym.register_envs(ale_py)


class PlainAtari:
    """One game through no-ops, frame skip, episodic life, FIRE, grey 84 x 84, reward signs and a stack."""

    def __init__(self, env_id: str):
        self.env = gym.make(env_id, obs_type="grayscale").unwrapped
        self.fire = "FIRE" in self.env.get_action_meanings()
        self.noops, self.lives, self.real_done, self.score, self.finished = [], 0, True, 0, []

    def raw_step(self, action):
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.score += reward
        if terminated or truncated:
            self.finished.append((self.score, info["episode_frame_number"]))
            self.score = 0
        return frame, reward, terminated or truncated

    def skip_step(self, action):  # MaxAndSkip; its two slots keep old pixels where an episode ends early
        total = 0.0
        for k in range(4):
            frame, reward, done = self.raw_step(action)
            if k >= 2:
                self.slots[k - 2] = frame
            total += reward
            if done:
                break
        return np.max(self.slots, axis=0), total, done

    def life_step(self, action):  # EpisodicLife
        frame, reward, done = self.skip_step(action)
        self.real_done = done
        lives = self.env.ale.lives()
        if 0 < lives < self.lives:
            done = True
        self.lives = lives
        return frame, reward, done

    def life_reset(self):
        if not self.real_done:
            frame, _, self.real_done = self.skip_step(0)
        if self.real_done:
            frame, _ = self.env.reset()
            self.slots = [np.zeros_like(frame), np.zeros_like(frame)]
            while not (noops := self.noops.pop(0)):
                pass  # none were drawn, and it was drawn again
            for _ in range(noops):
                frame, _, _ = self.raw_step(0)
            self.real_done = False
        self.lives = self.env.ale.lives()
        return frame

    def fire_reset(self):  # FireReset
        frame = self.life_reset()
        for action in (1, 2) if self.fire else ():
            frame, _, done = self.life_step(action)
            if done:
                frame = self.life_reset()
        return frame

    def warp(self, frame):
        return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)

    def reset(self):
        self.stack = np.stack([self.warp(self.fire_reset())] * 4)
        return self.stack

    def step(self, action):
        frame, reward, done = self.life_step(action)
        self.stack = np.concatenate((self.stack[1:], self.warp(frame)[None]))
        real_done = self.real_done
        return (self.reset() if done else self.stack), np.sign(reward), done, real_done


def watch_noops(envs) -> list[list[int]]:
    """No-ops of each new game of each environment, as they are drawn."""
    noops = [[] for _ in envs.games]
    for game, drawn in zip(envs.games, noops, strict=True):

        def reset(original=game.reset, drawn=drawn, **kwargs):
            obs, info = original(**kwargs)
            drawn.append(int(info["episode_frame_number"][0]))
            return obs, info

        def recv(original=game.recv, drawn=drawn, over=[False]):  # noqa: B006  whether the last game is over
            step = obs, rewards, terminated, truncated, info = original()
            if over[0]:  # the emulator has begun a new game instead of a step
                drawn.append(int(info["episode_frame_number"][0]))
            over[0] = terminated[0] or truncated[0]
            return step

        game.reset, game.recv = reset, recv
    return noops


@pytest.mark.parametrize("game", ["Breakout", "Pong", "BeamRider", "Freeway", "Qbert"])
def test_frame_by_frame_against_plain_wrappers(game):
    num_envs, steps = 2, {"Pong": 1400, "Freeway": 2200}.get(game, 1500)
    envs = games(f"{game}NoFrameskip-v4", num_envs)
    noops = watch_noops(envs)
    plain = [PlainAtari(f"{game}NoFrameskip-v4") for _ in range(num_envs)]
    for env, drawn in zip(plain, noops, strict=True):
        env.noops = drawn
    assert plain[0].fire == (game != "Freeway")
    obs, _ = envs.reset(seed=1)
    for i, env in enumerate(plain):
        np.testing.assert_array_equal(obs[i], env.reset())
    rng = np.random.default_rng(0)
    dones, scores = 0, [[] for _ in plain]
    for _ in range(steps):
        actions = rng.integers(envs.single_action_space.n, size=num_envs)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, env in enumerate(plain):
            plain_obs, reward, done, real_done = env.step(actions[i])
            np.testing.assert_array_equal(obs[i], plain_obs)
            assert rewards[i] == reward and (terminated[i] or truncated[i]) == done
            dones += done
        if "final_info" in infos:
            episode, ended = infos["final_info"]["episode"], infos["final_info"]["_episode"]
            for i in np.flatnonzero(ended):
                scores[i].append((episode["r"][i], episode["l"][i]))
    assert scores == [env.finished for env in plain]
    assert dones and any(scores)


def test_frames_that_six_games_play_by_themselves():
    """They count in charts/episodic_length, as docs/atari.md says."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    played = {}
    for env_id in [x for x in gym.registry if x.endswith("NoFrameskip-v4") and "-ram" not in x]:
        env = gym.make(env_id)
        env.reset()
        if frames := env.unwrapped.ale.getEpisodeFrameNumber():
            played[env_id.removesuffix("NoFrameskip-v4")] = frames
        env.close()
    assert played.pop("NameThisGame") == 134
    assert played == {"AirRaid": 8, "Berzerk": 20, "DoubleDunk": 13, "Pooyan": 1, "YarsRevenge": 7}


class Scripted:
    """An emulator that shows how many frames it has shown; a step does what is said, or nothing.

    As ale-py's, it begins the next game with the action after an end, whatever that is.
    """

    def __init__(self, *events):
        self.events, self.shown, self.lives, self.over, self.actions = list(events), 0, 5, False, []

    def show(self):
        self.shown += 1
        return np.full((1, 1, 84, 84), self.shown, np.uint8)

    def info(self):
        return dict(lives=[self.lives], episode_frame_number=[7])

    def reset(self, seed):
        self.seed = seed
        return self.show(), self.info()

    def send(self, action):
        self.actions.append(int(action[0]))

    def recv(self):
        event = "begin" if self.over else self.events.pop(0) if self.events else ""
        self.over = event in ("over", "cut")
        self.lives = 5 if event == "begin" else self.lives - (event == "life")
        return self.show(), np.zeros(1), np.array([event == "over"]), np.array([event == "cut"]), self.info()


def scripted(script, *events):
    envs = script.make_env(script.Args(env_id="BreakoutNoFrameskip-v4", device="cpu"), len(events))
    envs.games = [Scripted(*some) for some in events]
    envs.reset(seed=5)
    return envs


@pytest.fixture(params=[ppo_atari, ppo_lstm], ids=lambda script: script.SCRIPT)
def player(request):
    return request.param


def test_each_game_has_a_seed_of_its_own(player):
    """From the vector's seed on, so that no game has one of another process, run or evaluation."""
    assert [game.seed for game in scripted(player, [], [], []).games] == [5, 6, 7]


def test_a_game_that_ends_before_the_agent_acts(player):
    """With the no-op that begins the next life, or with FIRE: games begin until one is ready to be played."""
    lost = ["", "", "life"]  # in the agent's first step, after FIRE and the action behind it
    envs = scripted(player, [*lost, "over"], [*lost], [*lost, "", "over"], [*lost, "", "life"])
    obs, _, terminated, _, info = envs.step(np.array([3, 3, 3, 3]))
    assert terminated.all() and info["final_info"]["_episode"].tolist() == [True, False, True, False]
    assert [game.actions for game in envs.games] == [
        [1, 2, 3, 0, 0, 1, 2],  # the second no-op begins the next game
        [1, 2, 3, 0, 1, 2],
        [1, 2, 3, 0, 1, 0, 2],  # the no-op after FIRE begins the next game
        [1, 2, 3, 0, 1, 0, 2],  # or the next life
    ]
    assert (obs == np.reshape([game.shown for game in envs.games], (4, 1, 1, 1))).all()
    frames = info["final_info"]["episode"]["l"]  # as the emulators count them
    assert frames[[0, 2]].tolist() == [7, 7] and obs.shape[1:] == envs.single_observation_space.shape


def test_the_last_frames_before_a_time_limit_stay_as_they_were(player):
    """Frames 1, 2 and 3 are of the reset and of FIRE; a new game begins with frame 5, FIRE, and frame 7."""
    envs = scripted(player, ["", "", "cut"], [])
    obs, _, terminated, truncated, info = envs.step(np.array([3, 3]))
    last, frames = info["final_obs"][0], envs.single_observation_space.shape[0]
    assert truncated.tolist() == [True, False] and not terminated.any()
    assert last[:, 0, 0].tolist() == [3, 3, 3, 4][-frames:] and (obs[0] == 7).all()
    envs.step(np.array([3, 3]))
    assert last[:, 0, 0].tolist() == [3, 3, 3, 4][-frames:]


def test_a_game_whose_last_life_is_lost_before_it_is_over(player):
    """As Qbert, which shows no lives for some frames: the episode ends with the game, as in baselines."""
    envs = scripted(player, ["", "", *["life", "", "", ""] * 4, "life", "", "over"])
    ends = [envs.step(np.array([3]))[2][0] for _ in range(7)]
    assert ends == [True, True, True, True, False, False, True]


def test_an_action_that_is_none(player):
    envs = scripted(player, [])
    for action in (-1, envs.single_action_space.n):
        with pytest.raises(ValueError, match="not all of"):
            envs.step(np.array([action]))
