# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer of signals."""

from __future__ import annotations

import pytest

from tests.fuzz import signals


@pytest.mark.slow
def test_no_signal_splits_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert signals.main(["--signals", "270"]) == 0
    assert "half written: 0" in capsys.readouterr().out
