# SPDX-License-Identifier: Apache-2.0
"""The file format of an aggregator: a safetensors file, with everything else as JSON in its header.

Nothing is pickled. A file is replaced atomically: the new content is written beside it, synced and
renamed, so a crash at any moment leaves either the old file or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from fastagg.checkpoint import tensor_file
from fastagg.checkpoint.atomic import replace
from fastagg.checkpoint.tensor_file import RowsOf

FORMAT = "fastagg.aggregator"
VERSION = 2
"""Version 1 was never released; it stored FL-FDMS's counts as int32 and its candidates as bool."""

_STATE = "state."
_OPTION = "option."


def write(
    path: str | os.PathLike[str],
    rule: str,
    options: Mapping[str, Any],
    state: Mapping[str, Tensor | RowsOf],
) -> None:
    """Write an aggregator to ``path``, replacing an older file atomically.

    Args:
        path: the file; its folder must exist.
        rule: registered name of the rule.
        options: arguments of the constructor: tensors, or values that JSON represents exactly.
        state: tensors of ``state_dict``. Those with two dimensions are written row by row, so that
            only one row is in memory at a time.

    Raises:
        OSError: the folder does not exist or is not writable. An older file is unchanged.
    """
    target = Path(path)
    plain = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
    tensors: dict[str, Tensor | RowsOf] = {_STATE + k: v for k, v in state.items()}
    tensors |= {_OPTION + k: v for k, v in options.items() if isinstance(v, Tensor)}
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "rule": rule,
        "options": json.dumps(plain, allow_nan=False),
    }
    replace(target, lambda partial: tensor_file.save(partial, tensors, header))


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Read a file that :func:`write` wrote.

    Returns:
        rule, options, state: as they were passed to :func:`write`.

    Raises:
        FileNotFoundError, ValueError: as for :func:`opened`.
    """
    with opened(path) as saved:
        return saved.rule, saved.options, {name: saved.get(name) for name in saved.names}


class Saved:
    """An open checkpoint, from which tensors are read one at a time.

    Attributes:
        path: path of the file.
        rule, options: as they were passed to :func:`write`.
        names: names of the state's tensors.
    """

    def __init__(self, path: Path, file: Any) -> None:
        header = file.metadata() or {}
        _check_header(path, header)
        try:
            self.options: dict[str, Any] = json.loads(header["options"])
            self.rule: str = header["rule"]
        except (KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} has a damaged header: {error!r}") from error
        self.path = path
        keys = list(file.keys())
        self.names = [key.removeprefix(_STATE) for key in keys if key.startswith(_STATE)]
        for key in keys:
            if key.startswith(_OPTION):
                self.options[key.removeprefix(_OPTION)] = file.get_tensor(key)
        self._file = file

    def get(self, name: str) -> Tensor:
        """Read a whole tensor of the state."""
        return self._file.get_tensor(_STATE + name)

    def get_columns(self, name: str, columns: slice) -> Tensor:
        """Read some columns of a tensor of the state, [n] or [m, n]."""
        part = self._file.get_slice(_STATE + name)
        return part[columns] if len(part.get_shape()) == 1 else part[:, columns]


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Saved]:
    """Open a file that :func:`write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated or damaged, was not written by fastagg, or has another
            version of the format.
    """
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(f"path: there is no checkpoint {target}")
    try:
        with safetensors.safe_open(target, framework="pt") as file:
            yield Saved(target, file)
    except SafetensorError as error:
        raise ValueError(
            f"{target} is not a checkpoint, or a truncated or damaged one: {error}"
        ) from error


def _check_header(path: Path, header: Mapping[str, str]) -> None:
    """Refuse a file that is not a fastagg checkpoint of this version of the format."""
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is a safetensors file but not a fastagg checkpoint: expected format "
            f"{FORMAT!r} in its header, got {header.get('format')!r}"
        )
    version = header.get("version", "")
    if not version.isdecimal():
        raise ValueError(f"{path} has a damaged header: version {version!r}")
    if int(version) != VERSION:
        age, advice = (
            ("a newer", "upgrade fastagg to read it")
            if int(version) > VERSION
            else ("an older", "read it with the fastagg that wrote it")
        )
        raise ValueError(
            f"{path} was written by {age} fastagg: it has format version {version}, this one "
            f"reads version {VERSION}; {advice}"
        )
