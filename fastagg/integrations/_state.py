# SPDX-License-Identifier: Apache-2.0
"""A rule inside somebody's server: which may be, and how it goes into the server's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.rules.mimic import MimiC
from fastagg.rules.scaffold import Scaffold


def check_aggregator(
    aggregator: Aggregator, num_clients: int | None, options: Mapping[str, Any]
) -> int:
    """K of an aggregator that may serve a run."""
    if isinstance(aggregator, Scaffold):
        raise ValueError(
            "rule: 'scaffold' needs clients that ask the server for their control variates, which "
            "other frameworks' clients do not"
        )
    if isinstance(aggregator, MimiC) and aggregator.mode == "client":
        raise ValueError(
            "rule: 'mimic' with mode 'client' needs clients that keep corrections and are sent "
            "the aggregate, which other frameworks' clients do not; use mode 'server'"
        )
    if options:
        raise TypeError(f"rule: an aggregator has its options already, got {sorted(options)}")
    if num_clients is not None and num_clients != aggregator.num_clients:
        raise ValueError(
            f"num_clients: the aggregator is for {aggregator.num_clients}, got {num_clients}"
        )
    if aggregator.nonfinite != "drop":
        raise ValueError(
            'nonfinite: expected "drop", so that a client that sends NaN cannot stop the run, '
            f"got {aggregator.nonfinite!r}"
        )
    if aggregator.device.type != "cpu":
        raise ValueError(f"device: expected cpu, where answers arrive, got {aggregator.device}")
    return aggregator.num_clients


def pack_rule(aggregator: Aggregator) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A rule for a checkpoint: name and plain options for its header, and tensors.

    Raises:
        ValueError: an option cannot be written.
    """
    options = aggregator.options()
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in options.items() if name not in tensors}
    state = {f"option.{name}": value for name, value in tensors.items()}
    state |= {f"rule.{name}": value for name, value in aggregator.state_dict().items()}
    return {"rule": aggregator.name, "rule_options": plain}, state


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, under the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def check_rule(
    path: str, aggregator: Aggregator, content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Refuse the checkpoint of another rule or of other options than ``aggregator`` has.

    Args:
        path: of the checkpoint, for the message.
        content, state: as :func:`pack_rule` gave them.

    Raises:
        ValueError: it is another rule, or has other options.
    """
    if content["rule"] != aggregator.name:
        raise ValueError(
            f"{path}: is of the rule {content['rule']!r}, this run has {aggregator.name!r}"
        )
    own = aggregator.options()
    saved = {**content["rule_options"], **under("option.", state)}
    differing = [
        f"{name} was {saved.get(name)!r}, is {own.get(name)!r}"
        for name in sorted({*own, *saved})
        if not _equal(own.get(name), saved.get(name))
    ]
    if differing:
        raise ValueError(f"{path}: is of a run with other options: {'; '.join(differing)}")


def _equal(left: object, right: object) -> bool:
    """Whether two options are the same, with tuples read back from JSON as lists."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and torch.equal(left, right)  # type: ignore[arg-type]
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right
