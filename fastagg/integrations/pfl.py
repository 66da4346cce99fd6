# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules in pfl-research: a postprocessor that replaces the sum on the server.

pfl's aggregators add up statistics without knowing the users. A postprocessor sees each user's
statistics together with the user's id, and the sum before it reaches the algorithm. So
:class:`FastAggPostprocessor` is the last postprocessor of a backend: it copies the statistics of
every user and replaces their sum by the rule's aggregate. It needs pfl:
``pip install 'fastagg[pfl]'``.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from fastagg.integrations._optional import require

require("pfl", "pfl", "fastagg.integrations.pfl")

from pfl.common_types import Saveable  # noqa: E402
from pfl.context import CentralContext, UserContext  # noqa: E402
from pfl.internal.ops.selector import get_default_framework_module  # noqa: E402
from pfl.metrics import Metrics, StringMetricName, Weighted  # noqa: E402
from pfl.postprocessor.base import Postprocessor  # noqa: E402
from pfl.stats import MappedVectorStatistics  # noqa: E402

from fastagg import checkpoint  # noqa: E402
from fastagg.aggregator import Aggregator  # noqa: E402
from fastagg.checkpoint import CheckpointError  # noqa: E402
from fastagg.integrations._hosted_rule import (  # noqa: E402
    check_aggregator,
    check_fields,
    check_option_names,
    check_rule,
    check_sizes,
    load_rule,
    pack_rule,
)
from fastagg.integrations._ids import ClientIds  # noqa: E402
from fastagg.making import make  # noqa: E402
from fastagg.modes import plain_modes  # noqa: E402
from fastagg.registry import RuleName  # noqa: E402
from fastagg.report import StepReport  # noqa: E402
from fastagg.updates.row_pool import RowPool  # noqa: E402

_KIND = "integrations.pfl"  # in the place of a rule's name in an aggregator's checkpoint
_FILE = "fastagg.safetensors"


