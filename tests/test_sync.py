"""Scripts repeat code on purpose. What has the same name in two of them is the same code, word for word,
unless the copy says why it is not:  # differs from ppo.py: <reason>  in its first comment."""

import ast
import difflib
import re
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
ORDER = (
    "ppo",
    "ppo_shared",
    "ppo_atari",
    "ppo_continuous",
    "ppo_lstm",
    "ppo_multidiscrete",
    "impala_vtrace",
    "ppo_async",
    "ngu_r2d2",
)
PARENT = dict(ppo_shared="ppo", ppo_atari="ppo", ppo_continuous="ppo")
PARENT |= dict(ppo_lstm="ppo_atari", ppo_multidiscrete="ppo_continuous")
# against the parent: docstrings, and definitions that one lacks, not counted
CHANGED_LINES = dict(ppo_shared=20, ppo_atari=95, ppo_continuous=80, ppo_lstm=150, ppo_multidiscrete=150)
LINES = dict(ppo=601, ppo_shared=598, ppo_atari=636, ppo_continuous=680, ppo_lstm=748, ppo_multidiscrete=737)
LINES |= dict(impala_vtrace=1041, ppo_async=931, ngu_r2d2=1181)
MORE_SECTIONS = dict(impala_vtrace=["Actors", "Replay"], ppo_async=["Actors"])  # after the algorithm
MORE_SECTIONS |= dict(ngu_r2d2=["Curiosity", "Replay"])


def blocks(source: str) -> dict[str, str]:
    """Top-level definitions, fields of Args, and the numbered steps of train(), by name."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        text = "\n".join(
            lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno]
        )
        if node.name in ("train", "learn"):
            setup, *steps = re.split(r"\n(?=        # \d\. )", text)
            for step in steps:
                found[f"{node.name}: " + step.split("\n")[0].strip("# ")] = step
        elif node.name == "Args":
            for name, annotation, comment in re.findall(
                r"^    (\w+): (.+?) = .*?  # (.*)$", text, re.MULTILINE
            ):
                found[f"Args.{name}"] = f"{annotation}  # {comment}"
            found |= {f"Args.{n.name}": ast.unparse(n) for n in node.body if isinstance(n, ast.FunctionDef)}
        else:
            found[node.name] = text
    return found


def canonical(script: str, name: str) -> str | None:
    """The first of the other scripts that has a block of this name."""
    others = (s for s in ORDER[: ORDER.index(script)] if name in blocks(SCRIPTS[s]))
    return next(others, None)


# what means something else in a script, and has no room for a comment of its own
OTHERWISE = {
    "impala_vtrace": ("Args.env_id", "Args.learning_rate", "Args.batch_size"),
    "ppo_async": ("Args.num_steps", "Args.new_unrolls", "Args.batch_size"),
    "ngu_r2d2": ("Args.learning_rate",),
}
PAIRS = [
    (s, name, c)
    for s in SCRIPTS
    for name in blocks(SCRIPTS[s])
    if (c := canonical(s, name)) and name not in OTHERWISE.get(s, ())
]


@pytest.mark.parametrize("script,name,parent", PAIRS)
def test_same_name_same_code(script, name, parent):
    ours, canon = blocks(SCRIPTS[script])[name], blocks(SCRIPTS[parent])[name]
    comment = re.search(r"#.*", re.sub(r"^ *# \d\. .*", "", ours))
    if not (comment and re.match(rf"# differs from {parent}\.py: \w+", comment[0])):
        diff = difflib.unified_diff(
            canon.split("\n"), ours.split("\n"), f"{parent}.py", f"{script}.py", lineterm=""
        )
        assert ours == canon, "\n".join(diff)


def test_every_block_is_compared():
    names = {name for script, name, _ in PAIRS if script == "ppo_shared"}
    assert ("ppo_lstm", "AtariEnvs", "ppo_atari") in PAIRS and set(SCRIPTS) == set(ORDER)
    assert {
        "fail",
        "compute_gae",
        "ppo_loss",
        "Logger",
        "evaluate",
        "Args.seed",
        "train: 1. rollout",
    } <= names
    assert len([n for n in names if n.startswith("train: ")]) == 4


@pytest.mark.parametrize("script,budget", CHANGED_LINES.items())
def test_diff_against_parent(script, budget):
    """Changed lines: the longer side of each hunk; definitions that only one of the two has do not count."""
    ours, parent = SCRIPTS[script], SCRIPTS[PARENT[script]]
    mine, theirs = blocks(ours), blocks(parent)
    for name in mine.keys() - theirs.keys():
        ours = ours.replace(mine[name], "")
    for name in theirs.keys() - mine.keys():
        parent = parent.replace(theirs[name], "")
    a, b = (source.split('"""', 2)[2].splitlines() for source in (parent, ours))
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    changed = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in opcodes if tag != "equal")
    assert changed <= budget, f"{changed} lines differ from {PARENT[script]}.py, {budget} allowed"


