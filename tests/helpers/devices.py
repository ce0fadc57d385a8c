"""The scripts on the pretend GPU of pretend_cuda.py. test_devices.py runs it, each script in a process.

By hand:  SCRIPT=ppo_atari PYTHONPATH=tests/helpers python -m pytest -p pretend_cuda tests/helpers/devices.py
"""

import atexit
import contextlib
import os
import socket
from collections import Counter
from dataclasses import replace

import pretend_cuda
import pytest
import torch
from conftest import one_line, scalars
from device_runs import ACTORS, RUNS, in_turn, make_args, parameters_of, script_of
from torch.distributed.distributed_c10d import Backend, BackendConfig

COMPILE = torch.compile
CHOSEN = os.environ.get("SCRIPT")


def on(*runs):
    """Parametrizes a test by those of the runs that are of the chosen script."""
    return pytest.mark.parametrize("run", [run for run in runs if CHOSEN in (None, run.split("-")[0])])


@pytest.fixture
def gpu(request):
    with pretend_cuda.installed(getattr(request, "param", 1)) as gpu:
        yield gpu
    assert not gpu.races, sorted(set(gpu.races))


@on(*RUNS)
def test_trains_resumes_and_evaluates(run, gpu):
    """No operation mixes devices, and NumPy is given nothing of the GPU; on the CPU and back again."""
    script, args = script_of(run), make_args(run)
    run_dir = script.train(args)
    assert gpu.launches.total() > 100
    for device in ("cpu", "cuda"):
        more = args.total_timesteps + args.batch_size
        args = replace(args, resume=str(run_dir), device=device, total_timesteps=more)
        script.train(args)
    assert script.evaluate(replace(args, resume=None, evaluate=str(run_dir), eval_episodes=1))


@on("ppo", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete-masks", "impala_vtrace", "ppo_async")
def test_learns_what_it_learns_on_the_cpu(run):
    """With the same seed: neither a value nor the order of random draws depends on the device."""
    weights = []
    for device, place in (("cpu", contextlib.nullcontext()), ("cuda", pretend_cuda.installed())):
        with place:
            run_dir = script_of(run).train(make_args(run, device=device, **in_turn(run)))
        weights.append(parameters_of(run_dir))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@on(*RUNS)
@pytest.mark.parametrize("gpu", [2], indirect=True, ids=["two GPUs"])
def test_the_second_process_uses_the_second_gpu(run, gpu, monkeypatch):
    """torchrun's LOCAL_RANK. A thread begins with device 0, whatever its process has chosen."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(script_of(run), "LOCAL_RANK", 1, raising=False)
    script_of(run).train(make_args(run, iterations=2))
    assert {device for device, _ in gpu.launched} == {1}


@on("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete", *ACTORS, "ngu_r2d2")
def test_more_processes_than_gpus_are_a_mistake(run, gpu, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(script_of(run), "LOCAL_RANK", 1, raising=False)
    monkeypatch.setattr("sys.argv", [f"{run}.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        script_of(run).parse_args()
    assert ended.value.code == 2 and "finds 1 GPU" in one_line(capsys.readouterr().err)


@on("impala_vtrace", "impala_vtrace-atari", "impala_vtrace-lstm", "ppo_async", "ppo_async-atari")
def test_what_is_published_is_complete(run, gpu, monkeypatch):
    """publish() copies on the learner's stream, for which the streams of the actors do not wait."""
    script, ready = script_of(run), []
    publish = script.publish

    def checked(agent, version, exchange, args):
        publish(agent, version, exchange, args)
        ready.append(all(gpu.is_ready(x) for x in exchange.published[0].parameters()))

    monkeypatch.setattr(script, "publish", checked)
    script.train(make_args(run, iterations=4))
    assert ready and all(ready), f"{ready.count(False)} of {len(ready)} were still being written"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@on("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete", *ACTORS, "ngu_r2d2")
def test_processes_have_a_backend_for_each_device(run, device, gpu, monkeypatch):
    """Where PyTorch finds a GPU, init_process_group() without a backend can reduce nothing of the CPU's.

    Here is a group of one process, with gloo for NCCL, for a script that takes itself for one of two.
    """
    script, distributed = script_of(run), torch.distributed
    init, all_reduce, backends = distributed.init_process_group, distributed.all_reduce, {}

    def init_process_group(backend=None, **flags):
        backends.update(BackendConfig(Backend(backend or "undefined")).device_backend_map)
        init(",".join(f"{name}:gloo" for name in backends), **flags)

    def reduce(x, op=distributed.ReduceOp.SUM):
        if x.device.type not in backends:
            raise RuntimeError(f"No backend type associated with device type {x.device.type}")
        if x.device.type == "cpu":
            all_reduce(x, op)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(distributed, "all_reduce", reduce)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    double = {name: 2 * RUNS[run][name] for name in ("num_envs", "batch_segments") if name in RUNS[run]}
    try:
        script.train(make_args(run, iterations=2, device=device, **double, **in_turn(run)))
    finally:
        distributed.destroy_process_group()
    assert "cpu" in backends and (device == "cpu" or backends["cuda"] == "nccl")


@on("ppo", "ppo_atari", "ppo_async", "impala_vtrace")
def test_annealing_compiles_nothing_anew(run, gpu, monkeypatch):
    """Dynamo and AOT autograd without Inductor. A float that is annealed would need new code each time."""
    graphs, counts, seed = [], [], torch.manual_seed

    def noted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def counted(*args):  # as an iteration begins
        counts.append(len(graphs))
        return seed(*args)

    monkeypatch.setattr(torch, "compile", lambda function, mode=None: COMPILE(function, backend=noted))
    monkeypatch.setattr(torch, "manual_seed", counted)
    annealed = dict(anneal_clip=True) if hasattr(script_of(run).Args, "anneal_clip") else {}
    torch._dynamo.reset()
    script_of(run).train(make_args(run, 6, compile=True, **annealed, **in_turn(run)))
    assert counts[-3] == counts[-1] > 0, counts


@pytest.mark.parametrize("flags", [{}, dict(amp=True)], ids=["", "amp"])
@on("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_multidiscrete", "ppo_multidiscrete-masks")
def test_a_cuda_graph_learns_what_eager_mode_learns(run, flags, monkeypatch):
    """Bit for bit with annealed learning rate and clip range, and resumed. A captured update never waits."""
    script = script_of(run)
    if not all(hasattr(script.Args, name) for name in flags):
        pytest.skip("has no such flag")
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: function)
    run_dirs, launches = [], []
    for compile in (False, True):
        with pretend_cuda.installed() as gpu:
            large = dict(learning_rate=1e-2)  # enough to be clipped
            args = make_args(run, 2, compile=compile, target_kl=None, anneal_clip=True, **large, **flags)
            run_dir = script.train(args)
            script.train(replace(args, resume=str(run_dir), total_timesteps=3 * args.batch_size))
        run_dirs.append(run_dir)
        launches.append(gpu.launches.total())
        assert not gpu.races
    assert gpu.launches["CUDA graph"] > 0 and launches[1] < 0.8 * launches[0]
    eager, captured = map(parameters_of, run_dirs)
    for name, x in eager.items():
        assert torch.equal(x, captured[name]), name
    for tag in ("losses/clipfrac", "losses/value_loss", "charts/learning_rate"):
        eager, captured = (scalars(run_dir, tag) for run_dir in run_dirs)
        assert len(eager) == 3 and eager == captured, tag


