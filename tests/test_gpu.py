"""What a real GPU is to show, where PyTorch finds one. benchmark/gpu.sh runs this, and measures."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, scalars
from device_runs import ACTORS, RUNS, make_args, parameters_of, script_of
from test_processes import ROOT, TORCHRUN, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """TF32 rounds to 10 bits, within which nothing could be compared."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of convolutions and LSTMs
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(autouse=True)
def sanitizer_in_threads(monkeypatch):
    """TORCH_CUDA_SANITIZER=1 watches the thread that imports PyTorch; actors have others.

    One thread at a time, as its numbers of launches and their records are made one after the other.
    """
    if "TORCH_CUDA_SANITIZER" in os.environ:
        run_thread, lock = threading.Thread.run, threading.RLock()
        launch = torch.cuda._sanitizer.EventHandler._handle_kernel_launch

        def launch_alone(*args):
            with lock:
                return launch(*args)

        monkeypatch.setattr(torch.cuda._sanitizer.EventHandler, "_handle_kernel_launch", launch_alone)

        def watched(thread):
            with torch.cuda._sanitizer.cuda_sanitizer.dispatch:
                run_thread(thread)

        monkeypatch.setattr(threading.Thread, "run", watched)


def assert_finite(run_dir, name):
    events = scalars(run_dir, f"losses/{'td_loss' if name.startswith('ngu') else 'value_loss'}")
    assert len(events) > 1 and np.isfinite(events).all()


@pytest.mark.parametrize("name", RUNS)
def test_trains_resumes_and_evaluates(name):
    """With threads, Atari, --amp and an LSTM; on the CPU and back again."""
    script, args = script_of(name), make_args(name, iterations=4)
    run_dir = script.train(args)
    for device in ("cpu", "cuda"):
        more = args.total_timesteps + args.batch_size
        args = replace(args, resume=str(run_dir), device=device, total_timesteps=more)
        script.train(args)
    assert_finite(run_dir, name)
    assert script.evaluate(replace(args, resume=None, evaluate=str(run_dir), eval_episodes=1))


@pytest.mark.parametrize(
    "name", ["ppo_atari-amp", "ppo_async-atari", "impala_vtrace-atari", "impala_vtrace-lstm", "ngu_r2d2"]
)
def test_trains_compiled(name):
    """Until CUDA graphs are replayed, with everything annealed; also resumed, which captures anew."""
    script = script_of(name)
    annealed = dict(anneal_clip=True) if hasattr(script.Args, "anneal_clip") else {}
    args = make_args(name, iterations=6, compile=True, **annealed)
    run_dir = script.train(args)
    script.train(replace(args, resume=str(run_dir), total_timesteps=2 * args.total_timesteps))
    assert_finite(run_dir, name)


@pytest.mark.parametrize("compiler", ["graph alone", "inductor"])
@pytest.mark.parametrize(
    "name", [name for name in RUNS if name.split("-")[0] in SCRIPTS and "amp" not in name]
)
def test_compiled_updates_are_those_of_eager_mode(name, compiler, monkeypatch):
    """Learning rate and clip range are annealed, and a run is resumed. No random draw is left to the GPU.

    An annealed value that did not reach a CUDA graph would move parameters apart by some of its steps. So do
    errors of rounding that grow, with images: on a CPU, weights that differ by 1e-6 end 1e-3 apart in some
    places, and 6e-5 on average, but 2e-3 on average without annealing.
    """
    is_image = name in ("ppo_atari", "ppo_lstm-atari")
    script, draw = script_of(name), torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: draw(n).to(device))
    if hasattr(script, "Categorical"):
        monkeypatch.setattr(script.Categorical, "sample", lambda self: self.logprobs.argmax(-1))
    if hasattr(script, "Normal"):
        monkeypatch.setattr(script.Normal, "sample", lambda self: self.mean)
    if compiler == "graph alone":
        monkeypatch.setattr(torch, "compile", lambda function: function)
    found = []
    for compile in (False, True):
        rate = 1e-4 if is_image else 1e-3
        args = make_args(name, 4, compile=compile, target_kl=None, anneal_clip=True, learning_rate=rate)
        args = replace(args, **dict(amp=False) if hasattr(args, "amp") else {})
        run_dir = script.train(args)
        script.train(replace(args, resume=str(run_dir), total_timesteps=6 * args.batch_size))
        found.append(parameters_of(run_dir))
    for parameter, x in found[0].items():
        errors = (x - found[1][parameter]).abs()
        assert (errors.mean() < 3e-4) if is_image else (errors.max() < 1e-3), parameter


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["ppo", "ppo_atari", "ppo_continuous", *ACTORS, "ngu_r2d2"])
def test_two_processes(name, device):
    """Also with --device cpu: where there is a GPU, PyTorch by default reduces nothing of the CPU's."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("each process needs a GPU")
    args = make_args(name, 3, num_envs=8)
    flags = dict(device=device, num_envs=8, num_steps=args.num_steps, total_timesteps=3 * args.batch_size)
    flags |= dict(batch_segments=8, total_timesteps=6 * args.batch_size) if name in ACTORS else {}
    flags |= dict(batch_sequences=2, learning_starts=1) if name == "ngu_r2d2" else {}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    run(*TORCHRUN, ROOT / f"{name}.py", *flags)
