# SPDX-License-Identifier: Apache-2.0
"""docs/server.md: its table has the options of fastagg.Server."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import fastagg

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_the_table_has_every_option_and_its_default() -> None:
    table = TEXT.split("## Options")[1].split("\n## ")[0]
    stated = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        options, values = (re.findall(r"`(.*?)`", cell) for cell in (names, defaults))
        stated |= dict(zip(options, values or ["None"], strict=True))
    parameters = inspect.signature(fastagg.Server).parameters.values()
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert stated == {p.name: repr(p.default).replace("'", '"') for p in keywords}
