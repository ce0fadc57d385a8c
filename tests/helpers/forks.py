"""Processes forked from one that has imported everything, so that a start takes a moment and not seconds.

Each process of pytest has one such server, which imports what was asked for last before its first start. It
leaves out silently what it does not find, so all that fork share this list and these paths.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).parent.parent
PATHS = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "helpers")))
IMPORTED = ["conftest", "ranks", "test_faults", "torch._dynamo"]  # the last is what Adam imports, in a second
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(IMPORTED)


def start_server():
    """What forks inherit is from here: paths to import from, and one thread for each operation."""
    with mock.patch.dict(os.environ, PYTHONPATH=PATHS, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
