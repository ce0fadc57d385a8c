"""Writes details.md: where each of PPO's implementation details stands in the scripts.

python docs/details.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ppo", "ppo_shared", "ppo_atari", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete", "ppo_async")
HEAD = """# The implementation details of PPO, by file and line

They are numbered as in [The 37 Implementation Details of Proximal Policy
Optimization](https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details). Each is tagged at the
line that does it, and `tests/` has a test of each, by its number. This page is written by `docs/details.py`.
"""
DETAILS = (
    "vectorized environments",
    "orthogonal weights, zero biases",
    "Adam's epsilon of 1e-5",
    "annealing of the learning rate",
    "generalized advantage estimation",
    "shuffled minibatches",
    "normalization of advantages in each minibatch",
    "clipped surrogate objective",
    "clipping of the value loss",
    "overall loss with entropy bonus",
    "clipping of the global gradient norm",
    "debug variables",
    "shared or separate networks",
    "1 to 30 no-ops at the start",
    "4 frames an action, maximum of the last two",
    "a lost life ends the episode",
    "FIRE at the start",
    "84 x 84 grey pixels",
    "clipping of rewards to their sign",
    "stack of 4 frames (`ppo_lstm.py`: 1)",
    "the Nature CNN",
    "scaling of pixels to [0, 1]",
    "normal distribution of actions",
    "state-independent log standard deviation",
    "independent components of an action",
    "separate networks for policy and value",
    "clipping of actions for the environment",
    "normalization of observations",
    "clipping of observations",
    "scaling of rewards",
    "clipping of rewards",
    "initialization of the LSTM",
    "LSTM states begin as zeros",
    "LSTM states are reset where an episode ends",
    "minibatches of whole sequences",
    "states rebuilt from the rollout's first",
    "independent components of a MultiDiscrete action",
)
AUXILIARY = (
    "annealing of the clip range",
    "parallel gradients",
    "early stopping by KL divergence",
    "masking of invalid actions",
)


def places(tag: str, number: int) -> str:
    """Files and lines in which a detail is tagged, as links."""
    numbers = rf"({number}|\d+ and {number}|{number} and \d+)\b"
    pattern = re.compile(rf"{tag}s? {numbers}" if tag != "detail" else rf"(?<!auxiliary )details? {numbers}")
    found = []
    for script in SCRIPTS:
        for line, text in enumerate((ROOT / f"{script}.py").read_text().splitlines(), 1):
            if pattern.search(text):
                found.append(f"[{script}.py:{line}](../{script}.py#L{line})")
    return ", ".join(found)


def table(tag: str, names: tuple[str, ...]) -> str:
    rows = [f"| {n} | {name} | {places(tag, n)} |" for n, name in enumerate(names, 1)]
    return "\n".join(["| number | detail | where |", "|---|---|---|", *rows])


def page() -> str:
    auxiliary = table("auxiliary detail", AUXILIARY)
    return f"{HEAD}\n{table('detail', DETAILS)}\n\n## Auxiliary details\n\n{auxiliary}\n"


if __name__ == "__main__":
    (ROOT / "docs/details.md").write_text(page())
