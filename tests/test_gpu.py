"""What a GPU is to show, where PyTorch finds one; benchmark/gpu.sh has what to measure on one."""

import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, random_batch, scalars, small_args

import ppo
import ppo_atari
import ppo_shared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(DEVICE == "cpu", reason="PyTorch finds no GPU")
@pytest.mark.parametrize("flags", [{}, dict(compile=True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_every_script_trains_and_evaluates(name, flags):
    script = (SCRIPTS | OTHERS)[name]
    args = small_args(script, device=DEVICE, **flags)
    args.total_timesteps = 4 * args.batch_size
    run_dir = script.train(args)
    events = scalars(run_dir, "losses/td_loss" if name == "ngu_r2d2" else "losses/value_loss")
    assert len(events) > 1 and np.isfinite(events).all()
    args.evaluate, args.eval_episodes = str(run_dir), 1
    assert len(script.evaluate(args)) >= 1


@pytest.mark.parametrize("script", [ppo, ppo_shared, ppo_atari], ids=lambda script: script.SCRIPT)
def test_compiled_losses_are_those_of_eager_mode(script):
    """To 1e-4, on a GPU with CUDA graphs, on one minibatch and over three updates."""
    args, losses = small_args(script, device=DEVICE), {}
    for mode in ("eager", "compiled"):
        torch.manual_seed(1)
        agent = script.Agent(script.make_env(args, 2)).to(DEVICE)
        shape, dtype = ((4, 84, 84), torch.uint8) if script is ppo_atari else ((4,), torch.float32)
        batch = {k: x.to(DEVICE) for k, x in random_batch(agent.cpu(), 32, shape, dtype).items()}
        agent.to(DEVICE)
        optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)

        def update(agent=agent, batch=batch, optimizer=optimizer):
            loss, info = script.ppo_loss(agent, batch, 0.2, args)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach().clone(), {name: x.detach().clone() for name, x in info.items()}

        step = torch.compile(update, mode="reduce-overhead") if mode == "compiled" else update
        losses[mode] = [step() for _ in range(3)]
    for (loss, info), (other, others) in zip(losses["eager"], losses["compiled"], strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-4, atol=1e-4)
        for name, x in info.items():
            torch.testing.assert_close(x, others[name], rtol=1e-4, atol=1e-4, msg=name)
