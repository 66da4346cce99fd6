# SPDX-License-Identifier: Apache-2.0
"""The papers' figures and tables, one file each.

Add one by adding a file here that defines `EXPERIMENT`: every module whose name does not start
with an underscore is imported and so registers itself.
"""

from __future__ import annotations

import importlib
import pkgutil

from fastagg_sim.experiments._base import Claim, Expected, Experiment, Options, claims_json

__all__ = ["Claim", "Expected", "Experiment", "Options", "available", "claims_json"]


def available() -> dict[str, Experiment]:
    """All experiments by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name[0] != "_")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {module.EXPERIMENT.name: module.EXPERIMENT for module in modules}
