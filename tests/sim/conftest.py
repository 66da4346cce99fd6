# SPDX-License-Identifier: Apache-2.0
"""What tests of the simulation share."""

from __future__ import annotations

import pytest

from fastagg_sim.shadow_runs import Shadow
from tests.shadows import any_candidates


@pytest.fixture
def no_shadow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "candidates", any_candidates)
