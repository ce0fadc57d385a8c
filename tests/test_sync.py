"""Scripts repeat code on purpose. What has the same name in two of them is the same code, word for word,
unless OTHERWISE says why it is not. Below the line, where nothing is the algorithm's, only checks are not."""

import ast
import difflib
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
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
SCRIPTS = {script: (ROOT / f"{script}.py").read_text(encoding="utf-8") for script in sorted(ORDER)}
LINE = "# === From here on nothing is the algorithm's: the run's folder, its processes, the command line ==="
# below the line: what a script says of its own arguments and environments
CHECKS = {"check", "check_spaces", "check_game", "check_tasks", "warn_of_lag"}
FIXED = re.compile(r"FIXED = \(.*?\)  # what --resume cannot change", re.DOTALL)
FEWER = dict.fromkeys(("impala_vtrace", "ppo_async", "ngu_r2d2"), {"compiled"})  # no CUDA graphs
LARGE = ("ppo_atari", "ppo_lstm", "impala_vtrace", "ppo_async", "ngu_r2d2")
MORE = dict.fromkeys(LARGE, {"keep_freed_memory"})
PARENT = dict(ppo_shared="ppo", ppo_atari="ppo", ppo_continuous="ppo")
PARENT |= dict(ppo_lstm="ppo_atari", ppo_multidiscrete="ppo_continuous")
# against the parent: docstrings, and definitions that one lacks, not counted
CHANGED_LINES = dict(ppo_shared=20, ppo_atari=95, ppo_continuous=60, ppo_lstm=130, ppo_multidiscrete=120)
MORE_SECTIONS = dict(impala_vtrace=["Actors", "Replay"], ppo_async=["Actors"])  # after the algorithm
MORE_SECTIONS |= dict(ngu_r2d2=["Curiosity", "Replay"])


@functools.cache
def blocks(source: str) -> dict[str, str]:
    """Top-level definitions, fields of Args, and the parts of train() and learn(), by name."""
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
            found |= setup_blocks(node, lines)
            for step in re.split(r"\n(?=        # \d\. )", text)[1:]:
                found[f"{node.name}: " + step.split("\n")[0].strip("# ")] = step
        elif node.name == "Args":
            for name, annotation, comment in re.findall(
                r"^    (\w+): (.+?) = .*?  # (.*)$", text, re.MULTILINE
            ):
                found[f"Args.{name}"] = f"{annotation}  # {comment}"
            for method in (n for n in node.body if isinstance(n, ast.FunctionDef)):
                found[f"Args.{method.name}"] = "\n".join(lines[method.lineno - 1 : method.end_lineno])
        else:
            found[node.name] = text
    return found


def setup_blocks(function: ast.FunctionDef, lines: list[str]) -> dict[str, str]:
    """Statements of train() or learn() before the step "# 1.", with their comments, by what they set or call.

    Names begin with "setup", and with "iteration" at the head of the loop over iterations: in train() as in
    learn(), for some scripts need two functions for what ppo.py does in one.
    """
    steps = [n for n in range(function.lineno, function.end_lineno) if re.match(r" {8}# 1\. ", lines[n])]
    end = steps[0] if steps else function.end_lineno
    loops = [x for x in function.body if isinstance(x, ast.For) and x.lineno <= end < x.end_lineno]
    found = {}
    for place, statements in (("setup", function.body), ("iteration", loops[0].body if loops else [])):
        for statement in statements:
            if statement in loops or statement.lineno > end:
                continue
            first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            while lines[first - 2].strip().startswith("#"):
                first -= 1
            name = f"{place}: {name_of(statement)}"
            text = "\n".join(lines[first - 1 : statement.end_lineno])
            found[name] = f"{found[name]}\n{text}" if name in found else text
    return found


def name_of(statement: ast.stmt) -> str:
    """What a statement sets, defines, calls or asks."""
    if isinstance(statement, ast.FunctionDef):
        return f"{statement.name}()"
    if isinstance(statement, ast.Assign):
        return ", ".join(map(ast.unparse, statement.targets))
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func)
    return ast.unparse(statement).split("\n")[0]


def canonical(script: str, name: str) -> str | None:
    """The first of the other scripts that has a block of this name."""
    return next((s for s in ORDER[: ORDER.index(script)] if name in blocks(SCRIPTS[s])), None)


def below(script: str) -> dict[str, str]:
    """Definitions and constants below the line, by name."""
    return blocks(SCRIPTS[script].split(LINE)[1])


