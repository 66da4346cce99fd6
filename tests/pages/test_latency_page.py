# SPDX-License-Identifier: Apache-2.0
"""docs/latency.md describes every process and schedule, and every option."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastagg_sim import named_options

PAGE = (Path(__file__).parents[2] / "docs" / "latency.md").read_text(encoding="utf-8")


NAMED = [*named_options.of_latencies().items(), *named_options.of_schedules().items()]


@pytest.mark.parametrize(("name", "options"), NAMED)
def test_the_page_has_a_row_and_a_section_with_all_options(name: str, options: list[str]) -> None:
    assert f"\n| [`{name}`](#{name}) |" in PAGE
    assert f"\n### `{name}`\n" in PAGE
    section = PAGE.split(f"\n### `{name}`\n")[1].split("\n##")[0]
    for option in options:
        assert f"`{option.split('=')[0]}`" in section, f"{name}: {option}"