class FastAggPostprocessor(Postprocessor, Saveable):
    """Aggregates with a rule of fastagg in pfl's simulated backend, for PyTorch models.

    The rule gets each user's model difference divided by its weight, so users count equally unless
    the rule has ``client_weights``. The aggregated statistics have weight 1, so the algorithm
    applies the rule's aggregate itself. Users outside the cohort and users whose statistics hold
    NaN or Inf are absent.

    Put it last in the list of postprocessors, so that it copies statistics after clipping and local
    noise were applied. Do not use it with central differential privacy: noise that others add on
    the server would be added to the rule's aggregate, whose sensitivity is not that of a sum.

    Args:
        rule: the name of a rule other than ``stale-models``, which needs the model.
        num_clients: K, the number of users in the data set. A user is assigned an id when it first
            appears; ids are saved with the state.
        **rule_options: options of the rule, without ``staleness`` and ``max_staleness``.

    Attributes:
        last_report: the rule's report of the last round; None before the first.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given. In a
            round: a user appears twice, or there are several worker processes, whose users are not
            all seen by this one.
    """

    def __init__(self, rule: str, *, num_clients: int, **rule_options: Any) -> None:
        if rule == "stale-models":
            raise ValueError(
                "rule: 'stale-models' needs the model, which pfl does not pass to postprocessors; "
                "choose another rule, such as 'stale'"
            )
        check_option_names(rule, rule_options, late="every answer in pfl is one of its own round")
        self._rule = RuleName(rule)
        self._options = {"nonfinite": "drop", **rule_options, "num_clients": num_clients}
        check_aggregator(make(self._rule, num_params=1, **self._options), num_clients, {})
        self._ids = ClientIds(num_clients)
        self._shapes: dict[str, list[int]] = {}
        self._aggregator: Aggregator | None = None
        self._rows: RowPool | None = None
        self._users: list[str] = []  # users of this round; user i has row i
        self.last_report: StepReport | None = None

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Copy a user's statistics; return them unchanged."""
        user = str(user_context.user_id)
        if user_context.user_id is None:
            raise ValueError("user_context: expected a user with an id, got one without")
        if user in self._users:
            raise ValueError(f"user_context: expected every user once in a cohort, {user!r} twice")
        if len(self._users) == self._options["num_clients"]:
            raise ValueError(
                "num_clients: expected at least the number of users in a cohort, got "
                f"{len(self._users)}"
            )
        workers = get_default_framework_module().distributed.world_size
        if workers > 1:
            raise ValueError(
                f"world_size: expected one worker process, which sees every user, got {workers}"
            )
        shapes = {name: list(value.shape) for name, value in stats.items()}
        if not self._shapes:
            self._set_shapes(shapes)
        elif shapes != self._shapes:
            raise ValueError(f"stats: expected the shapes {self._shapes}, got {shapes} of {user!r}")
        row = self._pool().row(len(self._users))
        for name, part in self._parts(row).items():
            part.copy_(stats[name])
        if stats.weight != 1.0:
            row.div_(stats.weight)
        self._users.append(user)
        return stats, Metrics()

    def postprocess_server(
        self,
        *,
        stats: MappedVectorStatistics,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Return the rule's aggregate in the place of the sum, with weight 1.

        After an exception, the rule is unchanged, and the cohort is over.
        """
        try:
            total, report = self._step(self._users)
        finally:
            self._users = []
            self._pool().release()
        self.last_report = report
        parts = self._parts(total)
        result = MappedVectorStatistics(
            {name: parts[name].to(value.device) for name, value in stats.items()}, weight=1.0
        )
        metrics = Metrics()
        for name, number in (("active", len(report.active)), ("rejected", len(report.rejected))):
            metrics[StringMetricName(f"fastagg {name}")] = Weighted.from_unweighted(number)
        return result, metrics

    def _step(self, users: list[str]) -> tuple[Tensor, StepReport]:
        """Return the aggregate [d] of the rows of these users, and the report of the step."""
        pool, aggregator = self._pool(), self._rule_of_run()
        reported = dict.fromkeys(users)
        found = self._ids.resolve(reported)
        if found.refused:
            raise ValueError(f"user_context: {found.refused}")
        clients = [found.ids[user] for user in users]
        total = torch.zeros(aggregator.num_params, dtype=torch.float32, device="cpu")
        report = aggregator.step(total, pool.rows(range(len(clients))), clients)
        self._ids.remember(found, reported)
        return total, report

    def save(self, dir_path: str) -> None:
        """Write the rule's state and the users' ids to a file in ``dir_path``, without pickle."""
        aggregator = self._rule_of_run()
        path = os.path.join(dir_path, _FILE)
        with aggregator.held("save"), plain_modes():
            rule, state = pack_rule(aggregator)
            content = {**rule, "ids": self._ids.to_json(), "shapes": self._shapes}
            checkpoint.write(path, _KIND, content, state, limit=checkpoint.LISTS_LIMIT)

    def load(self, dir_path: str) -> None:
        """Continue from what :meth:`save` wrote, with the same rule and options.

        A cohort that was not aggregated yet is dropped.

        Raises:
            FileNotFoundError: there is no checkpoint in the folder.
            ValueError: the checkpoint is damaged, or has another rule or other options. The state
                is unchanged.
        """
        path = os.path.join(dir_path, _FILE)
        kind, content, state = checkpoint.read(path, limit=checkpoint.LISTS_LIMIT)
        if kind != _KIND:
            raise ValueError(f"{path}: expected a checkpoint of {_KIND!r}, got one of {kind!r}")
        check_fields(path, content, {"ids": dict, "shapes": dict})
        num_clients = self._options["num_clients"]
        try:
            size = sum(math.prod(_read_shape(shape)) for shape in content["shapes"].values())
            check_sizes(path, self._rule, num_clients, size, content, state)
            ids = ClientIds(num_clients)
            ids.load_json(content["ids"])
            aggregator = make(self._rule, num_params=size, **self._options)
            check_rule(path, aggregator, content, state)
            load_rule(aggregator, content, state)
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(path, error) from error
        self._set_shapes(content["shapes"])
        self._aggregator, self._ids = aggregator, ids
        self._users = []

    def _set_shapes(self, shapes: dict[str, list[int]]) -> None:
        """Make the aggregator and the rows for statistics of these shapes."""
        size = sum(math.prod(shape) for shape in shapes.values())
        aggregator = make(self._rule, num_params=size, **self._options)
        rows = RowPool(aggregator.num_clients, size)
        self._shapes, self._aggregator, self._rows = shapes, aggregator, rows

    def _rule_of_run(self) -> Aggregator:
        if self._aggregator is None:
            raise RuntimeError("there is no state yet: train a user first")
        return self._aggregator

    def _pool(self) -> RowPool:
        if self._rows is None:
            raise RuntimeError("there is no state yet: train a user first")
        return self._rows

    def _parts(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a vector [d] with the names and shapes of the statistics."""
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        parts = zip(self._shapes.items(), vector.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}


def _read_shape(value: object) -> list[int]:
    """Return a shape from a checkpoint.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"shapes: expected lists of sizes, got {str(value)[:200]}")
    return value