def is_copied(script: str, name: str) -> bool:
    """Whether a block is as in the first script that has it; a statement of the set-up: as in any before."""
    before = [s for s in ORDER[: ORDER.index(script)] if name in blocks(SCRIPTS[s])]
    before = before if name.startswith(("setup", "iteration")) else before[:1]
    return blocks(SCRIPTS[script])[name] in [blocks(SCRIPTS[s])[name] for s in before]


# blocks above the line that are not those of an earlier script, and why
OTHERWISE = {
    "ppo_shared": {
        "Agent": "one network with two heads",
    },
    "ppo_atari": {
        "Args.env_kwargs": "games take three",
        "make_env": "Atari games only",
        "Agent": "convolutions, shared by policy and value",
        "setup: act()": "keeps log-probabilities and values, as the network is slow",
        "setup: obs": "frames are bytes with channels last, where the network is",
        "setup: actions": "are where the network is",
        "train: 1. rollout": "keeps log-probabilities and values",
        "load_agent": "in bfloat16, if it was trained so",
        "evaluate": "policy and value share the network",
    },
    "ppo_continuous": {
        "make_env": "continuous actions, and normalization",
        "Agent": "Gaussian actions, and statistics of the environments",
        "setup: actions": "have the type of their space",
        "train: 1. rollout": "processes merge their statistics after it",
    },
    "ppo_lstm": {
        "make_env": "Atari games and vectors",
        "Agent": "an LSTM between the network and its heads",
        "ppo_loss": "detail 36, states are rebuilt",
        "setup: act()": "recurrent, and keeps log-probabilities and values",
        "setup: obs": "frames or vectors, where the network is",
        "train: 1. rollout": "recurrent",
        "train: 2. advantages": "recurrent, and environments stay apart",
        "train: 3. update": "detail 35, minibatches of whole environments",
        "load_agent": "in bfloat16, if it was trained so",
        "evaluate": "recurrent",
    },
    "ppo_multidiscrete": {
        "make_env": "actions of several components",
        "Agent": "actions of several components, masks, statistics and images",
        "ppo_loss": "the policy takes masks",
        "setup: act()": "the agent's own, as the choice of masks is part of it",
        "setup: obs": "are where the network is",
        "setup: actions": "have several components",
        "train: 1. rollout": "masks",
        "train: 2. advantages": "masks, which values do not need",
        "evaluate": "masks",
    },
    "impala_vtrace": {
        "Args.stall_seconds": "an actor's turn counts, too",
        "Args.env_id": "may be several",
        "Args.num_steps": "is of a segment",
        "Args.learning_rate": "is RMSProp's",
        "Args.compile": "leaves acting as it is",
        "Args.batch_size": "counts new segments, not replayed ones",
        "make_env": "games in C++, images and vectors; takes the task",
        "layer_init": "no detail of the blog",
        "Agent": "shallow or deep convolutions, with or without an LSTM",
        "setup: agent": "takes args",
        "setup: flat": "RMSProp and the ring of learners take nothing else",
        "setup: run": "logs only every so many iterations",
        "setup: update()": "V-trace, sums instead of means, and learners that may learn alone",
        "setup: if args.compile:": "compiles the update alone",
        "iteration: lr.fill_": "no detail of IMPALA's",
        "load_agent": "a group of one environment, for each task",
        "evaluate": "recurrent, task by task",
    },
    "ppo_async": {
        "Args.stall_seconds": "an actor's turn counts, too",
        "Args.num_actors": "are of one task",
        "Args.num_steps": "is of a segment",
        "Args.compile": "leaves acting as it is",
        "Args.num_groups": "one task",
        "Args.batch_groups": "without replay",
        "Args.batch_size": "counts segments",
        "make_env": "games in C++, images and vectors",
        "Agent": "convolutions for images, two networks for vectors",
        "ppo_loss": "the clip may be centered elsewhere",
        "play": "values too, no LSTM",
        "publish": "no LSTM",
        "beyond_time_limits": "no LSTM, and no part of a batch",
        "setup: actors": "one task",
        "setup: optimizer": "there is no CUDA graph of its step",
        "setup: run": "a checkpoint has a version",
        "setup: update()": "processes may have kept different numbers of segments",
        "setup: for k, group in enumerate(chain(*actors)):": "no LSTM",
        "setup: publish": "a version, of which there may be fewer than iterations",
        "iteration: frac": "only an update is progress",
        "load_agent": "one task",
        "evaluate": "a group of one environment",
    },
    "ngu_r2d2": {
        "Args.learning_rate": "is not annealed",
        "Args.amp": "is of Agent.encoder",
        "Args.compile": "leaves acting as it is",
        "make_env": "Atari games in C++ of one frame and all actions; images channels first",
        "as_array": "small images stay images",
        "Agent": "a recurrent dueling Q-network of all policies",
        "Replay": "keeps steps once, and cuts its sequences from episodes itself",
        "setup: optimizer": "has an epsilon of its own, R2D2's, and no annealing",
        "setup: run": "has more parts, and counts updates",
        "setup: update()": "Q-learning, and curiosity",
        "load_agent": "an actor with curiosity",
        "evaluate": "recurrent, by the first policy, with the novelty that the network wants to see",
    },
}
# of the statements before the first step, those of ppo.py that another PPO script needs not
LEFT_OUT = {
    "ppo_atari": {"setup: torch.set_num_threads"},
    "ppo_lstm": {"setup: torch.set_num_threads", "setup: (act, update)"},  # its update is in no CUDA graph
    "ppo_multidiscrete": {"setup: (next_obs, _)"},  # a reset offers masks
}
PAIRS = [(s, name, c) for s in SCRIPTS for name in blocks(SCRIPTS[s]) if (c := canonical(s, name))]


