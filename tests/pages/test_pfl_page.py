# SPDX-License-Identifier: Apache-2.0
"""docs/pfl.md: the script runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import python_block, run_script

pytest.importorskip("pfl", reason="pfl is not installed (make test-flower installs it)")
pytestmark = [pytest.mark.flower, pytest.mark.slow]


def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    output = run_script(python_block("pfl.md"), tmp_path)
    mean, friends, users = output.splitlines()[-3:]
    errors = [float(line.split()[-1]) for line in (mean, friends)]
    assert all(0.0 < error < 0.1 for error in errors), output
    assert re.fullmatch(r"users of the last round: \[\d(, \d)*\]", users)
