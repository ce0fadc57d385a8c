"""The tool that changes scripts to see whether tests notice: its changes, and the processes of its tests."""

import csv
import os
import time
from pathlib import Path

import mutants
import mutations
import pytest

ROOT = Path(__file__).parent.parent
SOURCE = '''"""A script."""

limit = 1 + 1

# === Arguments ===============================================================


def no(x):
    return x + 1


# === Algorithm ===============================================================


def f(x: int = 0, *rest, end=None):
    """A docstring - with words."""
    if not x and end is None:  # and a comment
        x += min(x[-2:], abs(rest))
        fail(f"{x + 1}")
    return g(x, rest, axis=True) - (x) * 0.5


# === From here on nothing is the algorithm's =================================


def plumbing(x):
    return x + 1


class Run:
    def count_steps(self, n):
        self.step += n
'''
EXPECTED = """
def f(x: int = 1, *rest, end=None):
if x and end is None: # and a comment
if (not (not x and end is None)): # and a comment
if not x or end is None: # and a comment
if not x and end is not None: # and a comment
pass
x -= min(x[-2:], abs(rest))
x += max(x[-2:], abs(rest))
x += min(x[2:], abs(rest))
x += min(x[-3:], abs(rest))
x += min(x[:], abs(rest))
return g(x, rest, axis=True) + (x) * 0.5
return g(x, rest, axis=True) - (x) / 0.5
return g(x, rest, axis=True) - (x) * 1.5
return g(rest, x, axis=True) - (x) * 0.5
return g(x, rest) - (x) * 0.5
return g(x, rest, axis=False) - (x) * 0.5
self.step -= n
pass
"""


def test_each_mutant_has_one_change_of_the_algorithm():
    made = list(mutations.mutants(SOURCE))
    assert sorted(x.after for x in made) == sorted(EXPECTED.strip().split("\n"))
    for mutant in made:
        compile(mutant.source, "mutant", "exec")
        pairs = zip(SOURCE.split("\n"), mutant.source.split("\n"), strict=True)
        changed = [(number, b.strip()) for number, (a, b) in enumerate(pairs, 1) if a != b]
        assert [number for number, _ in changed] == [mutant.line] and mutant.line in mutant.lines
        assert " ".join(changed[0][1].split()) == mutant.after


def test_a_copy_gets_the_same_change():
    source = "# === Agent ===\n\n\ndef f(x):\n    x += 1\n    x += 1\n\n\ndef g(x):\n    x += 1\n"
    other = "def g(x):\n    x += 1\n\n\ndef f(y):\n    x += 1\n    x += 1\n"
    second = next(x for x in mutations.mutants(source) if x.line == 6 and "-" in x.after)
    assert mutations.in_copy(second, source, source) == second.source
    assert mutations.in_copy(second, source, other) == other.removesuffix("x += 1\n") + "x -= 1\n"
    alone = other.removesuffix("    x += 1\n")  # it does not have the line as often
    assert mutations.in_copy(second, source, alone) == alone


@pytest.mark.parametrize("word", ["end", "died", "hang"])
def test_a_test_passes_dies_or_hangs(word, tmp_path):
    def work(tell):
        tell("start", "one")
        if word == "end":
            tell("end", 0)
        else:
            os._exit(1) if word == "died" else time.sleep(60)

    words = list(mutants.in_child(work, tmp_path / "log.txt", lambda test: 0.5 if word == "hang" else 60))
    assert words == [("start", "one"), (word, "0" if word == "end" else "one")]


def test_equivalent_mutants_are_of_lines_that_exist():
    with mutants.EQUIVALENT.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            scripts = ROOT.glob("*.py" if row["script"] == "*" else row["script"])
            assert any(
                row["before"] in " ".join(path.read_text(encoding="utf-8").split()) for path in scripts
            ), row
            assert row["reason"] and row["after"] != row["before"]
