# SPDX-License-Identifier: Apache-2.0
"""Late replies of Flower's clients survive a server process that is killed, and count once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import HANG, ROOT

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from tests.integrations.late_federation import KILLED, POINTS, ROUNDS, RUNS, run_message

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Flower: its legacy strategies are deprecated
    pytest.mark.usefixtures("flower_identity"),
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of runs that nobody kills, by API."""
    return {}


def files(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (folder / "inbox").iterdir())


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("api", RUNS)
def test_a_killed_server_loses_no_late_reply(
    api: str, point: str, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    if api not in unbroken:
        (tmp_path / "unbroken").mkdir()
        unbroken[api] = RUNS[api](tmp_path / "unbroken")
    expected = unbroken[api]
    assert expected["reports"][KILLED] == ((0, 1, 2, 3), {3: 2, 1: 1})
    assert expected["reports"][ROUNDS] == ((0, 1, 2, 3), {2: 1})
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.integrations.late_federation", api, str(folder), point]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    kind = {"kept": "answer", "settled": None}.get(point, "used")
    assert files(folder) == ([] if kind is None else [kind] * 2)
    found = RUNS[api](folder)
    first = KILLED + 1 if point in ("saved", "settled") else KILLED
    assert [*found["reports"]] == [*range(first, ROUNDS + 1)]
    assert found["reports"] == {n: expected["reports"][n] for n in found["reports"]}
    assert torch.equal(found["params"], expected["params"])
    for number, metrics in found["metrics"].items():
        assert metrics == expected["metrics"][number]
    # A late answer that is there comes to the last round, after its end.
    assert found["metrics"] and "used" not in files(folder)


def test_the_next_run_in_the_process_uses_the_folder(tmp_path: Path) -> None:
    run_message(tmp_path, rounds=2)
    assert [*run_message(tmp_path)["reports"]] == [*range(3, ROUNDS + 1)]
