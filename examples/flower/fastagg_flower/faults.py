# SPDX-License-Identifier: Apache-2.0
"""Faults of clients, as ROUND.CLIENT=KIND: with ``2.0=crash 3.1=late`` client 0 crashes in round 2,
and client 1 is late in round 3.

crash: the client is killed, with its process group and its SuperNode.  leave: the same, but its
SuperNode is told to end, and signs off.  late: the answer comes after the timeout.  error: the
client raises an exception.  nan: all weights are NaN.  claim: the client says that it is the client
after it (message API only).
"""

from __future__ import annotations

import math
import os
import signal
import time

import numpy as np

KINDS = ("crash", "leave", "late", "error", "nan", "claim")


def parse(text: str) -> dict[tuple[int, int], str]:
    """Parse the faults to {(round, client): kind}."""
    faults = {}
    for item in text.split():
        place, _, kind = item.partition("=")
        server_round, _, client = place.partition(".")
        if kind not in KINDS:
            raise ValueError(f"faults: expected ROUND.CLIENT={'|'.join(KINDS)}, got {item!r}")
        faults[int(server_round), int(client)] = kind
    return faults


def inject(
    text: str, server_round: int, client: int, timeout: float, weights: list[np.ndarray]
) -> list[np.ndarray]:
    """Inject the fault that ``text`` has for this round and client, if any.

    Returns the weights that the client shall send.
    """
    kind = parse(text).get((server_round, client))
    if kind == "crash":
        os.killpg(0, signal.SIGKILL)
    if kind == "leave":
        os.killpg(0, signal.SIGTERM)
        time.sleep(timeout)
    if kind == "late":
        time.sleep(timeout + 2.0)
    if kind == "error":
        raise RuntimeError(f"client {client}: injected error")
    if kind == "nan":
        return [np.full_like(value, math.nan) for value in weights]
    return weights


def claimed(text: str, server_round: int, client: int) -> int:
    """Return the partition that a client reports as its own in a round."""
    return client + (parse(text).get((server_round, client)) == "claim")
