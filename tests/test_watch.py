"""benchmark/watch.py: the newest checkpoint, each once, the best byte for byte, the training left alone."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import scalars, small_args, wait_for
from test_contract import assert_one_line_error, assert_same

import ppo
from benchmark import watch

ROOT = Path(__file__).parent.parent
SCRIPT = """
import time
from dataclasses import dataclass
from pathlib import Path
import torch
from ppo import HEARTBEATS, heartbeat, watch_heartbeats  # noqa: F401  watch.py wants them

@dataclass
class Args:
    num_iterations: int = 4
    batch_size: int = 10
    device: str = "cuda"
    evaluate: str | None = None
    eval_episodes: int = 10
    stall_seconds: int = 1
    capture_video: bool = False


def evaluate(args):
    assert args.device == "cpu"
    path = Path(args.evaluate, "checkpoint.pt")
    if args.capture_video:
        path.with_name("videos").mkdir(exist_ok=True)
        for n in range(args.eval_episodes):
            path.with_name("videos").joinpath(f"{n}.mp4").write_text(str(torch.load(path)["score"]))
    path.with_name("started").touch()
    while Path("hold").exists():
        time.sleep(0.01)
    score = torch.load(path)["score"]
    return [score - 1, score + 1] * (args.eval_episodes // 2)
"""


@pytest.fixture
def run(monkeypatch):
    """A run folder of a script whose evaluations are what its checkpoints say, here in the current folder."""
    Path("scored.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "scored", raising=False)
    run = Path("runs/NAME")
    run.mkdir(parents=True)
    (run / "lock").touch()  # a training has it before its first checkpoint
    return run


def save(run, iteration, score, **state):
    """As a training saves: atomically; what it saved."""
    state = dict(script="scored", args={}, iteration=iteration, score=score) | state
    torch.save(state, run / "new")
    (run / "new").replace(run / "checkpoint.pt")
    return (run / "checkpoint.pt").read_bytes()


def once(*flags, monkeypatch):
    """watch.py --once in this process, which keeps its priority and its signals; its exit code."""
    monkeypatch.setattr(sys, "argv", ["watch.py", "--once", *map(str, flags)])
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        watch.main()
    except SystemExit as end:
        return end.code
    return 0


def start(*flags):
    command = [sys.executable, ROOT / "benchmark/watch.py", *map(str, flags), "--poll", "0.1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def evaluations(run):
    """[(step, mean), ...] of eval.csv, which must be TensorBoard's, too."""
    head, *rows = [line.split(",") for line in (run / "eval.csv").read_text(encoding="utf-8").splitlines()]
    assert head == ["step", "mean", "std", "episodes", "seconds"]
    for column, tag in ((1, "eval/episodic_return"), (2, "eval/episodic_return_std")):
        values = [(int(row[0]), np.float32(row[column])) for row in rows]  # as TensorBoard keeps them
        assert scalars(run / "eval", tag) == values
    return [(int(row[0]), float(row[1])) for row in rows]


def test_only_the_newest_checkpoint_until_the_training_has_finished(run):
    Path("hold").touch()
    watcher = start(run, "--episodes", 4)
    assert watcher.stdout.readline() == "waiting for runs/NAME/checkpoint.pt\n"
    first = save(run, 1, 5.0)
    wait_for((run / "eval/10/started").exists)
    assert os.getpriority(os.PRIO_PROCESS, watcher.pid) == 19
    for iteration, score in ((2, 9.0), (3, 8.0), (4, 3.0)):
        save(run, iteration, score)
    Path("hold").unlink()
    out, err = watcher.communicate(timeout=600)
    assert (watcher.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "best return 5.00 at step 10: runs/NAME/best.pt"
    assert evaluations(run) == [(10, 5.0), (40, 3.0)]
    assert (run / "eval.csv").read_text(encoding="utf-8").splitlines()[1].startswith("10,5.0,1.0,4,")
    assert (run / "best.pt").read_bytes() == first
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in (run / "eval").iterdir() if path.is_dir()]


def test_nothing_is_evaluated_twice_and_the_best_is_kept(run, monkeypatch, capsys):
    def evaluated(iteration, score, **state):
        checkpoint = save(run, iteration, score, **state)
        assert once(run, monkeypatch=monkeypatch) == 0
        return checkpoint

    evaluated(1, 5.0)
    before = (run / "eval.csv").stat().st_mtime_ns
    assert once(run, monkeypatch=monkeypatch) == 0
    assert (run / "eval.csv").stat().st_mtime_ns == before
    best = evaluated(2, 7.0, step=25)  # where a checkpoint says its step, this is it
    evaluated(3, 7.0)
    assert evaluations(run) == [(10, 5.0), (25, 7.0), (30, 7.0)]
    assert (run / "best.pt").read_bytes() == best
    assert capsys.readouterr().out.splitlines()[-1] == "best return 7.00 at step 25: runs/NAME/best.pt"


class Killed(Exception):
    pass


def test_killed_between_any_two_writes(tmp_path, monkeypatch, run):
    """Of the copy, eval.csv, best.pt and the picture, the first 0, 1, 2 or 3 were renamed."""
    rename, best = Path.replace, {}
    for written in range(4):
        run = tmp_path / str(written)
        run.mkdir()
        save(run, 1, 5.0)
        watcher = watch.Watcher(watch.Args(run))
        watcher.evaluate()
        best[written] = save(run, 2, 7.0)
        left = [None] * written

        def replace(self, target, left=left):
            if not left:
                raise Killed
            left.pop()
            return rename(self, target)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Path, "replace", replace)
            watcher.evaluate()
        watcher.writer.close()
        watcher.lock.release()
    for written in range(4):
        run = tmp_path / str(written)
        counts, third = written >= 2, save(run, 3, 6.0)  # from eval.csv on
        watcher = watch.Watcher(watch.Args(run))
        assert ((run / "best.pt").read_bytes() == best[written]) == counts
        watcher.evaluate()
        assert evaluations(run) == [(10, 5.0), *[(20, 7.0)] * counts, (30, 6.0)]
        assert (run / "best.pt").read_bytes() == (best[written] if counts else third)
        assert sorted(path.name for path in run.iterdir()) == [
            "best.pt",
            "checkpoint.pt",
            "eval",
            "eval.csv",
            "learning_curve.png",
        ]


