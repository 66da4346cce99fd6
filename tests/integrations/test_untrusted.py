# SPDX-License-Identifier: Apache-2.0
"""What clients say is short and on one line, in reports and logs."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from fastagg.integrations._report import Answer, RoundReport
from fastagg.integrations._untrusted import LONGEST, brief, cut

FORGED = "evil\n\tround 2: 5 active: 0, 1, 2, 3, 4\r\x1b[2J\u202e\u2028\ud800\x00"


def test_short_texts_stay_as_they_are() -> None:
    for text in ("", "a", "array 'w': expected shape [3, 4]", "Größe, 大小", "x" * LONGEST):
        assert cut(text) == text


@pytest.mark.parametrize(
    "text", [FORGED, FORGED * 1000, "x" * (LONGEST + 1), "\U000e0001" * LONGEST, "\n" * 10**6]
)
def test_texts_are_cut_and_escaped(text: str) -> None:
    short = cut(text)
    assert len(short) <= LONGEST and short.isprintable() and cut(short) == short
    assert short.encode()


def test_a_long_text_keeps_its_ends() -> None:
    text = f"array {'n' * 10_000!r}: expected shape [3, 4], got [4, 3]"
    assert cut(text).startswith("array 'nnn")
    assert cut(text).endswith("nn': expected shape [3, 4], got [4, 3]")


LARGE: list[Any] = [
    "x" * 10**7,
    b"\n" * 10**7,
    [1.0 / 3] * 10**6,
    ["x" * 10**6] * 3,
    [[1] * 10**5],
    10**5000,
    (1,) * 10**6,
    {"x" * 1000: 1},
]


@pytest.mark.parametrize("value", LARGE, ids=lambda value: type(value).__name__)
def test_large_values_are_described(value: object) -> None:
    assert len(brief(value)) <= LONGEST and brief(value).isprintable()
    if value != 10**5000:
        answer = Answer("1", {}, value, weight=value)
        assert len(repr((answer.partition, answer.weight))) <= 3 * LONGEST


@pytest.mark.parametrize(
    "value", [None, 0, -1, True, 1.5, math.nan, "a", b"a", [], [1, 2.5], np.int64(3)]
)
def test_small_values_stay_as_they_are(value: Any) -> None:
    assert brief(value) == repr(value)
    answer = Answer("1", {}, value, weight=value)
    assert answer.partition is value and answer.weight is value


def test_no_text_of_a_large_list_is_made() -> None:
    values = [1.0 / 3] * 10**7
    start = time.thread_time()
    Answer("1", {}, values, weight=values)
    assert time.thread_time() - start < 1.0  # its text would take several seconds


def test_reports_have_short_reasons_and_lines() -> None:
    senders = ["a", FORGED * 100]
    report = RoundReport(
        1,
        (0,),
        dict.fromkeys(senders),
        dict.fromkeys(senders, FORGED * 1000),
        {},
        {},
        reassigned={0: (FORGED, FORGED)},
        ignored=dict.fromkeys(senders, FORGED),
        late={FORGED: 1},
    )
    assert report.rejected.keys() == {*senders}
    for reason in [*report.rejected.values(), *report.ignored.values()]:
        assert len(reason) <= LONGEST
    assert all(line.isprintable() and len(line) < 3 * LONGEST for line in report.lines())
    problem = Answer("a", {}, problem=FORGED * 1000).problem
    assert problem is not None and problem.isprintable() and len(problem) <= LONGEST
