# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of a server's run: what the file has, and what is checked when it is read.

A file may come from anybody. All of it is checked before the server takes anything; sizes are
checked before a rule of these sizes is made. When a checkpoint is written is up to the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastagg import checkpoint
from fastagg.aggregator import Aggregator
from fastagg.checkpoint import CheckpointError
from fastagg.integrations._history import MetricHistory
from fastagg.integrations._hosted_rule import (
    check_fields,
    check_rule,
    check_sizes,
    load_rule,
    pack_rule,
)
from fastagg.integrations._ids import ClientIds
from fastagg.integrations._late import EarlierRounds
from fastagg.integrations._late_answers import read_saved, to_save
from fastagg.integrations._model import GlobalModel
from fastagg.integrations._selection import Selection
from fastagg.integrations._wire import WireLayout
from fastagg.modes import plain_modes
from fastagg.norm_bound import read_max_norm
from fastagg.updates.roles import Roles

_KIND = "integrations.server"  # in the place of a rule's name in an aggregator's checkpoint
_MOST_ROUNDS = 1 << 53  # numbers of later rounds are far from the end of an int64
_TENSORS = ("params", "statistics.", "history", "carried.", "earlier.", "option.", "rule.")


@dataclass(frozen=True)
class Run:
    """Everything that later rounds of a server depend on, after a finished round.

    Attributes:
        rounds: number of finished rounds.
        model: the global model.
        rule: the rule, with its state.
        ids: ids of the clients.
        selection: who was asked, and when.
        history: metrics of the rounds.
        earlier: the rounds to which late answers can still count.
        steps: number of steps of the rule, by which late answers have ages.
        name: of the run, by which a folder of late answers is recognized; empty without a folder.
    """

    rounds: int
    model: GlobalModel
    rule: Aggregator
    ids: ClientIds
    selection: Selection
    history: MetricHistory
    earlier: EarlierRounds
    steps: int
    name: str


@dataclass(frozen=True)
class Host:
    """What a server says of itself when it continues a run.

    Attributes:
        rule_name: name of the rule.
        num_clients: K.
        max_clients: the largest K of a run that had grown beyond ``num_clients``.
        roles: patterns of names of arrays and their roles.
        layout: the arrays of the model; None: any, the server has no model yet.
        selection: kind of the selection.
        keeps_models: whether late answers need the models of their rounds.
        saves_earlier: whether the rounds to which late answers can still count are in checkpoints.
        make_ids: return new ids for K clients.
        rule_for: return the rule for d parameters and K clients: the server's own, if it has one
            for K clients, or else a new one.
    """

    rule_name: str
    num_clients: int
    max_clients: int
    roles: Roles
    layout: WireLayout | None
    selection: str
    keeps_models: bool
    saves_earlier: bool
    make_ids: Callable[[int], ClientIds]
    rule_for: Callable[[int, int], Aggregator]


def write_run(path: str | os.PathLike[str], run: Run, *, saves_earlier: bool, keep: int) -> None:
    """Write a run to one file, atomically, without pickle.

    Args:
        path: the file.
        run: the run.
        saves_earlier: whether the file gets the rounds to which late answers can still count, with
            their models.
        keep: number of files to keep: ``path``, and the older ones with ".1", ".2", ... after it.

    Raises:
        ValueError: an option of the rule cannot be stored.
        OSError: the folder does not exist or is not writable. An older file is unchanged.
    """
    with run.rule.held("save"), plain_modes():
        rule, state = pack_rule(run.rule)
        state |= {"params": run.model.params, "history": run.history.to_tensor()}
        state |= run.model.saved(run.rule.max_norm)
        content = {
            **rule,
            "rounds": run.rounds,
            "ids": run.ids.to_json(),
            "asked": run.selection.finished(run.rounds),
            "layout": run.model.layout.to_json(),
        }
        content |= to_save(run.name, run.steps)
        if saves_earlier and run.earlier.most:
            content["earlier"], models = run.earlier.saved(run.rounds, run.steps)
            state |= models
        checkpoint.write(path, _KIND, content, state, keep=keep, limit=checkpoint.LISTS_LIMIT)


def read_run(path: str | os.PathLike[str], host: Host) -> tuple[Run, list[str]]:
    """Read the run that :func:`write_run` wrote, for a server that continues it.

    The state goes into the rule that ``host.rule_for`` returns, after all checks.

    Args:
        path: the file.
        host: the server.

    Returns:
        The run, and the options of the rule that are others than before, as text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or not a server's checkpoint, or does not fit the server.
            Nothing has changed.
    """
    kind, content, state = checkpoint.read(path, limit=checkpoint.LISTS_LIMIT)
    if kind != _KIND:
        raise ValueError(f"{path}: expected the checkpoint of a server, got one of {kind!r}")
    check_fields(path, content, {"rounds": int, "ids": dict, "layout": list})
    try:
        return _read_run(str(path), content, state, host)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(path, error) from error


def _read_run(
    path: str, content: Mapping[str, Any], state: Mapping[str, Tensor], host: Host
) -> tuple[Run, list[str]]:
    """Do what :func:`read_run` does, with any TypeError or ValueError for what does not fit."""
    rounds = content["rounds"]
    if not 0 <= rounds <= _MOST_ROUNDS:
        raise ValueError(f"rounds: expected a number in [0, {_MOST_ROUNDS}], got {rounds}")
    layout = WireLayout.from_json(content["layout"])
    layout.check_roles(host.roles)
    if host.layout is not None and layout != host.layout:
        raise ValueError(f"layout: expected the arrays of {host.layout}, got {layout}")
    unknown = [name for name in state if not name.startswith(_TENSORS)]
    if "params" not in state or unknown:
        raise ValueError(f"expected tensors {[*_TENSORS]}, got {sorted(state)}")
    model = GlobalModel.from_saved(layout, state)
    num_clients = _number_to_resume(content, host)
    check_sizes(path, host.rule_name, num_clients, layout.num_params, content, state)
    ids = host.make_ids(num_clients)
    ids.load_json(content["ids"])
    selection = Selection(host.selection)
    selection.load_json(content.get("asked", {}))
    rule = host.rule_for(layout.num_params, num_clients)
    model.check_covered(rule)
    changed = check_rule(path, rule, content, state)
    history = MetricHistory()
    if "history" in state:  # an older file has none
        history = MetricHistory.from_tensor(state["history"])
    saved_norm = read_max_norm(content["rule_options"].get("max_norm"))
    model.load_statistics(state, saved_norm, rule.max_norm)
    earlier = EarlierRounds(rule.max_staleness, host.keeps_models)
    name, steps = read_saved(content)
    if host.saves_earlier:  # an older file has none
        earlier.load(content.get("earlier", []), state, model.params, rounds, steps)
    load_rule(rule, content, state)
    return Run(rounds, model, rule, ids, selection, history, earlier, steps, name), changed


def _number_to_resume(content: Mapping[str, Any], host: Host) -> int:
    """Return K of the run of a checkpoint that the server may continue."""
    options = content.get("rule_options")
    saved = options.get("num_clients") if isinstance(options, dict) else None
    if isinstance(saved, int) and host.num_clients < saved <= host.max_clients:
        return saved
    return host.num_clients