def test_a_training_is_the_same_with_a_watcher_that_is_killed(monkeypatch):
    args = dict(num_steps=128, total_timesteps=6144, save_every=1)
    alone = torch.load(ppo.train(small_args(ppo, **args)) / "checkpoint.pt")
    log, watchers = ppo.Run.log, []

    def log_and_watch(self, *args, **data):
        log(self, *args, **data)
        if self.step == 1024:
            watchers.append(start(self.folder, "--episodes", 10_000))  # which do not end
            wait_for(lambda: list(self.folder.glob("eval/*/checkpoint.pt")))
        if self.step == 4096:
            watchers[0].kill()
            out, err = watchers[0].communicate(timeout=600)
            assert not out and re.fullmatch(r"(\s*\d.* steps \[.*step/s.*\])*\s*", err), err  # how far it was

    monkeypatch.setattr(ppo.Run, "log", log_and_watch)
    run = ppo.train(small_args(ppo, **args))
    assert watchers[0].returncode == -signal.SIGKILL
    assert_same(alone["agent"], torch.load(run / "checkpoint.pt")["agent"])
    time.sleep(1.1)  # TensorBoard orders the event files of a run by their second
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert once(run, "--episodes", 2, monkeypatch=monkeypatch) == 0
    assert [step for step, _ in evaluations(run)] == [6144]
    assert (run / "best.pt").read_bytes() == before[run / "checkpoint.pt"]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert [step for step, _ in scalars(run, "charts/learning_rate")] == list(range(512, 6145, 512))


