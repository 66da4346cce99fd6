# SPDX-License-Identifier: Apache-2.0
"""docs/nvflare.md: the script runs as printed; its model has the bits of a loop over `agg.step`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastagg
from tests.scripts import ROOT, python_block, run_script

SCRIPT = python_block("nvflare.md")
PAGE = (ROOT / "docs" / "nvflare.md").read_text(encoding="utf-8")


def test_the_script_is_python() -> None:
    ast.parse(SCRIPT)


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("nvflare", reason="nvflare is not installed (make test-flower installs it)")
    output = run_script(SCRIPT, tmp_path, name="job.py")
    found = np.load(tmp_path / "run" / "server" / "simulate_job" / "models" / "server.npy")

    names: dict[str, Any] = {"__name__": "job"}
    exec(compile(SCRIPT, "docs/nvflare.md", "exec"), names)
    agg = fastagg.make("fdms", num_clients=3, num_params=5)
    params = torch.zeros(5)
    for active in ([0, 1, 2], [0, 2], [0, 2], [0, 1, 2]):
        models = [names["train"](params.numpy(), client + 1) for client in active]
        report = agg.step(params, [torch.from_numpy(m) - params for m in models], active)
    assert np.array_equal(found, params.numpy())
    assert report.active.tolist() == [0, 1, 2]

    distance = float(output.split("distance from the truth:")[1])
    assert distance == pytest.approx(np.linalg.norm(found - names["TRUE"]), rel=1e-12)
    log = (tmp_path / "run" / "server" / "log.txt").read_text(encoding="utf-8")
    for line in re.findall(r"^    ((?:round|absent|stood in).*)$", PAGE.split("```")[-1], re.M):
        assert line in log
