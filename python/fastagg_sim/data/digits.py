# SPDX-License-Identifier: Apache-2.0
"""The 8x8 digits that are part of scikit-learn; they need no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastagg_sim.data.base import DataNotFoundError, Dataset
from fastagg_sim.seeds import generator

TEST_FRACTION = 0.2


def load_digits(root: Path | None, seed: int) -> Dataset:
    """Load 1,797 images [1, 8, 8] of 10 digits, with values in [0, 1]: 1,442 training, 355 test.

    The split is stratified: a fifth of every class, rounded down, is test data. It does not depend
    on `seed`, so runs with different seeds are evaluated on the same images. Both parts are in
    scikit-learn's order. `root` is unused.

    Raises DataNotFoundError if scikit-learn is not installed.
    """
    pixels, labels = _read()
    x = torch.from_numpy(pixels).to(torch.float32).div_(16.0).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels).to(torch.int64)

    rng = generator(0, "data", "digits", "split")
    is_test = torch.zeros(len(y), dtype=torch.bool)
    for digit in range(10):
        samples = torch.nonzero(y == digit).flatten()
        order = torch.randperm(len(samples), generator=rng)
        is_test[samples[order[: int(TEST_FRACTION * len(samples))]]] = True
    return Dataset("digits", x[~is_test], y[~is_test], x[is_test], y[is_test], 10)


def _read() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return pixels [n, 64], from 0 to 16, and labels [n].

    The file of scikit-learn is read without importing scikit-learn, which takes a second.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataNotFoundError(
            f"the data set digits is part of scikit-learn, which cannot be imported ({error}); "
            "install it with: pip install scikit-learn"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels
