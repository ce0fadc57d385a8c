"""Whether scripts train as they did in other builds: the same episodes and losses, bit for bit.

    python benchmark/same.py 3d9e99a ppo --total-timesteps 20000     # a commit, a script and its flags
    python benchmark/same.py recorded --total-timesteps 20000        # builds and scripts of the results

Both versions run with the same flags in temporary folders, and all that both log is compared, except rates
and times. Flags that were renamed are given to each version as it calls them. `recorded` takes one run of
each suite, script, task and commit that runs.csv names, with the flags of its command; actors act in turn
there (--sync). Rows of Gym-microRTS are left out where that is not installed. Exit code 0 if all agree, 1 if
not.
"""

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.files import fail, read_csv  # noqa: E402
from benchmark.suites import RENAMED  # noqa: E402

OF_TIME = ("SPS", "wait", "queue_fill", "seconds")  # parts of the names of what depends on the speed


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


def logged(source: str, script: str, flags: list[str]) -> dict[str, list[tuple[int, str]]]:
    """Steps and values of all that a run of a script logs, by name. NaN is equal to itself here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{script}.py")
        path.write_text(source, encoding="utf-8")
        if "--artificial-delay" in flags and "artificial_delay" not in source:
            path = ROOT / "benchmark/studies/staleness.py"  # which has that flag now
        command = [sys.executable, path, "--device", "cpu", *flags_of(source, script, flags)]
        environment = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            fail(f"{script}.py ended with {done.returncode}: {done.stderr[-300:]}")
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
            elif row["machine"] and "|" not in row["commit"]:  # others' builds are not known, or several
                found.setdefault(key, (row["commit"], row["script"], flags))
    return list(found.values())


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or len(sys.argv) == 2 and sys.argv[1] != "recorded":
        fail("give a commit, a script and its flags, such as: 3d9e99a ppo --total-timesteps 20000")
    if sys.argv[1] == "recorded":
        runs = [(*run, [*flags, *sys.argv[2:]]) for *run, flags in recorded(ROOT / "benchmark/results")]
    else:
        runs = [(sys.argv[1], sys.argv[2].removesuffix(".py"), sys.argv[3:])]
    results = [agrees(*run) for run in runs]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
