"""Mutants: do the tests see a small change of an algorithm?

    python tests/helpers/mutants.py ppo.py                         # all mutants of ppo.py: an hour or more
    python tests/helpers/mutants.py ppo.py --sample 60 --seed 0    # 60 of them, drawn at random
    python tests/helpers/mutants.py ppo.py:compute_gae,ppo_loss    # those of two functions
    python tests/helpers/mutants.py ppo.py --sample 60 --slow      # survivors meet the slow tests, too
    python tests/helpers/mutants.py ppo.py --sample 60 --again     # survivors anew, as tests became better

A mutant is a script with one change of its algorithm, such as `<` for `<=`, a keyword less, or a statement
deleted (mutations.py). Other scripts that have the line in a function of that name get the change, too: else
tests that compare two scripts would notice. All happens in a temporary copy of the tree: files may be edited
meanwhile, several scripts may be tried at once, and tests that start processes meet the mutant, too.

1. Each file of tests runs once under coverage: which lines of the scripts does each test run, and how long?
   (FOLDER/recorded/*.json; anew when it or a script that it runs has changed. Tests that fail are left out.)
2. Each mutant meets the tests that run its line, the quickest first, until one fails. A process that has
   imported PyTorch forks for each mutant. A test that takes 5 times as long as before, and 15 s, hangs.
3. The tests that killed then run without a mutant. If one fails then, too, its mutants are tried without it.

FOLDER/SCRIPT.csv has a row for each mutant; a run that was stopped goes on where it was. Mutants that do what
the script does stand in equivalent_mutants.csv with the reason, and are not tried. Other tools do not fit:
cosmic-ray runs all tests for each mutant in a new process, mutmut leaves out decorated functions as train().
"""

import argparse
import ast
import contextlib
import csv
import functools
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import coverage
import mutations
import pytest
from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.csv")  # script (* for all), before, after, reason
COLUMNS = ["line", "before", "after", "operator", "status", "test", "tests", "slow", "seconds"]
# These compare texts (a mutant differs from the copies in other scripts), or are not about the scripts.
NOT_RUN = "sync readme research benchmark report verdict watch on_ray speed gpu mutants".split()


