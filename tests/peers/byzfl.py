# SPDX-License-Identifier: Apache-2.0
"""Put the callables of ``fastagg.robust`` in the place of ByzFL's, and run ByzFL's checks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fastagg import robust
from tests.peers.examples import run_examples
from tests.peers.files import BYZFL, BYZFL_TESTS, have_files, have_package
from tests.peers.runs import run

_DRAW = "its buckets are drawn at random, by each library from generators of its own"
# docs/papers.md and the docstrings of fastagg.robust state the other differences from ByzFL (Krum's
# number of neighbours, ranges of f, NaN, the power method). No example or test shows one of them.
# The first of the four draws happens to be the printed one.
EXAMPLE_DIFFERENCES = {f"Bucketing {number}": _DRAW for number in (2, 3, 4)}
EXAMPLES = 4 * 16 - len(EXAMPLE_DIFFERENCES)
TESTS = 84  # 40 of aggregators, 12 of pre-aggregators, 32 of attacks, which call aggregators


def examples(folder: Path) -> list[str]:
    """Run the examples in ByzFL's docstrings; return what is not as expected."""
    package = have_package(BYZFL, folder) / "byzfl/aggregators"
    sources = [package / "aggregators.py", package / "preaggregators.py"]
    equal, problems = run_examples(sources, robust, EXAMPLE_DIFFERENCES)
    if equal != EXAMPLES:
        problems.append(f"expected {EXAMPLES} examples with the printed result, got {equal}")
    for name, reason in EXAMPLE_DIFFERENCES.items():
        print(f"  different, as expected: {name}: {reason}")
    print(f"ByzFL {BYZFL.version}: {equal} of {EXAMPLES} examples give the printed result")
    return problems


def tests(folder: Path, checkouts: Path | None) -> list[str]:
    """Run ByzFL's tests of aggregators and attacks; return what is not as expected."""
    root = have_files(BYZFL_TESTS, folder, checkouts)
    stand_in(have_package(BYZFL, folder))
    problems = run(root, [*BYZFL_TESTS.files], passing=TESTS, differences={}, left_out={})
    if not problems:
        print(f"ByzFL: {TESTS} of {TESTS} tests pass with fastagg.robust")
    return problems


def stand_in(package: Path) -> ModuleType:
    """Make ``byzfl`` a module with our callables and ByzFL's attacks, which then call ours.

    The package itself is not executed: it imports a whole training stack.
    """
    spec = importlib.util.spec_from_file_location(
        "byzfl",
        package / "byzfl/__init__.py",
        submodule_search_locations=[str(package / "byzfl")],
    )
    assert spec is not None
    byzfl = sys.modules["byzfl"] = importlib.util.module_from_spec(spec)  # created, not executed
    aggregators = importlib.import_module("byzfl.aggregators")
    theirs = {
        name
        for name, value in vars(aggregators).items()
        if isinstance(value, type) and value.__module__.startswith("byzfl.aggregators.")
    }
    if theirs != set(robust.__all__):
        raise AssertionError(f"expected callables for {sorted(theirs)}, got {robust.__all__}")
    for name in robust.__all__:
        setattr(aggregators, name, getattr(robust, name))
        setattr(byzfl, name, getattr(robust, name))
    attacks = importlib.import_module("byzfl.attacks")
    for name, value in vars(attacks).items():
        if isinstance(value, type) and value.__module__ == "byzfl.attacks.attacks":
            setattr(byzfl, name, value)
    return byzfl
