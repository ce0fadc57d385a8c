"""Learning, on tasks with a known answer; seconds each.

Another kind of CPU rounds otherwise, and a run is then another one: so each threshold stands at least four
standard errors of a test's own seeds away from the mean of twenty seeds, which learning.py recorded.
"""

import csv

import learning
import numpy as np
import pytest

SEEDS = {"cartpole": (1, 2)}  # of a test; (1,) where there is none
BOUNDS = {
    ("value_of_an_observation", "error"): 0.1,
    ("action_of_an_observation", "probability"): 0.9,
    ("action_of_an_observation", "return"): 0.8,
    ("delayed_reward", "probability"): 0.9,
    ("delayed_reward", "error"): 0.1,
    ("cartpole", "return"): 440,
    ("best_continuous_action", "error"): 0.1,
    ("best_continuous_action", "return"): 0.8,
    ("three_components", "return"): 9.5,
    ("hidden_velocities", "length"): 250,
}
MEASURES = pytest.mark.parametrize(
    "task,script", learning.MEASURES, ids=[f"{task.__name__}-{x.SCRIPT}" for task, x in learning.MEASURES]
)
WITHOUT_MEMORY = {("hidden_velocities", "ppo")}


def is_learned(task: str, script: str, quantity: str, value: float, margin: float = 0.0) -> bool:
    """Errors stay below their bound, other numbers above it; without memory, its task is not learned."""
    if (task, script) in WITHOUT_MEMORY:
        return value + margin < 100
    bound = BOUNDS[task, quantity]
    return value + margin < bound if quantity == "error" else value - margin > bound


@MEASURES
def test_task_is_learned(task, script):
    found = [task(script, seed) for seed in SEEDS.get(task.__name__, (1,))]
    for quantity in found[0]:
        value = np.mean([numbers[quantity] for numbers in found])
        assert is_learned(task.__name__, script.SCRIPT, quantity, value), f"{quantity}: {value}"


@MEASURES
def test_bounds_are_four_standard_errors_from_what_twenty_seeds_reach(task, script):
    with open(learning.CSV, encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (r["task"], r["script"]) == (task.__name__, script.SCRIPT)]
    for quantity in {row["quantity"] for row in rows}:
        values = [float(row["value"]) for row in rows if row["quantity"] == quantity]
        assert len(values) == 20
        margin = 4 * np.std(values, ddof=1) / len(SEEDS.get(task.__name__, (1,))) ** 0.5
        assert is_learned(task.__name__, script.SCRIPT, quantity, np.mean(values), margin), (values, margin)
    assert rows
