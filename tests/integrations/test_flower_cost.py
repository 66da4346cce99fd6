# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks flower``: the cost of a round, beside Flower's strategies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

from benchmarks.__main__ import main

pytestmark = pytest.mark.flower


def test_every_strategy_is_measured(tmp_path: Path) -> None:
    main(["flower", "--sizes", "6x2e3", "--repeats", "2", "--out", str(tmp_path)])
    (page,) = tmp_path.rglob("flower.md")
    text = page.read_text()
    assert "## 6 replies of 2,000 parameters" in text
    names = re.findall(r"^\| ((?:Flower's|fastagg:)[^|]+?) \|", text, re.MULTILINE)
    assert len(names) == 9
    assert names[0] == "Flower's FedAvg"
