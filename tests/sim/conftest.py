# SPDX-License-Identifier: Apache-2.0
"""What tests of the simulation share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fastagg_sim.dropout.shadow import Candidates
from fastagg_sim.shadow_runs import Shadow


@pytest.fixture
def no_shadow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversary's candidates without the runs that find them, which take half an hour."""

    def candidates(_: Shadow, seeds: Sequence[int], **__: object) -> dict[int, Candidates]:
        return {seed: Candidates((0, 1), (2,)) for seed in seeds}

    monkeypatch.setattr(Shadow, "candidates", candidates)
