# SPDX-License-Identifier: Apache-2.0
"""Check the options of a rule without its memory, for :func:`fastagg.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from fastagg.aggregator import Aggregator
from fastagg.options import MOST, read_count
from fastagg.registry import check_required
from fastagg.rules._client_weights import read_client_weights
from fastagg.rules._share_cap import read_max_share

_FEW = 256  # clients of the rule that is made, and rounds that it remembers


def check_options(
    rule: type[Aggregator[Any, Any]], num_clients: int, options: Mapping[str, Any]
) -> None:
    """Raise what ``rule(num_clients=K, num_params=d, **options)`` raises for its options.

    The rule is made with one column, and with few of the K clients. What depends on K is checked
    with all of them.

    Args:
        rule: the class of the rule.
        num_clients: K.
        options: its other options.

    Raises:
        TypeError, ValueError: an option is missing or not as expected.
    """
    check_required(rule, {"num_clients", "num_params", *options})
    few = min(num_clients, _FEW)
    tried = {**options}
    if few < num_clients:
        if "min_active" in options:
            read_count("min_active", options["min_active"], least=1, most=num_clients)
            tried["min_active"] = 1
        if "max_share" in options:
            read_max_share(options["max_share"], num_clients)
            tried["max_share"] = None
        if "client_weights" in options:
            read_client_weights(options["client_weights"], num_clients)
            tried["client_weights"] = None
        if "local_work" in options:
            tried["local_work"] = 1.0
    if _keeps_more(options.get("staleness"), options.get("max_staleness")):
        tried["max_staleness"] = _FEW
    made: Any = rule(num_clients=few, num_params=1, **tried)
    if few < num_clients and "local_work" in options:
        made.num_clients = num_clients
        made.local_work = options["local_work"]


def _keeps_more(staleness: object, most: object) -> bool:
    """Return whether a rule could keep the aggregates of more rounds than few."""
    return staleness is not None and isinstance(most, Integral) and _FEW < int(most) <= MOST