# How often a step of the rollout may wait for the GPU: for the copies of what goes in, and of what comes out.
WAITS = {"ppo": 2, "ppo_atari": 2, "ppo_lstm-atari": 3, "ppo_multidiscrete-choice": 3}
WAITS |= {"ppo_async-atari": 2, "impala_vtrace-atari": 1, "impala_vtrace-lstm": 1}


@on(*WAITS)
def test_a_step_waits_for_the_gpu_no_more_than_it_must(run):
    waits, uncut = [], dict(bootstrap_truncated=False)
    for steps in (8, 16):
        with pretend_cuda.installed() as gpu:
            script_of(run).train(make_args(run, 2, num_steps=steps, **uncut, **in_turn(run)))
        waits.append(gpu.waits)
    groups = 2 if run.startswith(ACTORS) else 1
    more = {name: (x - waits[0][name]) / (8 * 2 * groups) for name, x in waits[1].items()}
    assert sum(more.values()) <= WAITS[run], more


@on("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete", "ppo_async")
def test_a_minibatch_waits_for_nothing(run):
    """But with an LSTM, once: where do episodes begin?"""
    waits = []
    for epochs in (1, 3):
        passes = dict(sample_reuse=epochs) if run == "ppo_async" else dict(update_epochs=epochs)
        with pretend_cuda.installed() as gpu:
            script_of(run).train(make_args(run, 2, target_kl=None, **passes, **in_turn(run)))
        waits.append(gpu.waits)
    minibatches = 2 * 2 * 4  # iterations, passes more, minibatches in each
    assert waits[1] - waits[0] == Counter({"copy to CPU": minibatches} if run == "ppo_lstm" else {})


@on("ppo_lstm", "impala_vtrace-lstm", "ngu_r2d2")
def test_weights_of_an_lstm_lie_in_one_piece(run, gpu):
    """Otherwise cuDNN copies them for each call, and PyTorch warns. deepcopy() and flatten() scatter them."""
    script_of(run).train(make_args(run, iterations=4, **in_turn(run)))
    assert not gpu.loose_weights, f"{len(gpu.loose_weights)} calls, {set(gpu.loose_weights)}"
