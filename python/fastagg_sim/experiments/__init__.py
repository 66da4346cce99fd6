# SPDX-License-Identifier: Apache-2.0
"""Experiments that reproduce the figures and tables of the papers, one file each.

To add one, add a file to this package that defines `EXPERIMENT`. All modules whose names do not
start with an underscore are imported by `available`.
"""

from __future__ import annotations

import importlib
import pkgutil

from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options, claims_json
from fastagg_sim.experiments._write import conclude, repeat

__all__ = [
    "Claim",
    "Expected",
    "Experiment",
    "Options",
    "available",
    "claims_json",
    "conclude",
    "repeat",
]


def available() -> dict[str, Experiment]:
    """Return all experiments by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.EXPERIMENT.name: module.EXPERIMENT for module in modules}
