# SPDX-License-Identifier: Apache-2.0
"""Dropout processes: which clients are active in a round.

docs/dropout.md describes all processes. To add one, add a file to this package with a
`DropoutProcess` class decorated with `@register("its-name")`. All modules of this package are
imported, so the class is registered automatically. If it uses `groups` or `label_counts`, its
`needs` says so; the simulation computes them only then.

The processes do not depend on the simulation and can be used with any framework:

    process = make_dropout("markov", num_clients=100, seed=0, rate=0.3)
    process.active(17)  # int64 ids, ascending
"""

from __future__ import annotations

import importlib
import pkgutil

from fastagg_sim.dropout.base import PROCESSES, DropoutProcess, active_count, make_dropout, needs

__all__ = ["DropoutProcess", "active_count", "available", "make_dropout", "needs"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def available() -> list[str]:
    """Return the names of all processes."""
    return sorted(PROCESSES)
