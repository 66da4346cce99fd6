# SPDX-License-Identifier: Apache-2.0
"""Read CSV files of numbers: traces and lists of clients."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 28  # of a file; as Python numbers it needs many times as much memory


@dataclass(frozen=True)
class Kind:
    """A kind of number.

    text: what it is, for messages.
    accepts: `accepts(text)` returns whether a cell is such a number.
    read: `read(text)` returns the number of an accepted cell.
    """

    text: str
    accepts: Callable[[str], bool]
    read: Callable[[str], Any]


def _is_positive(text: str) -> bool:
    if not text.isascii() or "_" in text:  # float() accepts both
        return False
    try:
        value = float(text)
    except ValueError:
        return False
    return math.isfinite(value) and value > 0


WHOLE = Kind("a whole number >= 0", lambda text: text.isascii() and text.isdigit(), int)
POSITIVE = Kind("a finite number > 0", _is_positive, float)


def read_numbers(option: str, path: str | Path, columns: Sequence[str]) -> list[list[int]]:
    """Return the `columns` of the CSV file `path`, row by row, as whole numbers >= 0.

    For the form of the file and errors see `read_table`.
    """
    return read_table(option, path, dict.fromkeys(columns, WHOLE))


def read_table(option: str, path: str | Path, columns: Mapping[str, Kind]) -> list[list[Any]]:
    """Return the `columns` of the CSV file `path`, row by row, each as its kind of number.

    The first line names the columns, in any order. Other columns and blank lines are ignored. A
    byte order mark and CRLF line ends, as in files from spreadsheets, are accepted.

    Raises ValueError, naming the `option`, the file and the line, if the file cannot be read, has
    more than `MOST_BYTES` bytes, or is not of this form.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise ValueError(
                    f"{option}: {path}: expected a file of at most {MOST_BYTES} bytes, got {size}"
                )
            return list(_rows(f"{option}: {path}", csv.reader(file), columns))
    except OSError as error:
        raise ValueError(f"{option}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path} is not a UTF-8 text file") from error
    except csv.Error as error:
        raise ValueError(f"{option}: {path} is not a CSV file: {error}") from error


def _rows(
    where: str, lines: Iterator[list[str]], columns: Mapping[str, Kind]
) -> Iterator[list[Any]]:
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
        for (name, kind), place in zip(columns.items(), places, strict=True):
            text = cells[place].strip()
            if not kind.accepts(text):
                raise ValueError(
                    f"{where}, line {number}: expected {kind.text} in column {name}, got {text!r}"
                )
            row.append(kind.read(text))
        yield row
