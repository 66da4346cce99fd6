# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastagg_sim.data import DATASETS, DatasetInfo, download
from fastagg_sim.shadow_runs import Shadow
from tests.shadows import any_candidates
from tests.sim.made_data import Tiny


@pytest.fixture
def no_shadow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "candidates", any_candidates)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Hide torchvision and all tools except those that the test creates."""
    made = Tiny(tmp_path)
    info = DATASETS["mnist"]
    monkeypatch.setitem(
        DATASETS, "mnist", DatasetInfo(info.summary, info.in_shape, info.load, made.images)
    )
    monkeypatch.setenv("PATH", str(made.tools))
    monkeypatch.setenv("PYTHONPATH", str(made.modules))
    monkeypatch.syspath_prepend(made.modules)
    find_spec = download.importlib.util.find_spec

    def only_made_up(name: str) -> object:
        return find_spec(name) if (made.modules / name).exists() else None

    monkeypatch.setattr(download.importlib.util, "find_spec", only_made_up)
    return made
