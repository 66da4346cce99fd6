# SPDX-License-Identifier: Apache-2.0
"""Schedules: for which answers the server waits, in simulated time.

docs/latency.md describes all schedules. To add one, add a file to this package with a
`ServerSchedule` class decorated with `@register("its-name")`. All modules of this package are
imported, so the class is registered automatically.
"""

from __future__ import annotations

import importlib
import pkgutil

from fastagg_sim.schedules.base import SCHEDULES, Plan, ServerSchedule, Work, make_schedule

__all__ = ["Plan", "ServerSchedule", "Work", "available", "make_schedule"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def available() -> list[str]:
    """Return the names of all schedules."""
    return sorted(SCHEDULES)