def test_an_episode_of_each_new_best_is_filmed(run, monkeypatch):
    def videos():
        return {str(path.relative_to(run / "videos")): path.read_text() for path in run.glob("videos/*/*")}

    for iteration, score in ((1, 5.0), (2, 4.0), (3, 5.0), (4, 7.0)):  # the second and third are no new best
        save(run, iteration, score)
        assert once(run, "--capture-video", monkeypatch=monkeypatch) == 0
    assert videos() == {"best-10/0.mp4": "5.0", "best-40/0.mp4": "7.0"}
    save(run, 5, 8.0)
    with monkeypatch.context() as patch, pytest.raises(Killed):  # the video is kept, the evaluation not yet
        patch.setattr(watch.Watcher, "record", lambda *_: (_ for _ in ()).throw(Killed))
        once(run, "--capture-video", monkeypatch=monkeypatch)
    assert once(run, "--capture-video", monkeypatch=monkeypatch) == 0 and videos()["best-50/0.mp4"] == "8.0"
    save(run, 6, 9.0)
    assert once(run, monkeypatch=monkeypatch) == 0 and len(videos()) == 3  # only where it is asked for


def test_the_video_of_a_real_run(monkeypatch):
    run = ppo.train(small_args(ppo))
    assert once(run, "--episodes", 2, "--capture-video", monkeypatch=monkeypatch) == 0
    (video,) = run.glob("videos/best-*/*.mp4")
    assert video.stat().st_size > 1000 and sorted(path.name for path in (run / "eval").glob("*/*")) == []


def test_signals_end_it_at_once(run):
    Path("hold").touch()
    other = run.with_name("OTHER")
    other.mkdir()
    watchers = [start(folder) for folder in (run, other) if save(folder, 1, 5.0)]
    wait_for(lambda: len(list(Path("runs").glob("*/eval/10/started"))) == 2)
    for watcher, signum in zip(watchers, (signal.SIGINT, signal.SIGTERM), strict=True):
        watcher.send_signal(signum)
        assert watcher.communicate(timeout=600) == ("", "") and watcher.returncode == 128 + signum
    assert sorted(os.listdir(run)) == ["checkpoint.pt", "eval", "lock"]


def test_a_hanging_evaluation_is_shown_and_ends_it(run):
    """By watch.py's own flag. The training's is too short for the lowest priority, or there is none."""
    Path("hold").touch()
    save(run, 1, 5.0, args=dict(stall_seconds=999))
    watcher = start(run, "--stall-seconds", 2)
    _, err = watcher.communicate(timeout=100)
    assert watcher.returncode == 1 and re.search(r"(?s)--stall-seconds 2: nothing .*in evaluate", err), err
    assert not (run / "eval.csv").exists()


def test_the_picture(monkeypatch):
    """Training's mean of the last 100 episodes, the evaluation with its deviation, and the best one."""
    drawn, png = [], watch.figures.png
    monkeypatch.setattr(watch.figures, "png", lambda figure: drawn.append(figure) or png(figure))
    run = ppo.train(small_args(ppo, num_steps=256, total_timesteps=4096))
    assert once(run, "--episodes", 4, monkeypatch=monkeypatch) == 0
    (ax,), returns = drawn[-1].axes, scalars(run, "charts/episodic_return")
    training, evaluation, star = ax.lines[0], *(x for x in ax.lines if x.get_marker() in (".", "*"))
    assert len(returns) > 100 and training.get_xdata().tolist() == [step for step, _ in returns]
    values = [x for _, x in returns]
    expected = [np.mean(values[max(0, k - 99) : k + 1]) for k in range(len(values))]
    np.testing.assert_allclose(training.get_ydata(), expected)
    (evaluated,) = evaluations(run)
    assert [*evaluation.get_xdata(), *evaluation.get_ydata()] == pytest.approx(evaluated)
    (bars,) = ax.containers
    (_, deviation), (mean,) = scalars(run / "eval", "eval/episodic_return_std")[0], evaluation.get_ydata()
    (segment,) = bars.lines[2][0].get_segments()
    np.testing.assert_allclose(segment[:, 1], [mean - deviation, mean + deviation])
    assert [*star.get_xdata(), *star.get_ydata()] == pytest.approx(evaluated)


