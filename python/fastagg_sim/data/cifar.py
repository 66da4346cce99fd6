# SPDX-License-Identifier: Apache-2.0
"""Decoders for the three formats in which CIFAR-10 is distributed.

Each function decodes the contents of one file to uint8 images [n, 3, 32, 32] and uint8 labels [n]
(the PNG format has separate files for images and labels). It raises CorruptDataError if the file
does not have the format.
"""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import numpy as np

from fastagg_sim.data.base import CorruptDataError

PIXELS = 32 * 32


def parse_binary(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode a data_batch_*.bin: per image 1 byte of label and 1024 bytes each of R, G and B."""
    record = 1 + 3 * PIXELS
    if not content or len(content) % record:
        raise CorruptDataError(
            f"expected a whole number of {record}-byte records, got {len(content)} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def parse_png(content: bytes) -> np.ndarray:
    """Decode a *_batch*.png: one image per row of 1024 RGB pixels; no labels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            mode, width, rows = image.mode, image.width, np.asarray(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise CorruptDataError(f"truncated or damaged PNG file ({error})") from error
    if mode != "RGB" or width != PIXELS:
        raise CorruptDataError(f"expected {PIXELS} RGB pixels per row, got {width} of {mode}")
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1, 3, 32, 32)


def parse_json_labels(content: bytes) -> np.ndarray:
    """Decode a *_lables.json (sic): a list of labels."""
    try:
        labels = json.loads(content)
    except ValueError as error:
        raise CorruptDataError(f"truncated or damaged JSON file ({error})") from error
    return _labels(labels)


def parse_python(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode a batch of the Python archive: a pickled dict with "data" [n, 3072] and "labels".

    Unpickling can run arbitrary code. Therefore the three numpy functions and types that an array
    needs are replaced by stand-ins that only store their arguments, and all other names are
    refused. Nothing that the file names is ever called.
    """
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        array, labels = batch[b"data"], batch[b"labels"]
        _, shape, element, fortran_order, raw = array.state
        if element.code not in (b"u1", "u1") or tuple(shape[1:]) != (3 * PIXELS,):
            raise CorruptDataError(f"expected bytes [n, {3 * PIXELS}], got {shape}")
        images = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran_order else "C")
    except CorruptDataError:
        raise
    except Exception as error:  # A damaged or hostile pickle can fail in any way.
        raise CorruptDataError(f"not a CIFAR-10 batch ({type(error).__name__}: {error})") from error
    return np.ascontiguousarray(images).reshape(-1, 3, 32, 32), _labels(labels)


def _labels(labels: Any) -> np.ndarray:
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 10 for y in labels):
        raise CorruptDataError("expected a list of labels from 0 to 9")
    return np.array(labels, np.uint8)


class _BatchUnpickler(pickle.Unpickler):
    """Unpickles numbers, strings, containers and numpy arrays; an array becomes an `Array`, which
    only stores the pickled state."""

    def find_class(self, module: str, name: str) -> Any:
        class Array:
            state: Any = None

            def __setstate__(self, state: Any) -> None:
                self.state = state

        class ElementType:
            def __init__(self, code: Any, *_: Any) -> None:
                self.code = code

            def __setstate__(self, state: Any) -> None:
                pass  # Byte order and alignment do not matter for bytes.

        stand_ins: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: Array(),
            ("numpy", "ndarray"): None,  # An argument of _reconstruct.
            ("numpy", "dtype"): ElementType,
        }
        if (module, name) not in stand_ins:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is refused")
        return stand_ins[module, name]
