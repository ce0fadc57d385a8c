#!/usr/bin/env bash
# What is to be tested and measured on a GPU; nothing of it was, so far. Each part stands alone and should take less than
# ten minutes: those of the suites stop then, and go on from their checkpoints when they are called again.
#
#     bash benchmark/gpu.sh                     # all of it, into benchmark/results/ and gpu.log
#     bash benchmark/gpu.sh eager speed         # only these parts
set -euo pipefail
cd "$(dirname "$0")/.."
tests="eager compiled graphs inductor processes sanitizer syncs"
all="$tests speed modes atari-modes decoupled breakout atari"
parts=${*:-$all}
for part in $parts; do
    [[ " $all " = *" $part "* ]] || { echo "gpu.sh: error: no part $part; there are $all" >&2; exit 2; }
done
command -v nvidia-smi > /dev/null || { echo "gpu.sh: error: there is no nvidia-smi, so no GPU" >&2; exit 2; }
for_nine_minutes="timeout --signal=INT 540"

eager() { # every script trains, resumes and evaluates: threads, Atari, --amp, LSTM
    python -m pytest -q tests/test_gpu.py -k "trains_resumes"
}

compiled() { # with --compile, too
    python -m pytest -q tests/test_gpu.py -k "trains_compiled"
}

graphs() { # CUDA graphs learn what eager mode learns
    python -m pytest -q tests/test_gpu.py -k "eager_mode and alone"
}

inductor() { # so does compiled code in them
    python -m pytest -q tests/test_gpu.py -k "eager_mode and inductor"
}

processes() { # two of torchrun: on the CPU beside a GPU, and on two GPUs if there are two
    python -m pytest -q tests/test_gpu.py -k "processes"
}

sanitizer() { # what a stream reads or writes without waiting for another stream; PyTorch prints both places
    TORCH_CUDA_SANITIZER=1 python -m pytest -q tests/test_gpu.py -k "trains_resumes and not ngu_r2d2-"
}

syncs() { # lines of the scripts for which the host waits, with how often
    local said; said=$(mktemp)
    python -W always - 2> "$said" <<'PYTHON' || { cat "$said"; return 1; }
import sys
import tempfile

sys.path[:0] = [".", "tests/helpers"]
import os

import device_runs
import torch

root = os.getcwd()
for name in device_runs.RUNS:
    args = device_runs.make_args(name, iterations=2, **device_runs.in_turn(name))
    os.chdir(tempfile.mkdtemp())
    torch.cuda.set_sync_debug_mode("warn")
    device_runs.script_of(name).train(args)
    torch.cuda.set_sync_debug_mode("default")
    os.chdir(root)
PYTHON
    { grep -o "[a-z_0-9]*\.py:[0-9]*: .*synchroniz" "$said" || echo "none"; } | sort | uniq -c | sort -rn
}

speed() { # steps/s beside stable-baselines3, rows of speed.csv with device cuda
    pip install -q sb3-contrib
    python benchmark/speed/speed.py --all --rounds 1 --device cuda --csv benchmark/results/speed/speed.csv
}

modes() { # with CUDA graphs
    for script in ppo ppo_shared ppo_continuous ppo_lstm ppo_multidiscrete; do
        python benchmark/speed/speed.py "$script" --rounds 1 --device cuda --flags=--compile --csv benchmark/results/speed/speed.csv
    done
}

atari-modes() { # ppo_atari.py; LeanRL's makes 6,809 steps/s on an H100
    for flags in "" "--compile" "--compile --amp" "--num-envs 64 --compile --amp"; do
        python benchmark/speed/speed.py ppo_atari --rounds 1 --steps 100000 --device cuda --flags="$flags" \
            --csv benchmark/results/speed/speed.csv
    done
}

decoupled() { # charts/SPS of both, with as many actors as there are cores to spare
    sizes="--num-envs 128 --num-actors 8 --batch-segments 128 --compile --total-timesteps 1000000"
    python impala_vtrace.py $sizes
    python ppo_async.py $sizes --sample-reuse 1
}

breakout() { # 10M steps, to be done in 12 minutes
    time $for_nine_minutes python benchmark/run.py atari --env-ids BreakoutNoFrameskip-v4 --seeds 1 --workers 1 \
        --flags="--compile --amp"
}

atari() { # the suites' rows
    $for_nine_minutes python benchmark/run.py atari --seeds 1..3 --workers 4 --flags="--compile --amp" || stopped=1
    python benchmark/compare.py atari --flags="--compile --amp" || [ $? = 1 ] # which says that a row is below
    [ -z "${stopped-}" ]
}

failed=
nvidia-smi | tee -a gpu.log
for part in $parts; do
    echo "== $part" | tee -a gpu.log
    set +e # here, as in "part || ...", the commands of a part would not end it
    (set -e; "$part") 2>&1 | tee -a gpu.log
    [ "${PIPESTATUS[0]}" = 0 ] || failed+=" $part"
    set -e
done
[ -z "$failed" ] || { echo "failed or stopped:$failed" | tee -a gpu.log; exit 1; }
