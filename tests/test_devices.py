"""--device cuda on a pretend GPU: what goes wrong on a real one, as far as a CPU build of PyTorch can say.

The tests themselves are in devices.py. The pretend GPU must be there before PyTorch is imported, and would
change what other tests see, so each script's tests have a process of their own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import OTHERS, SCRIPTS

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to make the pretend GPU with")
@pytest.mark.skipif(sys.platform != "linux", reason="the pretend GPU is compiled for Linux")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the pretend GPU needs a CPU build of PyTorch")
@pytest.mark.parametrize("name", [*reversed(OTHERS), *reversed(SCRIPTS)])  # long ones first
def test_on_a_pretend_gpu(name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pretend_cuda", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", ROOT / "tests/helpers/devices.py"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests/helpers")))
    environment = os.environ | dict(SCRIPT=name, PYTHONPATH=paths, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-3000:]
