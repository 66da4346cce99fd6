# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests of the simulation."""

from __future__ import annotations

import pytest

from fastagg_sim.shadow_runs import Shadow
from tests.shadows import any_candidates


@pytest.fixture
def no_shadow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "candidates", any_candidates)
