# SPDX-License-Identifier: Apache-2.0
"""The seeds of rules that draw random numbers (buckets, sketches), and of rules inside others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastagg.options import option_defaults
from fastagg.registry import available, find
from fastagg_sim.seeds import derive


def draws(rule: str, options: Mapping[str, Any]) -> bool:
    """Return whether a rule with these options, or a rule inside it, draws random numbers and has
    no seed of its own."""
    return with_seeds(rule, options, 0) != options


def with_seeds(
    rule: str, options: Mapping[str, Any], seed: int, *, depth: int = 0
) -> dict[str, Any]:
    """Return the options of a rule with a seed for it, and for each rule inside it, that draws
    random numbers and has no option `seed`.

    seed: the seed of the run. The rule itself has the stream ("rule"), the rule inside it the
        stream ("rule", 1), the one inside that ("rule", 2).
    depth: in how many other rules this one is.

    Unknown rules and options have no effect here; `fastagg.make` refuses them.
    """
    found = dict(options)
    if rule not in available():
        return found
    used = {**option_defaults(find(rule, [])), **options}
    if "seed" in used and "seed" not in options and used.get("sketch", True) is not None:
        found["seed"] = derive(seed, "rule", *([depth] if depth else []))
    inner = used.get("rule_options")
    if "rule_options" in used and (inner is None or isinstance(inner, Mapping)):
        seeded = with_seeds(used["rule"], inner or {}, seed, depth=depth + 1)
        if seeded != (inner or {}):
            found["rule_options"] = seeded
    return found
