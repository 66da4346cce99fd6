# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer of threads."""

from __future__ import annotations

import pytest

from tests.fuzz import threads


@pytest.mark.slow
def test_one_aggregator_in_many_threads() -> None:
    assert threads.main(["--steps", "2700", "--saves", "54"]) == 0
