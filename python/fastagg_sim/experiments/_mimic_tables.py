# SPDX-License-Identifier: Apache-2.0
"""Common parts of the two halves of MimiC's table 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastagg_sim.config import Task
from fastagg_sim.experiments._base import Claim
from fastagg_sim.experiments._mimic import (
    LABELS,
    MimicOptions,
    Results,
    Setting,
    all_change,
    best,
    check_ascending,
    ends,
    time_varying,
)


def participation_settings(
    options: MimicOptions,
    percent: Sequence[int],
    task: Task,
    published: Mapping[int, Sequence[float]],
) -> list[Setting]:
    """Return a column for each P (in percent), or for the first and the last with --quick."""
    check_ascending("percent", percent)
    return [
        Setting(
            f"P = {p} %",
            task,
            time_varying(options, p / 100),
            published=dict(zip(LABELS, published.get(p, ()), strict=False)),
        )
        for p in (ends(percent) if options.quick else percent)
    ]


def participation_claims(columns: Sequence[Results], options: MimicOptions) -> list[Claim]:
    """Claims: MimiC is best at every P, and every method is better at the largest P than at the
    smallest (if there are at least two)."""
    found = [claim for r in columns for claim in best(r.setting.column, r)]
    if len(columns) < 2:
        return found
    first, last = columns[0], columns[-1]
    text = f"every method gains from {first.setting.column} to {last.setting.column}"
    return [*found, all_change(text, first, last)]
