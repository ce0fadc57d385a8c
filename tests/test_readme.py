"""Every command of the README and of docs/, in order, as typed in a fresh clone; only runs are shorter.

What is not typed here is what .ci/run types: the two commands that set everything up. A script is not started
anew for each command but forked from a process that has imported its packages, which takes seconds.
"""

import atexit
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import OTHERS, SCRIPTS
from forks import FORKS, start_server

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = re.findall(r"^```bash\n(.*?)^```", "\n".join(PAGES), re.MULTILINE | re.DOTALL)
LINES = "".join(BLOCKS).replace("\\\n", " ").splitlines()
COMMANDS = [re.sub(r"\s+#.*", "", line) for line in LINES]
COMMANDS = [line.split("&& .venv/bin/")[-1] for line in COMMANDS if "-m pytest" not in line]
SHORTER = [  # of tools; scripts make two short iterations, or two more where one goes on
    (r"--nproc-per-node 8 (.*) --num-envs 64", r"--nproc-per-node 2 \1 --num-envs 8"),
    (r"run\.py classic --seeds 1\.\.3", "run.py classic --seeds 1 --scripts ppo --total-timesteps 2048"),
    (r"=2\.5e-4,1e-3 +--seeds 1\.\.3", "=2.5e-4,1e-3 --seeds 1"),  # test_report.py looks at all of the sweep
    (r"watch\.py", "watch.py --episodes 1"),
    (r"--population 4 --rounds 20", "--population 2 --rounds 1"),
    (r"--eval-episodes 20", "--eval-episodes 2"),
    (r"--capture-video", "--capture-video --eval-episodes 1"),
]


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    ignored = shutil.ignore_patterns(".*", "runs", "unfinished", "__pycache__", "mine")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


def newest(clone, script):
    """The newest run of a script, for runs/NAME."""
    return max((clone / "runs").glob(f"*__{script}__*"), key=os.path.getmtime).relative_to(clone)


def shortened(command, clone):
    """The command with few steps, and with the name of a run for NAME."""
    for pattern, shorter in SHORTER:
        command = re.sub(pattern, shorter, command)
    name = re.search(r"(\w+)\.py", command)[1]
    if "runs/NAME" in command:
        command = command.replace(
            "runs/NAME", str(newest(clone, name if name in SCRIPTS | OTHERS else "ppo"))
        )
    if name in SCRIPTS | OTHERS and "--evaluate" not in command:
        module = (SCRIPTS | OTHERS)[name]
        if name in ("ppo_atari", "impala_vtrace"):  # which play many games, or large networks, for longer
            command += f" --num-steps {16 if name == 'ppo_atari' else 4}"
        flags = re.findall(r"--(num-envs|batch-segments|num-steps) (\d+)", command)
        args = module.Args(**{flag.replace("-", "_"): int(x) for flag, x in flags})
        steps = 2 * args.batch_size
        if "--resume" in command:
            args = module.load_checkpoint(clone / re.search(r"--resume (\S+)", command)[1])["args"]
            steps = args.total_timesteps + 2 * args.batch_size
        command = re.sub(r" --total-timesteps \d+", "", command) + f" --total-timesteps {steps}"
    return command


