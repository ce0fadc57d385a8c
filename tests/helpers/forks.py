"""Processes forked from one that has imported everything, so that a start takes a moment and not seconds.

Each process of pytest has one such server. It imports the list that was set last before it started, and says
nothing of what it does not find: so all that fork share this list and these paths.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
PATHS = os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "helpers")))
IMPORTED = ["conftest", "ranks", "test_faults", "torch._dynamo"]  # the last is what Adam imports, in a second
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(IMPORTED)


def start_server():
    """What forks inherit is from here: paths to import from, and one thread for each operation."""
    with mock.patch.dict(os.environ, PYTHONPATH=PATHS, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


def main(name, flags, sabotage, folder, number):
    """A script's command line, in a forked process."""
    os.setsid()
    os.chdir(folder)
    for fd, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stream}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
    torch.set_num_threads(1)
    sys.argv = [f"{name}.py", *flags]
    try:
        sabotage()
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        if any(thread.name.startswith("actor") for thread in threading.enumerate()):
            os._exit(99)


def start(script, *flags, sabotage=int, number=0):
    """Begins a script's command line here; sabotage() comes before it."""
    start_server()
    kwargs = dict(args=(script.SCRIPT, [str(flag) for flag in flags], sabotage, os.getcwd(), number))
    process = FORKS.Process(target=main, daemon=True, **kwargs)
    process.start()
    return process


def end(process, number=0):
    """Exit code, stdout and stderr of a run that ends in time."""
    process.join(600)
    assert Path(f"err{number}").exists(), f"ended with {process.exitcode} before it began"
    out, err = (Path(f"{stream}{number}").read_text(encoding="utf-8") for stream in ("out", "err"))
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hangs: {out}{err}")
    return SimpleNamespace(code=process.exitcode, out=out, err=err)


def run(script, *flags, sabotage=int):
    return end(start(script, *flags, sabotage=sabotage))
