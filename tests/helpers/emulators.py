"""Plain emulators beside a script: they play what it sends to ale-py's vector environments.

A plain emulator begins a game with as many no-ops as the other had drawn. Everything else is its own: score,
lives, frames, pixels, and when a game is over.
"""

from dataclasses import dataclass, field

import ale_py
import cv2
import gymnasium as gym
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv

gym.register_envs(ale_py)
NOOP, FIRE = 0, 1


@dataclass
class Game:
    """What a script did in a game, the actions of a wrapper included."""

    frames: int  # of the emulator before the first action
    actions: list[int] = field(default_factory=list)


def record(monkeypatch) -> list[list[Game]]:
    """The games of each emulator from now on, in the order in which emulators are first reset."""
    games, places, over = [], {}, {}
    originals = {name: getattr(AtariVectorEnv, name) for name in ("reset", "send", "recv")}

    def begin(envs, which, info):
        for n in which:
            games[places[envs] + n].append(Game(int(info["episode_frame_number"][n])))

    def reset(envs, **kwargs):
        if envs not in places:
            places[envs] = len(games)
            games.extend([] for _ in range(envs.num_envs))
        obs, info = originals["reset"](envs, **kwargs)
        begin(envs, range(envs.num_envs), info)
        over[envs] = np.zeros(envs.num_envs, bool)
        return obs, info

    def send(envs, actions):
        for n in (~over[envs]).nonzero()[0]:  # after a game's end, an action only begins the next one
            games[places[envs] + n][-1].actions.append(int(actions[n]))
        originals["send"](envs, actions)

    def recv(envs):
        step = _, _, terminated, truncated, info = originals["recv"](envs)
        if envs.autoreset_mode == gym.vector.AutoresetMode.SAME_STEP:
            begin(envs, (terminated | truncated).nonzero()[0], info)
        else:
            begin(envs, over[envs].nonzero()[0], info)
            over[envs] = terminated | truncated
        return step

    def step(envs, actions):
        envs.send(actions)
        return envs.recv()

    for method in (reset, send, recv, step):
        monkeypatch.setattr(AtariVectorEnv, method.__name__, method)
    return games


@dataclass
class Played:
    """What a plain emulator says about the games of one emulator of a script, step by step of the agent."""

    actions: list[int] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)  # seen before the action, (84, 84)
    rewards: list[float] = field(default_factory=list)  # raw
    lost: list[bool] = field(default_factory=list)  # a life, and the game goes on
    over: list[bool] = field(default_factory=list)
    finished: list[tuple[float, int]] = field(default_factory=list)  # score and frames of games that are over


def play(games: list[Game], env_id: str, all_actions: bool, first: list[int], next_life: list[int]) -> Played:
    """Plays the games of an emulator. The script's own actions begin a game (first) and a next life.

    Without own actions, the vector environment has itself pressed FIRE once, after its no-ops. Its limit of
    frames does not count these.
    """
    kwargs, played = gym.spec(env_id).kwargs, Played()
    ale = ale_py.ALEInterface()
    ale.setFloat("repeat_action_probability", kwargs["repeat_action_probability"])
    ale.loadROM(roms.get_rom_path(kwargs["game"]))
    buttons = ale.getLegalActionSet() if all_actions else ale.getMinimalActionSet()
    for game in games:
        ale.reset_game()
        for i in range(game.frames):
            ale.act(FIRE if not first and i == game.frames - 1 else NOOP)
        frame, own, score, over = ale.getScreenGrayscale(), list(first), 0, False
        for i, action in enumerate(game.actions):
            assert not over, "a game goes on after its end"
            lives, reward, pooled = ale.lives(), 0, np.zeros((2, 210, 160), np.uint8)
            for k in range(4):
                reward += ale.act(buttons[action])
                pooled[k % 2] = ale.getScreenGrayscale()
                if ale.game_over():
                    break
            score += reward
            over = ale.game_over() or 4 * (i + 1) >= kwargs["max_num_frames_per_episode"]
            lost = 0 < ale.lives() < lives and not over
            if own:
                assert action == own.pop(0) and not lost and not over
            else:
                played.actions.append(action)
                played.frames.append(cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA))
                played.rewards.append(reward)
                played.lost.append(lost)
                played.over.append(over)
                own = list(next_life) if lost else []
            frame = pooled.max(0)
        if over:
            played.finished.append((score, ale.getEpisodeFrameNumber()))
    return played
