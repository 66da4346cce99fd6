# SPDX-License-Identifier: Apache-2.0
"""A rule hosted by a framework's server: which rules are allowed, and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.rules.mimic import MimiC
from fastagg.rules.scaffold import Scaffold

CHANGEABLE = ("max_norm", "server_lr")
"""Options that a run may change when it resumes: the state means the same with other values."""


def check_aggregator(
    aggregator: Aggregator, num_clients: int | None, options: Mapping[str, Any]
) -> int:
    """Check that a framework's server can use an aggregator; return its number of clients.

    Args:
        aggregator: the aggregator.
        num_clients: K as given by the user; None if it was not given.
        options: options of the rule that were given beside an aggregator; must be empty.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    if isinstance(aggregator, Scaffold):
        raise ValueError(
            "rule: 'scaffold' needs clients that ask the server for control variates, which the "
            "clients of other frameworks do not; choose another rule"
        )
    if isinstance(aggregator, MimiC) and aggregator.mode == "client":
        raise ValueError(
            "rule: 'mimic' with mode 'client' needs clients that keep corrections and receive the "
            "aggregate, which the clients of other frameworks do not; use mode 'server'"
        )
    if options:
        raise TypeError(
            f"rule: expected no options beside an aggregator, got {sorted(options)}; pass them to "
            "fastagg.make, or give the rule by name"
        )
    if num_clients is not None and num_clients != aggregator.num_clients:
        raise ValueError(
            f"num_clients: expected {aggregator.num_clients}, as in the aggregator, got "
            f"{num_clients}; leave it out"
        )
    if aggregator.nonfinite != "drop":
        raise ValueError(
            'nonfinite: expected "drop", so that a client that sends NaN cannot stop the run, '
            f"got {aggregator.nonfinite!r}"
        )
    if aggregator.device.type != "cpu":
        raise ValueError(
            f"device: expected cpu, because updates arrive on the CPU, got {aggregator.device}"
        )
    return aggregator.num_clients


def pack_rule(aggregator: Aggregator) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a checkpoint stores of a rule.

    Returns:
        The name of the rule and its plain options, for the header; and tensors: options under
        "option." and state under "rule.".

    Raises:
        ValueError: an option cannot be stored.
    """
    options = aggregator.options()
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in options.items() if name not in tensors}
    state = {f"option.{name}": value for name, value in tensors.items()}
    state |= {f"rule.{name}": value for name, value in aggregator.state_dict().items()}
    return {"rule": aggregator.name, "rule_options": plain}, state


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def check_rule(
    path: str, aggregator: Aggregator, content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> list[str]:
    """Check that a checkpoint has the rule of ``aggregator``, and its options but CHANGEABLE.

    Args:
        path: path of the checkpoint, for the message.
        aggregator: the aggregator of this run.
        content, state: as returned by :func:`pack_rule`.

    Returns:
        The options of CHANGEABLE that differ, as text.

    Raises:
        ValueError: the checkpoint has another rule or other options.
    """
    if content["rule"] != aggregator.name:
        raise ValueError(
            f"{path}: expected a checkpoint of rule {aggregator.name!r}, which this run has, got "
            f"one of rule {content['rule']!r}"
        )
    own = aggregator.options()
    saved = {**content["rule_options"], **under("option.", state)}
    differing = {
        name: f"{name} was {saved.get(name)!r}, is {own.get(name)!r}"
        for name in sorted({*own, *saved})
        if not _equal(own.get(name), saved.get(name))
    }
    refused = [text for name, text in differing.items() if name not in CHANGEABLE]
    if refused:
        raise ValueError(
            f"{path}: expected a checkpoint of a run with the same options, but "
            f"{'; '.join(refused)}; only {' and '.join(CHANGEABLE)} may change"
        )
    return list(differing.values())


def load_rule(
    aggregator: Aggregator, content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Load the state of a rule that :func:`check_rule` has checked; ``max_norm`` does not change.

    Known norms are kept if ``max_norm`` is the same. If this raises, the aggregator is unchanged.
    """
    wanted, before = aggregator.max_norm, aggregator.state_dict()
    try:
        aggregator.max_norm = content["rule_options"].get("max_norm", wanted)
        aggregator.load_state_dict(under("rule.", state))
    except BaseException:
        aggregator.max_norm = wanted
        aggregator.load_state_dict(before)
        raise
    aggregator.max_norm = wanted


def _equal(left: object, right: object) -> bool:
    """Return whether two options are equal; a tuple equals a list, which JSON turns it into."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and torch.equal(left, right)  # type: ignore[arg-type]
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right
