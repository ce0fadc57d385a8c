#!/usr/bin/env bash
# What is to be measured on a GPU; nothing of it was, so far. Blocks stand alone, the last ones take hours.
#
#     bash benchmark/gpu.sh                     # all of it, into benchmark/results/ and gpu.log
#     bash benchmark/gpu.sh tests speed         # only these blocks
set -euo pipefail
cd "$(dirname "$0")/.."
blocks=${*:-tests speed modes breakout decoupled atari}

tests() { # every script trains on CUDA; compiled losses are eager's to 1e-4
    python -m pytest -q tests/test_gpu.py
}

speed() { # steps/s and memory beside stable-baselines3, rows of speed.csv with device cuda
    pip install -q sb3-contrib
    python benchmark/speed.py --all --rounds 3 --device cuda --csv benchmark/results/speed.csv
}

modes() { # compiled, with CUDA graphs, and ppo_atari.py by mode; LeanRL's is 6,809 steps/s on an H100
    for script in ppo ppo_shared ppo_continuous ppo_lstm ppo_multidiscrete; do
        python benchmark/speed.py "$script" --device cuda --flags=--compile --csv benchmark/results/speed.csv
    done
    for flags in "" "--compile" "--compile --amp" "--num-envs 64 --compile --amp"; do
        python benchmark/speed.py ppo_atari --steps 200000 --device cuda --flags="$flags" --csv benchmark/results/speed.csv
    done
}

breakout() { # 10M steps, to be done in 12 minutes
    time python benchmark/run.py atari --env-ids BreakoutNoFrameskip-v4 --seeds 1 --workers 1 --flags="--compile --amp"
}

decoupled() { # charts/SPS of both, with as many actors as there are cores to spare
    for script in impala_vtrace ppo_async; do
        python "$script.py" --num-envs 128 --num-actors 8 --batch-unrolls 128 --compile --total-timesteps 2000000
    done
}

atari() { # the suites' rows
    python benchmark/run.py atari --seeds 1..3 --workers 4 --flags="--compile --amp"
    python benchmark/run.py impala --seeds 1..3 --workers 4
    python benchmark/compare.py --readme
}

nvidia-smi | tee -a gpu.log
for block in $blocks; do
    echo "== $block" | tee -a gpu.log
    "$block" 2>&1 | tee -a gpu.log
done