def test_a_damaged_checkpoint(monkeypatch, capsys):
    """Cut at 50 places, and with a byte changed at 200: one line, or it is evaluated as if it were whole."""
    run = ppo.train(small_args(ppo))
    path = run / "checkpoint.pt"
    whole, rng = path.read_bytes(), random.Random(1)
    assert once(run, "--episodes", 1, monkeypatch=monkeypatch) == 0
    monkeypatch.setattr(watch.Watcher, "publish", lambda self: None)  # it draws for a quarter of a second
    ends = [rng.randrange(len(whole)) for _ in range(50)]
    cut = [whole[:end] for end in ends]
    places = [rng.randrange(len(whole)) for _ in range(100)]
    places += [len(whole) - rng.randrange(1, 2000) for _ in range(100)]  # the list of what the file holds
    changed = [whole[:k] + bytes([whole[k] ^ rng.randrange(1, 256)]) + whole[k + 1 :] for k in places]
    capsys.readouterr()
    refused = 0
    (row,) = evaluations(run)
    for content in cut + changed:
        path.write_bytes(content)
        for name in ("eval.csv", "best.pt", "eval"):  # or the step would not be evaluated again
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
        code = once(run, "--episodes", 1, monkeypatch=monkeypatch)
        if code == 0:
            assert content in changed and "error" not in capsys.readouterr().err
            assert evaluations(run) == [row]
        else:
            refused += 1
            assert_one_line_error(code, capsys, f"{path} is no readable checkpoint: ")
    assert refused > 100


@pytest.mark.parametrize(
    "end, words",
    [
        ("20,7.0,1.0,1", "eval.csv, line 3 has 4 of 5 columns"),
        ("20,7.0,1.0,10,1", "eval.csv, line 3 has no line end"),
        ("20,7.x,1.0,10,1.5\n", "eval.csv, line 3: could not convert string to float"),
        ("20.5,7.0,1.0,10,1.5\n", "eval.csv, line 3: invalid literal for int"),
    ],
)
def test_a_damaged_table(end, words, run, monkeypatch, capsys):
    save(run, 3, 5.0)
    table = f"step,mean,std,episodes,seconds\n10,5.0,1.0,10,1.5\n{end}"
    (run / "eval.csv").write_text(table, encoding="utf-8")
    assert_one_line_error(once(run, monkeypatch=monkeypatch), capsys, words)
    assert (run / "eval.csv").read_text(encoding="utf-8") == table


def test_mistakes(run, monkeypatch, capsys):
    def mistake(words, *flags):
        assert_one_line_error(once(*flags, monkeypatch=monkeypatch), capsys, words)

    mistake("there is no folder nowhere", "nowhere")
    mistake("runs is no run folder, such as runs/NAME", "runs")
    assert os.listdir("runs") == ["NAME"]
    mistake("there is no runs/NAME/checkpoint.pt yet", run)
    mistake("must be above 0", run, "--episodes", 0)
    mistake("must be above 0", run, "--poll", 0)
    mistake("stall_seconds must be from 0", run, "--stall-seconds", -1)
    watcher = watch.Watcher(watch.Args(run))
    mistake("runs/NAME has a watcher", run)
    watcher.lock.release()
    checkpoint = save(run, 1, 5.0)
    for bad in (b"", checkpoint[: len(checkpoint) // 2], b"no checkpoint"):
        (run / "checkpoint.pt").write_bytes(bad)
        mistake("runs/NAME/checkpoint.pt is no readable checkpoint", run)
    save(run, 1, 5.0, args=dict(unknown=1))
    mistake("runs/NAME/checkpoint.pt is of another scored.py: .* 'unknown'", run)
    save(run, 1, 5.0)
    mistake("is a run of scored.py: .* --script", run, "--script", "other.py")
    Path("elsewhere").mkdir()
    Path("scored.py").rename("elsewhere/scored.py")
    mistake("is a run of scored.py: .* --script", run)
    assert os.listdir(run / "eval") and not (run / "eval.csv").exists()
    del sys.modules["scored"]
    assert once(run, "--script", "elsewhere/scored.py", monkeypatch=monkeypatch) == 0
    assert evaluations(run) == [(10, 5.0)]