@pytest.mark.parametrize("script,name,parent", PAIRS)
def test_same_name_same_code(script, name, parent):
    if name in CHECKS | {"FIXED"} or name in OTHERWISE.get(script, {}) or is_copied(script, name):
        return
    ours, canon = (blocks(SCRIPTS[s])[name].split("\n") for s in (script, parent))
    diff = difflib.unified_diff(canon, ours, f"{parent}.py", f"{script}.py", lineterm="")
    raise AssertionError("\n".join(diff))


def test_exceptions_are_needed():
    """Each is of a block that an earlier script has, too, with other code, and says why."""
    for script, reasons in OTHERWISE.items():
        for name, reason in reasons.items():
            assert name in blocks(SCRIPTS[script]) and canonical(script, name), (script, name)
            assert not is_copied(script, name) and name not in below(script), (script, name)
            assert reason, (script, name)


def common_part(script):
    """What is below the line, without imports and without what a script has of its own."""
    text = SCRIPTS[script].split(LINE)[1]
    for name in CHECKS | set().union(*MORE.values(), *FEWER.values()):
        text = text.replace(below(script).get(name, ""), "")
    text = re.sub(r"(?m)^(import|from) .*\n", "", FIXED.sub("", text))
    return re.sub(r"\n{2,}", "\n\n", text)


@pytest.mark.parametrize("script", ORDER)
def test_below_the_line_all_scripts_are_the_same(script):
    """Word for word, in the same order, but for checks of arguments and environments."""
    assert SCRIPTS[script].count(LINE) == 1
    names, canon = below(script), below("ppo")
    assert canon.keys() - names.keys() - CHECKS == FEWER.get(script, set())
    assert names.keys() - canon.keys() - CHECKS == MORE.get(script, set())
    diff = difflib.unified_diff(common_part("ppo").split("\n"), common_part(script).split("\n"), lineterm="")
    assert not [*diff]
    assert {"Run", "ended_episodes", "load_checkpoint", "fail", "main", "check"} <= names.keys()


@pytest.mark.parametrize("script", ORDER)
def test_the_algorithm_comes_first(script):
    """Up to and with evaluate(); what is imported for the rest is imported below the line."""
    above = SCRIPTS[script].split(LINE)[0]
    assert list(blocks(above))[-1] == "evaluate" and "train" in re.findall(r"(?m)^def (\w+)", above)
    assert above.startswith("# /// script") and "\n# ///\n# ruff: noqa: E402  (" in above.split('"""')[0]
    names = {}
    for node in ast.parse(above).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(x.asname or x.name).split(".")[0]: node.lineno for x in node.names}
    used = {x.id for x in ast.walk(ast.parse(above)) if isinstance(x, ast.Name)}
    assert names.keys() <= used | {"ale_py", "minigrid"}, names.keys() - used
    assert not re.search("# differs from", SCRIPTS[script])


