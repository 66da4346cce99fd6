# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of files: a crash at any moment leaves the old file or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing an older one atomically.

    Raises:
        OSError: the folder does not exist or is not writable. An older file is unchanged.
    """
    replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace(target: Path, fill: Callable[[Path], object]) -> None:
    """Write a file beside ``target``, sync it to disk and rename it to ``target``.

    Args:
        target: the file to replace; its folder must exist.
        fill: writes the new content to the path that it is called with.

    Raises:
        OSError: the folder does not exist or is not writable. An older file is unchanged.
        Exception: whatever ``fill`` raises. An older file is unchanged.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path: expected an existing folder, but {target.parent} does not exist; create it "
            "first"
        )
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
    """Flush a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
