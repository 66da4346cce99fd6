# SPDX-License-Identifier: Apache-2.0
"""A rule hosted by a framework's server: which rules are allowed, and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.checkpoint import CheckpointError
from fastagg.churn import widened_state
from fastagg.loading import check_saved
from fastagg.modes import plain_modes
from fastagg.options import option_names, to_saved
from fastagg.registry import find
from fastagg.rules.mimic import MimiC
from fastagg.server_optimizer import ServerOptimizer
from fastagg.tensor_file import RowsOf

CHANGEABLE = ("max_norm", "min_active", "server_lr")
"""Options that a run may change when it resumes: the state means the same with other values."""


def refuse_needy(rule: str) -> None:
    """Raise ValueError for the rules whose clients exchange more than models with the server."""
    if rule == "scaffold":
        raise ValueError(
            "rule: 'scaffold' needs clients that ask the server for control variates, which the "
            "clients of other frameworks do not; choose another rule"
        )
    if rule == "mifa-client":
        raise ValueError(
            "rule: 'mifa-client' needs clients that keep rows and learn which of them counted, "
            "which the clients of other frameworks do not; use 'mifa'"
        )


def check_option_names(
    rule: str | Aggregator, options: Mapping[str, Any], late: str = "", host: type | None = None
) -> None:
    """Check the names of what a user gave as options of a rule.

    Args:
        rule: its name, or an aggregator, which needs none.
        options: the options. Others say ``num_clients`` and ``num_params``.
        late: why late answers never count; empty: they may.
        host: the class of the server, if it takes the options among its own, for hints.

    Raises:
        TypeError, ValueError: naming what is no option of the rule.
    """
    taken = sorted({"num_clients", "num_params"} & set(options))
    if taken:
        raise TypeError(
            f"options of the rule: expected none of {taken}, because the rule gets the numbers of "
            "clients and parameters of the run"
        )
    unused = sorted({"staleness", "max_staleness"} & set(options))
    if late and unused:
        raise ValueError(f"options of the rule: expected no {' and '.join(unused)}, because {late}")
    if isinstance(rule, str):
        find(rule, [*options], [] if host is None else option_names(host))
    elif isinstance(rule, Aggregator) and options:
        raise TypeError(
            f"rule: expected no options beside an aggregator, got {sorted(options)}; pass them to "
            "fastagg.make, or give the rule by name"
        )


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
    refuse_needy(aggregator.name)
    if isinstance(aggregator, MimiC) and aggregator.mode == "client":
        raise ValueError(
            "rule: 'mimic' with mode 'client' needs clients that keep corrections and receive the "
            "aggregate, which the clients of other frameworks do not; use mode 'server'"
        )
    check_option_names(aggregator, options)
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


def pack_rule(aggregator: Aggregator) -> tuple[dict[str, Any], dict[str, Tensor | RowsOf]]:
    """Return what a checkpoint stores of a rule, not copied.

    The caller holds the rule (``aggregator.held``) until it has written the tensors.

    Returns:
        The name of the rule and its plain options, for the header; and tensors: options under
        "option." and state under "rule.".

    Raises:
        ValueError: an option cannot be stored.
    """
    options = aggregator.options()
    tensors = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in options.items() if name not in tensors}
    state: dict[str, Tensor | RowsOf] = {f"option.{name}": value for name, value in tensors.items()}
    state |= {f"rule.{name}": value for name, value in aggregator.live_state().items()}
    return {"rule": aggregator.name, "rule_options": plain}, state


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def check_fields(path: object, content: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Check names and types of what a checkpoint holds beside tensors.

    Args:
        path: of the checkpoint, for messages.
        content: values by name.
        kinds: expected types by name.

    Raises:
        CheckpointError: a value is missing, or has another type.
    """
    for name, kind in kinds.items():
        value = content.get(name)
        if type(value) is not kind:
            raise CheckpointError(
                path, f"{name}: expected {kind.__name__}, got {type(value).__name__}"
            )


def check_sizes(
    path: str,
    rule: str,
    num_clients: int,
    num_params: int,
    content: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> None:
    """Check that the state in a checkpoint has the sizes of a rule, before that rule is made.

    Args:
        path: of the checkpoint, for messages.
        rule: name of the run's rule.
        num_clients: K of the run.
        num_params: d of the model in the checkpoint.
        content, state: as returned by :func:`pack_rule`.

    Raises:
        CheckpointError: the checkpoint has another rule, or options or a state of other sizes.
    """
    check_fields(path, content, {"rule": str, "rule_options": dict})
    _check_name(path, rule, content)
    saved = {**content["rule_options"], **under("option.", state)}
    before = saved.get("num_clients")
    if type(before) is not int or not 0 < before <= num_clients:
        raise CheckpointError(
            path,
            f"rule_options: num_clients was {before!r}, expected at most {num_clients}; it may "
            "only grow, because clients keep their ids",
        )
    if type(saved.get("num_params")) is not int or saved["num_params"] != num_params:
        raise CheckpointError(
            path, f"rule_options: num_params was {saved.get('num_params')!r}, expected {num_params}"
        )
    state_bytes = sum(value.nbytes for value in under("rule.", state).values())
    check_saved(path, rule, saved, {}, state_bytes)


def _check_name(path: str, rule: str, content: Mapping[str, Any]) -> None:
    if content["rule"] != rule:
        raise CheckpointError(
            path,
            f"expected a checkpoint of rule {rule!r}, which this run has, got one of rule "
            f"{content['rule']!r}",
        )


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
    _check_name(path, aggregator.name, content)
    own = aggregator.options()
    new = {"server_optimizer": to_saved("server_optimizer", ServerOptimizer()), "min_active": 1}
    new |= {"clip_norm": None, "noise_multiplier": 0.0}
    saved = {**new, **content["rule_options"], **under("option.", state)}  # new: not in old files
    notes = _accept_more_clients(own, saved)
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
    return notes + list(differing.values())


def _accept_more_clients(own: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Accept a larger number of clients, if the weights of those of before are the same.

    ``saved`` gets the values of ``own`` where the difference is accepted.

    Returns:
        What was accepted, as text.
    """
    before, now = saved["num_clients"], own["num_clients"]
    if before >= now:
        return []
    saved["num_clients"] = now
    weights, old = own.get("client_weights"), saved.get("client_weights")
    if isinstance(weights, Tensor) and isinstance(old, Tensor):
        both_equal = len(old.unique()) == len(weights.unique()) == 1
        if both_equal or _equal(weights[:before], old):
            saved["client_weights"] = weights
    return [f"num_clients was {before}, is {now}"]


def load_rule(
    aggregator: Aggregator, content: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Load the state of a rule that :func:`check_rule` has checked; ``max_norm`` does not change.

    Known norms are kept if ``max_norm`` is the same. If this raises, the aggregator is unchanged.
    """
    given = under("rule.", state)
    options = content["rule_options"]
    own_clients = options.get("num_clients", aggregator.num_clients)
    max_norm = options.get("max_norm", aggregator.max_norm)
    with plain_modes():
        if own_clients < aggregator.num_clients:
            # A new rule, because `aggregator` may remember another run.
            first = type(aggregator)(**{**aggregator.options(), "max_norm": max_norm})
            given = widened_state(first, given, own_clients)
        aggregator.load_state_with(given, max_norm)


def _equal(left: object, right: object) -> bool:
    """Return whether two options are equal; a tuple equals a list, which JSON turns it into."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and torch.equal(left, right)  # type: ignore[arg-type]
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right
