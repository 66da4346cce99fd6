# SPDX-License-Identifier: Apache-2.0
"""Write files so that a full disk leaves the old ones, and errors name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fastagg.durable import sync


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the contents of `path` by `content` (text in UTF-8) atomically.

    A concurrent reader sees the complete old or the complete new contents. If writing fails, the
    old contents are unchanged, and the OSError names `path`.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                sync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of writing within this context be OSErrors that name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
    except SafetensorError as error:  # it does not say which file
        raise OSError(f"{path}: cannot be written: {error}") from error
