# SPDX-License-Identifier: Apache-2.0
"""Models in .npy form, as frameworks send them."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture
def npy() -> Callable[..., bytes]:
    """Return an array as the bytes of a .npy file."""

    def pack(values: object, dtype: object = None) -> bytes:
        stream = io.BytesIO()
        np.save(stream, np.asarray(values, dtype=dtype), allow_pickle=False)
        return stream.getvalue()

    return pack
