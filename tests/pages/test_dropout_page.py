# SPDX-License-Identifier: Apache-2.0
"""docs/dropout.md describes every process and every option."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fastagg_sim.dropout import DropoutProcess, available
from fastagg_sim.dropout.base import PROCESSES

PAGE = (Path(__file__).parents[2] / "docs" / "dropout.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", available())
def test_the_page_has_a_row_and_a_section_with_all_options(name: str) -> None:
    assert f"\n| [`{name}`](#{name}) |" in PAGE
    assert f"\n## `{name}`\n" in PAGE
    section = PAGE.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
    known = {field.name for field in dataclasses.fields(DropoutProcess)}
    for option in {field.name for field in dataclasses.fields(PROCESSES[name])} - known:
        assert f"`{option}`" in section, f"{name}: {option}"