def header_of(script):
    """The PEP 723 header, as uv reads it."""
    block = SCRIPTS[script].split("# ///")[1]
    return tomllib.loads("\n".join(re.findall(r"^# ?(.*)$", block, re.MULTILINE)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_stands_alone(script):
    """Only the standard library and packages of the PEP 723 header are imported; optional ones lazily."""
    tree = ast.parse(SCRIPTS[script])
    header = header_of(script)
    allowed = {re.split(r"[\[>=<]", d)[0].replace("-", "_") for d in header["dependencies"]} | set(
        sys.stdlib_module_names
    )
    top, lazy = set(), set()
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        (top if node in tree.body else lazy).update(name.split(".")[0] for name in names)
    assert top <= allowed and not top & set(SCRIPTS)
    assert lazy <= {"wandb", "moviepy"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_header_agrees_with_pyproject(script):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    header = header_of(script)
    ranges = set(project["dependencies"]).union(*project["optional-dependencies"].values())
    assert set(header["dependencies"]) <= ranges
    assert project["requires-python"].startswith(header["requires-python"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_house_style(script):
    source = SCRIPTS[script]
    assert len(source.splitlines()) <= LINES[script]
    assert max(map(len, source.splitlines())) <= 110
    sections = re.findall(r"^# === (.+?) =+$", source, re.MULTILINE)
    expected = [
        "Arguments",
        "Environment",
        "Agent",
        "Algorithm",
        *MORE_SECTIONS.get(script, []),
        "Logging and checkpoints",
        "Training",
        "Evaluation",
    ]
    assert sections == expected
    assert not re.search(r"except:|except Exception|time\.time\(\) *%", source)
    fields = re.search(r"class Args:\n(.*?)\n    @property", source, re.DOTALL)[1].splitlines()
    assert all("  # " in line for line in fields if ": " in line and not line.strip().startswith("#"))


def numbers(pattern: str, text: str) -> set[int]:
    """Of tags such as  # detail 5: ...  and  # details 28 and 29: ..."""
    return {
        int(n) for tag in re.findall(pattern + r"s? (\d+(?: and \d+)?)", text) for n in tag.split(" and ")
    }


def test_libgomp_is_told_how_long_to_spin_before_it_is_loaded():
    told = {s: text.index("GOMP_SPINCOUNT") for s, text in SCRIPTS.items() if "GOMP_SPINCOUNT" in text}
    assert told.keys() == {"ppo_atari", "ppo_lstm", "ppo_async", "impala_vtrace"}
    assert all(
        at < re.search("^(import|from) (torch|gymnasium)", SCRIPTS[s], re.M).start() for s, at in told.items()
    )


def test_details_are_tagged():
    tags = {s: numbers("(?<!auxiliary )detail", text) for s, text in SCRIPTS.items()}
    assert tags["ppo"] == tags["ppo_shared"] == set(range(1, 14))
    assert tags["ppo_atari"] == set(range(1, 23)) - {13}  # its network is that of detail 21
    assert tags["ppo_continuous"] == set(range(1, 32)) - set(range(13, 23))  # detail 26 is 13 again
    assert tags["ppo_lstm"] == set(range(1, 23)) - {13} | set(range(32, 37))
    assert tags["ppo_multidiscrete"] == set(range(1, 13)) | {28, 29, 30, 31, 37}
    auxiliary = {s: numbers("auxiliary detail", text) for s, text in SCRIPTS.items() if s.startswith("ppo")}
    assert all({1, 2, 3} <= found for found in auxiliary.values()) and 4 in auxiliary["ppo_multidiscrete"]
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert numbers("def test_detail", tests.replace("test_detail_", "test_detail ")) == set(range(1, 38))
    assert numbers("def test_auxiliary", tests.replace("auxiliary_detail_", "auxiliary ")) == {1, 2, 3, 4}
