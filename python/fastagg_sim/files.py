# SPDX-License-Identifier: Apache-2.0
"""Read JSON, and write files so that a full disk leaves the old ones; errors name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fastagg.durable import sync, sync_folder
from fastagg_sim.config import ConfigError


def read_json(path: Path) -> Any:
    """Return the value in the JSON file `path`.

    Raises ConfigError, naming the file, if it does not contain JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise ConfigError(f"{path}: expected JSON: {error}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the contents of `path` by `content` (text in UTF-8) atomically.

    A concurrent reader sees the complete old or the complete new contents. If writing fails, the
    old contents are unchanged, and the OSError names `path`. If its message says that the folder
    was not synced, the new contents are there but may be lost if power fails.
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
    with naming(path, "was written, but its folder was not synced"):
        sync_folder(path.parent)


@contextmanager
def naming(path: Path, problem: str = "cannot be written") -> Iterator[None]:
    """Let errors of writing within this context be OSErrors that name `path` and the problem."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"{problem}: {error.strerror}", str(path)) from error
    except SafetensorError as error:  # it does not say which file
        raise OSError(f"{path}: {problem}: {error}") from error