class Recorder:
    """Plugin of pytest: the lines of the scripts that each test runs, also in fixtures that it shares."""

    def __init__(self, folder, settings):
        self.folder, self.entries, self.outcomes = folder, {}, {}
        self.coverage = coverage.Coverage(data_file=None, config_file=str(settings))
        self.coverage.start()

    @contextlib.contextmanager
    def measured(self, name, then="", **more):
        start, entry = time.monotonic(), self.entries.setdefault(name, dict(lines={}, **more))
        self.coverage.switch_context(name)
        yield
        self.coverage.switch_context(then)
        entry["seconds"] = time.monotonic() - start
        for path in self.folder.glob(".coverage.*"):  # of processes that have ended
            data = coverage.CoverageData(path)
            data.read()
            for script in data.measured_files():
                entry["lines"].setdefault(Path(script).name, set()).update(data.lines(script))
            path.unlink()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test = item.nodeid
        for x in vars(item.module).values():  # else a run that tests share would count for the first of them
            if isinstance(x, functools._lru_cache_wrapper):
                x.cache_clear()
        with self.measured(item.nodeid, fixtures=[f"fixture {name}" for name in item.fixturenames]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        with contextlib.ExitStack() as stack:
            if fixturedef.scope != "function":
                stack.enter_context(self.measured(f"fixture {fixturedef.argname}", then=self.test))
            return (yield)

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def result(self):
        """Seconds and lines of the tests that passed, those that failed, and lines that imports run."""
        self.coverage.stop()
        data, imported, tests = self.coverage.get_data(), {}, {}
        for path in data.measured_files():
            for line, names in data.contexts_by_lineno(path).items():
                for name in names:
                    lines = self.entries[name]["lines"] if name else imported
                    lines.setdefault(Path(path).name, set()).add(line)
        for test, entry in self.entries.items():
            if "fixtures" in entry and test not in self.outcomes:
                shared = [self.entries[name] for name in entry["fixtures"] if name in self.entries]
                tests[test] = dict(seconds=entry["seconds"], shared=sum(x["seconds"] for x in shared))
                tests[test]["lines"] = union(entry["lines"], *(x["lines"] for x in shared))
        failed = [test for test, outcome in self.outcomes.items() if outcome == "failed"]
        return dict(tests=tests, failed=failed, imported=union(imported))


def union(*lines):
    """{script: numbers} of several, sorted."""
    return {
        script: sorted(set().union(*(x.get(script, ()) for x in lines))) for script in set().union(*lines)
    }


class Chosen:
    """Plugin of pytest: runs these tests alone, in their order, and tells of each that begins or fails."""

    def __init__(self, tests, tell):
        self.order, self.tell = {test: number for number, test in enumerate(tests)}, tell

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((x for x in items if x.nodeid in self.order), key=lambda x: self.order[x.nodeid])

    def pytest_runtest_logstart(self, nodeid):
        self.tell("start", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tell("failed", report.nodeid)


def in_child(work, log, patience):
    """Forks; yields (word, test) as work(tell) tells them, until it ends, dies or is silent for too long."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream, to in enumerate((os.open(os.devnull, os.O_RDONLY), out, out)):
                os.dup2(to, stream)
            work(lambda word, test="": os.write(writer, f"{word} {test}\n".encode()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    word, test, text = "begin", "", b""
    try:
        while word not in ("end", "died", "hang"):
            if b"\n" in text:
                line, text = text.split(b"\n", 1)
                word, test = line.decode().split(" ", 1)
                yield word, test
            elif select.select([reader], [], [], patience(test))[0]:
                text += os.read(reader, 65536) or f"died {test}\n".encode()
            else:
                text = f"hang {test}\n".encode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)


class Tree:
    """A temporary copy of the tree in which tests run, and what is known of them."""

    def __init__(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        self.folder = Path(self.temporary.name)
        self.path, self.settings, self.log = (self.folder / x for x in ("tree", "coverage.ini", "log.txt"))
        self.tests, self.imported, self.failed, self.clock = {}, {}, [], time.time()
        git = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(git, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.path / name)
        settings = [
            "[run]",
            "core = ctrace",
            "parallel = true",
            f"data_file = {self.folder}/.coverage",
            "include =",
        ]
        self.settings.write_text("\n    ".join(["\n".join(settings), *map(str, self.path.glob("*.py"))]))
        os.environ |= dict(PYTHONPATH=str(self.path), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self.sources = {path.name: path.read_text(encoding="utf-8") for path in self.path.glob("*.py")}
        self.import_packages()

    def import_packages(self):
        """What scripts and tests import, but for what is in the tree, so that a forked process has it."""
        sources = [*self.path.glob("*.py"), *self.path.glob("tests/**/*.py")]
        local, names = {path.stem for path in sources}, set()
        for path in sources:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names |= {x.name for x in node.names} if isinstance(node, ast.Import) else set()
                names |= {node.module} if isinstance(node, ast.ImportFrom) and not node.level else set()
        for name in sorted(names):
            if name.split(".")[0] not in local:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)

    def pytest(self, plugin, *flags):
        os.chdir(self.path)
        flags = ["-q", "-p", "no:cacheprovider", f"--basetemp={self.folder}/tmp", *flags]
        return int(pytest.main(flags, [plugin]))

    def record(self, folder, slow):
        """Records files of tests that are new or changed, or run a changed script; reads all records."""
        folder.mkdir(parents=True, exist_ok=True)
        for wait in (0, -1):  # at first those at which no other process works
            for path in sorted(self.path.glob("tests/test_*.py")):
                if path.stem.removeprefix("test_") in NOT_RUN:
                    continue
                record = folder / f"{path.stem}{'.slow' if slow else ''}.json"
                with contextlib.suppress(Timeout), FileLock(record.with_suffix(".lock"), timeout=wait):
                    if not self.is_fresh(record):
                        print(f"recording {record.stem}", flush=True)
                        self.record_file(path, record, slow)
                    if wait:
                        self.read(record, slow)

    def read(self, record, slow):
        result = json.loads(record.read_text(encoding="utf-8"))
        self.tests |= {test: x | {"slow": slow} for test, x in result["tests"].items()}
        self.imported = union(self.imported, result["imported"])
        self.failed += result["failed"]

    def digest(self, name):
        path = self.path / name
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else None

    def is_fresh(self, record):
        files = json.loads(record.read_text(encoding="utf-8"))["files"].items() if record.exists() else []
        return bool(files) and all(self.digest(name) == digest for name, digest in files)

    def record_file(self, path, record, slow):
        def work(tell):
            os.environ["COVERAGE_PROCESS_START"] = str(self.settings)
            recorder = Recorder(self.folder, self.settings)
            self.pytest(recorder, "-m", "slow" if slow else "not slow", str(path))
            result = recorder.result()
            names = {"tests/conftest.py", f"tests/{path.name}"}.union(
                *(x["lines"] for x in result["tests"].values())
            )
            result["files"] = {name: self.digest(name) for name in sorted(names)}
            record.write_text(json.dumps(result), encoding="utf-8")
            tell("end")

        words = [word for word, _ in in_child(work, self.log, lambda test: 3600)]
        assert words == ["end"], self.log.read_text(encoding="utf-8")

    def tests_of(self, script, mutant):
        """Tests that run a mutant's line, the quickest first; if imports do, those of its function."""
        lines, imported = set(range(mutant.first, mutant.line + 1)), set(self.imported.get(script, ()))
        if mutant.first in imported:  # of what stands in no function, all tests of the script
            lines = set(mutant.lines) - imported or set(range(self.sources[script].count("\n"))) - imported
        tests = [x for x in self.tests if lines & set(self.tests[x]["lines"].get(script, ()))]
        return sorted(tests, key=self.cost)

    def cost(self, test):
        """A key for sorting. Tests that share a fixture stay together: a test of another file ends it."""
        x = self.tests[test]
        return (x["shared"], test.split("::")[0], x["seconds"]) if x["shared"] > 1 else (x["seconds"], "", 0)

    def write(self, sources):
        """Writes scripts. By the time in whole seconds, Python tells whether its bytecode is old."""
        for name, source in sources.items():
            if (self.path / name).read_text(encoding="utf-8") != source:
                self.clock += 10
                (self.path / name).write_text(source, encoding="utf-8")
                os.utime(self.path / name, (self.clock, self.clock))

    def run(self, tests, script=None, mutant=None):
        """Lets tests run with a mutant of a script and of its copies: a status, and the test that killed."""
        original = self.sources.get(script)
        copies = (
            {x: mutations.in_copy(mutant, original, y) for x, y in self.sources.items()} if mutant else {}
        )
        self.write(self.sources | copies | ({script: mutant.source} if mutant else {}))

        def work(tell):
            files = dict.fromkeys(test.split("::")[0] for test in tests)
            tell("end", self.pytest(Chosen(tests, tell), "-x", *files))

        def patience(test):
            x = self.tests.get(test)
            return 15 + 5 * (x["seconds"] + x["shared"]) if x else 120  # to import

        for word, test in in_child(work, self.log, patience):
            if word in ("failed", "died", "hang"):
                return "timeout" if word == "hang" else "killed", test or "import"
        return ("survived", "") if test == "0" else ("killed", "import")


def equivalents(script):
    with EQUIVALENT.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["script"] in (script, "*")]
    return {(row["before"], row["after"]): row["reason"] for row in rows}


def try_mutants(tree, script, mutants, args):
    """{key of a mutant: its row of SCRIPT.csv}; those that were not tried yet are tried."""
    path, known = args.folder / f"{script}.csv", {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            known = {(row["line"], row["before"], row["after"]): row for row in csv.DictReader(file)}
    stale = {"again"} | ({"survived"} if args.again else set())
    done = {key: row for key, row in known.items() if row["status"] not in stale}
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        untrusted, is_checked = set(), False
        while not is_checked:
            for number, mutant in enumerate(mutants, 1):
                row, start = done.get(mutant.key), time.monotonic()
                is_slow = bool(row) and row["status"] == "survived" and args.slow and row["slow"] == "no"
                if row and not is_slow:
                    continue
                passed = int(row["tests"]) if is_slow else 0
                tests = [x for x in tree.tests_of(script, mutant) if x not in untrusted]
                tests = [x for x in tests if tree.tests[x]["slow"] or not is_slow]  # the others have passed
                status, test = tree.run(tests, script, mutant) if tests else ("survived", "")
                row = dict(zip(COLUMNS, (*mutant.key, mutant.operator, status, test), strict=False))
                row |= dict(tests=passed + len(tests), slow="yes" if args.slow else "no")
                done[mutant.key] = row | dict(seconds=round(time.monotonic() - start, 1))
                writer.writerow(done[mutant.key])
                file.flush()
                place = f"{script}:{mutant.line} {mutant.operator}"
                print(f"{number}/{len(mutants)} {place}: {status} {test}", flush=True)
            killers = {done[x.key]["test"] for x in mutants} & tree.tests.keys() - untrusted
            killers = sorted(killers or tree.tests, key=tree.cost)[: len(killers) or 1]
            status, test = tree.run(killers)
            is_checked = status == "survived"
            if not is_checked:
                assert test in killers, tree.log.read_text(encoding="utf-8")
                print(f"{test} fails without a mutant: left out", flush=True)
                untrusted.add(test)
                for key in [key for key, row in done.items() if row["test"] == test]:
                    writer.writerow(done.pop(key) | dict(status="again"))
    return {mutant.key: done[mutant.key] for mutant in mutants}


def report(script, mutants, rows, reasons):
    """Prints survivors and equivalents as lines of a diff, and the counts."""
    count, unseen = Counter(), 0
    for mutant in sorted(mutants, key=lambda x: x.line):
        row, reason = rows.get(mutant.key), reasons.get((mutant.before, mutant.after))
        count[row["status"] if row else "equivalent"] += 1
        unseen += bool(row) and row["status"] == "survived" and int(row["tests"]) == 0
        if not row or row["status"] == "survived":
            words = f"{row['tests']} tests passed" if row else f"equivalent: {reason}"
            print(f"\n@@ {script}:{mutant.line} {mutant.operator}; {words}")
            print(f"- {mutant.before}\n+ {mutant.after}")
    killed, seconds = count["killed"] + count["timeout"], sum(float(row["seconds"]) for row in rows.values())
    equivalent, hung, survived = count["equivalent"], count["timeout"], count["survived"]
    print(f"\n{script}: {len(mutants)} made, {equivalent} equivalent, {killed} killed ({hung} by a timeout),")
    print(f"{survived} survived ({unseen} on lines that no test runs);", end=" ")
    print(f"{100 * killed / max(len(rows), 1):.1f} % killed, in {seconds:.0f} s")


def main():
    about = dict(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(**about)
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT", help="ppo.py, or ppo.py:compute_gae,ppo_loss")
    parser.add_argument("--sample", type=int, help="draw that many mutants of each script")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--slow", action="store_true", help="let survivors meet the slow tests, too")
    parser.add_argument("--again", action="store_true", help="try survivors anew")
    parser.add_argument("--folder", type=Path, default=ROOT / "mutants", help="records and results")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the copy, and ends what runs in it
    tree = Tree()
    for slow in (False, True)[: 1 + args.slow]:
        tree.record(args.folder / "recorded", slow)
    if tree.failed:
        print("left out, as they fail:", *tree.failed, sep="\n    ")
    for name in args.scripts:
        script, _, functions = name.partition(":")
        mutants = list(mutations.mutants(tree.sources[script], functions.split(",")))
        random.Random(args.seed).shuffle(mutants)
        mutants, reasons = mutants[: args.sample], equivalents(script)
        rows = try_mutants(tree, script, [x for x in mutants if (x.before, x.after) not in reasons], args)
        report(script, mutants, rows, reasons)


if __name__ == "__main__":
    sys.path.pop(0)  # the helpers of the copy are meant
    main()