def run_script(folder, words, environment):
    """A script's command line, in a forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for fd, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stream}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
    sys.argv, sys.path[0] = words, str(folder)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def typed(command, clone, **environment):
    environment = dict(os.environ, OMP_NUM_THREADS="1", **environment)
    python, *words = shlex.split(command)
    if python == "python" and words[0].removesuffix(".py") in SCRIPTS | OTHERS:
        start_server()
        process = FORKS.Process(target=run_script, args=(clone, words, environment))
        process.start()
        process.join(900)
        texts = [(clone / f"{stream}.txt").read_text(encoding="utf-8") for stream in ("out", "err")]
        return subprocess.CompletedProcess(command, process.exitcode, *texts)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=900
    )


def check(command, clone):
    """Type a command; what it leaves in the clone is there."""
    if "on_ray.py" in command and not importlib.util.find_spec("ray"):
        done = typed(command, clone)
        assert done.returncode == 2 and "pip install ray" in done.stderr, done.stderr
        return
    if "report.py --wandb" in command:  # without an account: one line
        done = typed(command, clone, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        return
    done = typed(shortened(command, clone), clone, WANDB_MODE="offline")
    judged = "compare.py" in command and "mine" in command  # exit code 1, as its runs are too short
    assert done.returncode == 0 or judged and done.returncode == 1, done.stderr
    if "--capture-video" in command:
        assert list((clone / newest(clone, "ppo") / "videos").glob("*.mp4"))
    elif "--evaluate" in command:
        assert re.match(r"return [-\d.]+ \+- [\d.]+ over 2 episodes\n", done.stdout)
    elif "report.py" in command:
        assert (clone / "report.html").exists()
    elif "watch.py" in command:
        assert (clone / newest(clone, "ppo") / "best.pt").exists()
    elif judged:
        assert (clone / "mine" / "index.html").exists()
    elif command.split()[1].startswith(tuple(SCRIPTS | OTHERS)):
        assert (clone / done.stdout.splitlines()[0] / "checkpoint.pt").exists()


def check_tensorboard(command, clone):
    """Its page lists the runs of the clone."""
    program = str(Path(sys.executable).with_name("tensorboard"))
    board = subprocess.Popen(
        [program, *command.split()[1:], "--port", "0"], cwd=clone, stderr=subprocess.PIPE, text=True
    )
    try:
        url = next(match[0] for line in board.stderr if (match := re.search(r"http://localhost:\d+/", line)))
        deadline, found = time.time() + 300, {}
        while not found:
            with urllib.request.urlopen(f"{url}data/plugin/scalars/tags") as page:
                found = {run: tags for run, tags in json.load(page).items() if "CartPole" in run}
            assert time.time() < deadline
            time.sleep(0.5)
        assert any("charts/SPS" in tags for tags in found.values())
    finally:
        board.send_signal(signal.SIGTERM)
        board.wait(timeout=600)


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 172 and len(README.split()) <= 2000
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


def test_lines_of_scripts_are_about_as_many_as_the_table_says():
    rows = re.findall(r"(?m)^\| `(\w+)\.py` \| (\d+) \((\d+)\) \|", README)
    assert sorted(script for script, *_ in rows) == sorted(SCRIPTS | OTHERS)
    for script, lines, algorithm in rows:
        parts = (
            (ROOT / f"{script}.py")
            .read_text(encoding="utf-8")
            .split("# === From here on nothing is the algorithm's")
        )
        first, rest = (len(part.splitlines()) for part in parts)
        assert int(lines) == pytest.approx(first + rest, rel=0.05), script
        assert int(algorithm) == pytest.approx(first, rel=0.05), script


def test_links_lead_somewhere():
    """Of the README, of docs/ and of benchmark/: files that exist, with as many lines as a link names."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmark").glob("*.md")):
        text = re.sub(
            r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )  # code has none
        for link, line in re.findall(r"\]\(([^)#:]+)(?:#L(\d+))?\)", text):
            path = page.parent / link
            assert path.is_file(), (page.name, link)
            assert not line or int(line) <= len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.timeout(1800)
def test_commands(clone):
    """One test, as a command goes on with what those before it left."""
    typed = {name for name in SCRIPTS | OTHERS if any(f"{name}.py" in command for command in COMMANDS)}
    assert len(COMMANDS) > 30 and typed == (SCRIPTS | OTHERS).keys() - {"ppo_shared"}
    for command in COMMANDS:
        if command.startswith("tensorboard"):
            check_tensorboard(command, clone)
        else:
            print(command)  # shown if it fails
            check(command, clone)
