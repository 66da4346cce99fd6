# SPDX-License-Identifier: Apache-2.0
"""What goes wrong when: ``2.0=crash 3.1=late`` is client 0 in round 2 and client 1 in round 3.

crash: the client dies without a word, all of its process group with it, its SuperNode too.
late: the answer comes after the timeout.  error: an exception.  nan: the weights hold NaN.
"""

from __future__ import annotations

import math
import os
import signal
import time

import numpy as np

KINDS = ("crash", "late", "error", "nan")


def parse(text: str) -> dict[tuple[int, int], str]:
    """(round, client) -> what goes wrong there."""
    faults = {}
    for item in text.split():
        place, _, kind = item.partition("=")
        server_round, _, client = place.partition(".")
        if kind not in KINDS:
            raise ValueError(f"faults: expected ROUND.CLIENT={'|'.join(KINDS)}, got {item!r}")
        faults[int(server_round), int(client)] = kind
    return faults


def suffer(
    text: str, server_round: int, client: int, timeout: float, weights: list[np.ndarray]
) -> list[np.ndarray]:
    """Do to a client what ``text`` says of this round; returns the weights to send."""
    kind = parse(text).get((server_round, client))
    if kind == "crash":
        os.killpg(0, signal.SIGKILL)
    if kind == "late":
        time.sleep(timeout + 2.0)
    if kind == "error":
        raise RuntimeError(f"client {client} ran out of luck")
    if kind == "nan":
        return [np.full_like(value, math.nan) for value in weights]
    return weights
