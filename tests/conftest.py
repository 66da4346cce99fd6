# SPDX-License-Identifier: Apache-2.0
"""Set-up of all tests: hypothesis profiles, fixed seeds, one thread."""

from __future__ import annotations

import os

# Waiting threads sleep, not spin: other tests run in parallel. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import random
import shutil
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadline: the first example pays for lazy initialisation, and shared machines stall.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("dev", _COMMON, max_examples=50)
settings.register_profile("ci", _COMMON, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("quick", _COMMON, max_examples=5, derandomize=True)
settings.register_profile("thorough", _COMMON, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Background jobs of a shell ignore SIGINT, and their children inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests that are marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, unless ``--long`` or a test's own id asks for them."""
    if config.getoption("--long") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Reset the global random state, so that results do not depend on earlier tests."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback without CUDA
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def compiler() -> None:
    """Skip tests of code that is compiled on first use where there is no compiler."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        pytest.skip("the ceilings of the benchmarks need a C++ compiler")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one torch thread by default; restore the number that a test may have set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