@pytest.mark.parametrize("script", [s for s in ORDER if s.startswith("ppo_") and s != "ppo_async"])
def test_set_up_leaves_nothing_out(script):
    """What ppo.py does before its first step and at the head of an iteration is done by every such script."""
    ours, canon = (
        {n for n in blocks(SCRIPTS[s]) if n.startswith(("setup", "iteration"))} for s in (script, "ppo")
    )
    assert canon - ours == LEFT_OUT.get(script, set()) and len(canon) > 20


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows which files are the project's")
def test_every_script_is_compared():
    """A copy for one's own research is none until it is committed."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {Path(name).stem for name in files.stdout.split() if "/" not in name} == set(SCRIPTS)


def test_every_block_is_compared():
    names = {name for script, name, _ in PAIRS if script == "ppo_shared"}
    everywhere = {
        "setup: update()",
        "setup: optimizer",
        "setup: run",
        "iteration: lr.fill_",
    }
    for script in ("ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete", "ppo_async"):
        assert everywhere <= {name for s, name, _ in PAIRS if s == script}
    assert ("ppo_lstm", "AtariEnvs", "ppo_atari") in PAIRS
    assert {
        "fail",
        "compute_gae",
        "ppo_loss",
        "ended_episodes",
        "lock",
        "start_logging",
        "evaluate",
        "Run",
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
    assert lazy <= {"wandb", "moviepy", "tensordict", "torch"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_header_agrees_with_pyproject(script):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    header = header_of(script)
    ranges = set(project["dependencies"]).union(*project["optional-dependencies"].values())
    assert set(header["dependencies"]) <= ranges
    assert project["requires-python"].startswith(header["requires-python"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_house_style(script):
    source = SCRIPTS[script]
    assert max(map(len, source.splitlines())) <= 110
    sections = re.findall(r"^# === (.+?) =+$", source, re.MULTILINE)
    expected = [
        "Arguments",
        "Environment",
        "Agent",
        "Algorithm",
        *MORE_SECTIONS.get(script, []),
        "Training",
        "Evaluation",
        LINE.strip("# ="),
    ]
    assert sections == expected
    assert not re.search(r"except:|time\.time\(\) *%", source)
    assert source.count("except Exception") == 1  # a damaged checkpoint
    for node in ast.walk(ast.parse(source)):  # reads well in help(), without the name above it
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            assert not re.match(r"(Of|Its|What)\b", ast.get_docstring(node) or ""), node.name
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
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert numbers("def test_detail", tests.replace("test_detail_", "test_detail ")) == set(range(1, 38))
    assert numbers("def test_auxiliary", tests.replace("auxiliary_detail_", "auxiliary ")) == {1, 2, 3, 4}


@pytest.fixture
def details():
    """docs/details.py."""
    spec = importlib.util.spec_from_file_location("details", ROOT / "docs/details.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_details_is_that_of_the_tags(details):
    """docs/details.md names file and line of each."""
    assert (ROOT / "docs/details.md").read_text(encoding="utf-8") == details.page(), (
        "run python docs/details.py"
    )
    assert "| |" not in details.page()


def test_places_of_details_by_hand(details, monkeypatch):
    """Detail 1 is none of 11 and no auxiliary one; lines count from 1, and a line may have two details."""
    Path("a.py").write_text("x = 1\n# detail 1: x\n# detail 11: y\n# details 2 and 1: z\n", encoding="utf-8")
    Path("b.py").write_text("# auxiliary detail 1: x\n# details 1 and 2\n", encoding="utf-8")
    monkeypatch.setattr(details, "ROOT", Path.cwd())
    monkeypatch.setattr(details, "SCRIPTS", ("a", "b"))
    places = {
        name: re.findall(r"\[(.*?)\]\(\.\./(.*?)\)", details.places(*name))
        for name in (("detail", 1), ("detail", 2), ("detail", 11), ("auxiliary detail", 1))
    }
    assert places["detail", 1] == [("a.py:2", "a.py#L2"), ("a.py:4", "a.py#L4"), ("b.py:2", "b.py#L2")]
    assert places["detail", 2] == [("a.py:4", "a.py#L4"), ("b.py:2", "b.py#L2")]
    assert places["detail", 11] == [("a.py:3", "a.py#L3")]
    assert places["auxiliary detail", 1] == [("b.py:1", "b.py#L1")]
    table = details.table("auxiliary detail", ("one",)).splitlines()
    assert table[2] == "| 1 | one | [b.py:1](../b.py#L1) |"
