# SPDX-License-Identifier: Apache-2.0
"""The IDX format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import struct
import zlib

import numpy as np

from fastagg_sim.data.base import CorruptDataError


def parse_idx(content: bytes, ndim: int) -> np.ndarray:
    """Decode `content`, an IDX file (gzipped or not), to a uint8 array with `ndim` dimensions.

    Raises CorruptDataError if `content` is not such a file, or is too short or too long.
    """
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise CorruptDataError(f"truncated or damaged gzip file ({error})") from error
    header_size = 4 + 4 * ndim
    if len(content) < header_size:
        raise CorruptDataError(f"{len(content)} bytes are too few for an IDX header")
    expected = bytes([0, 0, 0x08, ndim])  # 0x08: unsigned bytes
    if content[:4] != expected:
        raise CorruptDataError(
            f"not an IDX file of {ndim}-dimensional bytes: it starts with "
            f"0x{content[:4].hex()}, expected 0x{expected.hex()}"
        )
    shape = struct.unpack(f">{ndim}I", content[4:header_size])
    size = math.prod(shape)
    if len(content) - header_size != size:
        raise CorruptDataError(
            f"the IDX header says {'x'.join(map(str, shape))} = {size} bytes, "
            f"but {len(content) - header_size} follow it"
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)
