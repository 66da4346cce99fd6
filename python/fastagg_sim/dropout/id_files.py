# SPDX-License-Identifier: Apache-2.0
"""Read CSV files of whole numbers, for the processes trace and adversarial."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path


def read_numbers(option: str, path: str | Path, columns: Sequence[str]) -> list[list[int]]:
    """Return the `columns` of the CSV file `path`, row by row, as whole numbers >= 0.

    The first line names the columns, in any order. Other columns and blank lines are ignored. A
    byte order mark and CRLF line ends, as in files from spreadsheets, are accepted.

    Raises ValueError, naming the `option`, the file and the line, if the file cannot be read or is
    not of this form.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return list(_rows(f"{option}: {path}", csv.reader(file), columns))
    except OSError as error:
        raise ValueError(f"{option}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path} is not a UTF-8 text file") from error


def _rows(where: str, lines: Iterator[list[str]], columns: Sequence[str]) -> Iterator[list[int]]:
    header = [cell.strip() for cell in next(lines, [])]
    if not set(columns) <= set(header):
        raise ValueError(
            f"{where}, line 1: expected a header with {', '.join(columns)}, "
            f"got {','.join(header)!r}"
        )
    places = [header.index(name) for name in columns]
    for number, cells in enumerate(lines, 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) <= max(places):
            raise ValueError(
                f"{where}, line {number}: expected {len(header)} columns, got {','.join(cells)!r}"
            )
        row = []
        for name, place in zip(columns, places, strict=True):
            text = cells[place].strip()
            if not (text.isascii() and text.isdigit()):
                raise ValueError(
                    f"{where}, line {number}: expected a whole number >= 0 in column {name}, "
                    f"got {text!r}"
                )
            row.append(int(text))
        yield row
