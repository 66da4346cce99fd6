# SPDX-License-Identifier: Apache-2.0
"""The cache: one safetensors file per image data set, verified whenever it is read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fastagg.durable import sync
from fastagg_sim.data.base import CorruptDataError, DataNotFoundError
from fastagg_sim.data.images import ImageSet, RawImages


def cache_dir() -> Path:
    """Return the cache folder: $FASTAGG_DATA if set, else fastagg/ in $XDG_CACHE_HOME or
    ~/.cache."""
    if chosen := os.environ.get("FASTAGG_DATA"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fastagg"


def cache_path(images: ImageSet, root: Path | None = None) -> Path:
    """Return the file of `images` in the cache folder `root` (default: `cache_dir()`)."""
    return (cache_dir() if root is None else root) / f"{images.name}.safetensors"


def read_cache(images: ImageSet, root: Path | None = None) -> RawImages:
    """Read a data set from the cache, bit for bit as published.

    Raises DataNotFoundError if it is not in the cache, CorruptDataError if the file is damaged.
    """
    path = cache_path(images, root)
    if not path.is_file():
        raise DataNotFoundError(f"there is no {path}")
    try:
        return images.check(RawImages(**load(path.read_bytes())))
    except (CorruptDataError, SafetensorError, OSError, TypeError) as error:
        raise CorruptDataError(f"{path} is damaged: {error}") from error


def write_cache(images: ImageSet, raw: RawImages, root: Path | None = None) -> Path:
    """Write `raw` to the cache atomically and return the file.

    Raises CorruptDataError, and writes nothing, if `raw` is not the data set `images`.
    """
    images.check(raw)
    path = cache_path(images, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = save({name: np.ascontiguousarray(a) for name, a in raw.arrays().items()})
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
