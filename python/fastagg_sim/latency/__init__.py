# SPDX-License-Identifier: Apache-2.0
"""Latency processes: how long a client takes to answer.

docs/latency.md describes all processes. To add one, add a file to this package with a
`LatencyProcess` class decorated with `@register("its-name")`. All modules of this package are
imported, so the class is registered automatically. If it uses `groups`, its `needs` says so.

The processes do not depend on the simulation and can be used with any framework:

    process = make_latency("lognormal", num_clients=100, seed=0, median=20.0)
    process.seconds(client=3, round=17)
"""

from __future__ import annotations

import importlib
import pkgutil

from fastagg_sim.latency.base import LATENCIES, LatencyProcess, make_latency, needs

__all__ = ["LatencyProcess", "available", "make_latency", "needs"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def available() -> list[str]:
    """Return the names of all processes."""
    return sorted(LATENCIES)
