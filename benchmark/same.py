"""This tree beside a commit: whether scripts train as they did, bit for bit, or how much CPU time they take.

    python benchmark/same.py 3d9e99a ppo --total-timesteps 20000     # a commit, a script and its flags
    python benchmark/same.py recorded --total-timesteps 20000        # builds and scripts of the results
    python benchmark/same.py --cpu-time 5 --csv mine.csv 3d9e99a ppo --total-timesteps 150000

Both versions run with the same flags in temporary folders, and all that both log is compared, except rates
and times. Flags that were renamed are given to each version as it calls them. `recorded` takes one run of
each suite, script, task and commit that runs.csv names, with the flags of its command; actors act in turn
there (--sync). A script whose defaults have changed since differs. Rows of Gym-microRTS are left out where
that is not installed. Exit code 0 if all agree, 1 if not.

With --cpu-time ROUNDS, logs are not compared. Both versions run ROUNDS times, in turn, and the medians of the
CPU seconds of whole runs and their ratio are printed; --csv FILE gets a row. CPU seconds count all threads
and the start, and depend less on what else runs on the machine than steps per second do. Both options come
before the commit, because all that follows the script is the script's.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import run  # noqa: E402
from benchmark.files import fail, python_path, read_csv  # noqa: E402
from benchmark.speed.speed import append  # noqa: E402
from benchmark.suites import RENAMED  # noqa: E402

OF_TIME = ("SPS", "wait", "queue_fill", "seconds")  # parts of the names of what depends on the speed


@dataclass
class Args:
    cpu_time: int | None = None  # runs of each version whose CPU seconds are measured; None compares logs
    csv: Path | None = None  # file to append the CPU seconds to


def source_of(build: str, script: str) -> str:
    """A script as it was in a commit."""
    shown = subprocess.run(["git", "show", f"{build}:{script}.py"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        fail(f"{script}.py of {build}: {shown.stderr}")
    return shown.stdout


def flags_of(source: str, script: str, flags: list[str]) -> list[str]:
    """Flags as this version of a script calls them."""
    names = {}
    for now, then in RENAMED.get(script, {}).items():
        has_now = re.search(rf"^    {now.replace('-', '_')}: ", source, re.MULTILINE)
        names |= {f"--{then}": f"--{now}"} if has_now else {f"--{now}": f"--{then}"}
    return [names.get(flag, flag) for flag in flags]


def train(folder: str, source: str, script: str, flags: list[str], **variables: str):
    """A whole run of this version of a script in a folder, with more environment variables."""
    Path(folder, f"{script}.py").write_text(source, encoding="utf-8")
    program = [f"{script}.py"]
    if "--artificial-delay" in flags and "artificial_delay" not in source:
        study = str(
            ROOT / "benchmark/studies/staleness.py"
        )  # has that flag now, and takes the folder's script
        program = ["-c", f"import {script}, runpy; runpy.run_path({study!r}, run_name='__main__')"]
    command = [sys.executable, *program, *flags_of(source, script, flags)]
    environment = os.environ | dict(PYTHONPATH=python_path(ROOT)) | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        fail(f"{script}.py ended with {done.returncode}: {done.stderr[-300:]}")


def logged(source: str, script: str, flags: list[str]) -> dict[str, list[tuple[int, str]]]:
    """Steps and values of all that a run of a script logs, by name. NaN is equal to itself here."""
    with tempfile.TemporaryDirectory() as folder:
        train(folder, source, script, ["--device", "cpu", *flags], OMP_NUM_THREADS="1")
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        tags = [tag for tag in events.Tags()["scalars"] if not any(part in tag for part in OF_TIME)]
        return {tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in tags}


def agrees(build: str, script: str, flags: list[str]) -> bool:
    """Compares a script with itself in a commit, and prints what came out."""
    before = logged(source_of(build, script), script, flags)
    now = logged((ROOT / f"{script}.py").read_text(encoding="utf-8"), script, flags)
    different = sorted(tag for tag in before if tag in now and before[tag] != now[tag])
    verdict = f"differs in {', '.join(different)}" if different else "the same"
    gone = sorted(before.keys() - now.keys())  # new tags are no difference, nor are those that went
    verdict += f", without {', '.join(gone)}" if gone else ""
    values = sum(map(len, now.values()))
    print(f"{build} {script}.py {' '.join(flags)}: {values} values, {verdict}", flush=True)
    return not different


def cpu_seconds(source: str, script: str, flags: list[str]) -> float:
    """Seconds that all threads of a run take together."""
    import resource  # here, as Windows has none

    with tempfile.TemporaryDirectory() as folder:
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        train(folder, source, script, flags)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def measure(build: str, script: str, flags: list[str], args: Args):
    """Prints CPU seconds of a script and of itself in a commit, and appends them to the CSV."""
    before = source_of(build, script)
    sources = dict(before=before, now=(ROOT / f"{script}.py").read_text(encoding="utf-8"))
    seconds = dict(before=[], now=[])
    for k in range(args.cpu_time):
        for name in ("before", "now") if k % 2 == 0 else ("now", "before"):
            seconds[name].append(cpu_seconds(sources[name], script, flags))
    medians = {f"{name}_s": round(median(x), 2) for name, x in seconds.items()}
    ratio = round(medians["now_s"] / medians["before_s"], 3)
    print(f"{script}.py: {medians['now_s']} s of CPU time, {medians['before_s']} in {build}; {ratio}")
    row = dict(date=date.today(), script=f"{script}.py", flags=shlex.join(flags), rounds=args.cpu_time)
    row |= dict(before=build) | medians | dict(ratio=ratio)
    if args.csv:
        append(args.csv, row | run.build() | run.machine())


def recorded(results: Path) -> list[tuple[str, str, list[str]]]:
    """Commit, script and flags of one run of each suite, script, task and commit."""
    found = {}
    for table in sorted(results.glob("*/runs.csv")):
        for row in read_csv(table):
            key = (table.parent.name, row["script"], row["env_id"], row["commit"])
            flags = row["command"].split()[2:]
            if row["script"] in ("impala_vtrace", "ppo_async"):
                flags = [flag for flag in flags if flag != "--sync"] + ["--sync"]
            if "microrts" in row["env_id"] and not find_spec("gym_microrts"):
                print(f"left out, as gym_microrts is missing: {row['run']}")
            elif f"{row['script']}.py" in row["changed"].replace(",", " ").split():
                print(f"left out, as its commit had another {row['script']}.py: {row['run']}")
            elif row["machine"] and "|" not in row["commit"]:  # others' builds are not known, or several
                found.setdefault(key, (row["commit"], row["script"], flags))
    return list(found.values())


def parse(words: list[str]) -> tuple[Args, list[str]]:
    """The options, each with a value, that come before the commit, and all words from the commit on."""
    k = 0
    while k < len(words) and words[k].startswith("-"):
        k += 1 if "=" in words[k] else 2
    return tyro.cli(Args, args=words[:k], description=__doc__), words[k:]


def main():
    args, words = parse(sys.argv[1:])
    if not words or len(words) == 1 and words[0] != "recorded":
        fail("give a commit, a script and its flags, such as: 3d9e99a ppo --total-timesteps 20000")
    if args.csv and args.cpu_time is None:
        fail("--csv needs --cpu-time")
    if args.cpu_time is not None and args.cpu_time < 1:
        fail("--cpu-time must be at least 1")
    if args.cpu_time and words[0] == "recorded":
        fail("--cpu-time takes a commit, a script and its flags")
    if words[0] == "recorded":
        runs = [(*which, [*flags, *words[1:]]) for *which, flags in recorded(ROOT / "benchmark/results")]
    else:
        runs = [(words[0], words[1].removesuffix(".py"), words[2:])]
    if args.cpu_time:
        measure(*runs[0], args)
    else:
        results = [agrees(*which) for which in runs]
        sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
