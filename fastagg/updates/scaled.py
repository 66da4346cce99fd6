# SPDX-License-Identifier: Apache-2.0
"""Rows times factors: those with factor 1 stay as they are, and others are not written to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastagg.updates.allocation import allocate_rows
from fastagg.updates.any_rows import AnyRow, AnyRows, StreamedRow, alike, each_row
from fastagg.updates.cohort import Cohort


class ScaledRow(StreamedRow):
    """A row times a factor, computed as it is read and rounded to float32.

    Args:
        row: a streamed row, or a tensor [d] float32.
        factor: the factor.
    """

    def __init__(self, row: AnyRow, factor: float) -> None:
        if isinstance(row, StreamedRow):
            self.num_params, self.budget = row.num_params, row.budget
        else:
            self.num_params, self.budget = len(row), None
        self._row, self._factor = row, factor

    def problem(self) -> str | None:
        return self._row.problem() if isinstance(self._row, StreamedRow) else None

    def read(self, begin: int, end: int, scratch: Tensor) -> Tensor:
        row = self._row
        part = row.read(begin, end, scratch) if isinstance(row, StreamedRow) else row[begin:end]
        return torch.mul(part, self._factor, out=scratch)


def scaled_when_read(rows: AnyRows, scales: Tensor | None) -> AnyRows:
    """Return rows that are multiplied by ``scales`` [S] as they are read; None: the rows."""
    if scales is None:
        return rows
    factors: list[float] = scales.tolist()
    return [
        row if factor == 1.0 else ScaledRow(row, factor)
        for row, factor in zip(each_row(rows), factors, strict=True)
    ]


def scaled(cohort: Cohort, factors: Sequence[float]) -> Cohort:
    """Return a cohort whose rows are multiplied by factors, rounded to float32.

    Rows in memory are copied; streamed ones are multiplied whenever they are read. The rule may not
    take ownership of the rows of such a cohort: some of them are not the caller's.

    Args:
        cohort: S clients.
        factors: S numbers; rows with factor 1 are passed on. All 1: the cohort itself is returned.
    """
    changed = [position for position, factor in enumerate(factors) if factor != 1.0]
    if not changed:
        return cohort
    rows: list[AnyRow] = list(each_row(cohort.rows))
    held = [row for position in changed if isinstance(row := rows[position], Tensor)]
    copies = iter(allocate_rows(len(held), len(held[0]), held[0].device) if held else [])
    for position in changed:
        row, factor = rows[position], factors[position]
        if isinstance(row, StreamedRow):
            rows[position] = ScaledRow(row, factor)
        else:
            rows[position] = torch.mul(row, factor, out=next(copies))
    return cohort.with_rows(alike(cohort.rows, rows))
