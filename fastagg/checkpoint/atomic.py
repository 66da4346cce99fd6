# SPDX-License-Identifier: Apache-2.0
"""Replacing a file atomically: a crash at any moment leaves the old file or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file, replacing an older one atomically.

    Raises:
        OSError: the folder is missing or not writable. An older file is then intact.
    """
    replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace(target: Path, fill: Callable[[Path], object]) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path: the folder {target.parent} does not exist")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        fill(partial)
        _sync(partial)
        os.replace(partial, target)
    except BaseException:
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
