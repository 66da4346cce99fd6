# SPDX-License-Identifier: Apache-2.0
"""The global model of a server: the parameters, the running statistics and the other arrays.

It comes as arrays, from a framework or from a checkpoint, and is sent as arrays. The rule has the
arrays with the role "rule" as one vector, :mod:`fastagg.integrations._statistics` those with the
role "mean"; those with the role "server" are sent as they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastagg.aggregator import Aggregator
from fastagg.integrations._hosted_rule import under
from fastagg.integrations._statistics import Statistics
from fastagg.integrations._wire import Arrays, WireLayout
from fastagg.norm_bound import MaxNorm


class Content(NamedTuple):
    """What a model of a layout holds.

    Attributes:
        params: [d] float32.
        statistics: [m] float32.
        carried: the arrays with the role "server", .npy bytes by name.
    """

    params: Tensor
    statistics: Tensor
    carried: dict[str, bytes]


class GlobalModel:
    """The arrays of a model that a server trains and sends.

    Args:
        layout: the arrays. There are no values before :meth:`take`.

    Attributes:
        layout: the arrays.
        params: the parameters, [d] float32; a step changes them in place.
        statistics: the running statistics.
        carried: the arrays with the role "server", .npy bytes by name.
    """

    def __init__(self, layout: WireLayout) -> None:
        self.layout = layout
        self.params = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.statistics = Statistics(layout)
        self.carried: dict[str, bytes] = {}

    def read(self, arrays: Arrays) -> Content:
        """Return the values of a model of this layout, for :meth:`take`; nothing changes.

        Args:
            arrays: .npy bytes by name. Where one with the role "server" is missing, the present
                one stays.

        Raises:
            WireError: an array cannot be read or holds NaN or Inf, a variance is negative, or
                names, shapes or dtypes differ from those of the layout.
        """
        params, statistics = self.layout.flatten(arrays), self.statistics.flatten(arrays)
        return Content(params, statistics, self.carried | self.layout.carried(arrays))

    def take(self, content: Content) -> None:
        """Take the values that :meth:`read` returned; ``params`` is another tensor then."""
        self.params, self.statistics.values, self.carried = content

    def check_covered(self, rule: Aggregator) -> None:
        """Raise ValueError if the rule has noise, but arrays would be sent without it."""
        if rule.noise_multiplier > 0.0 and self.layout.num_statistics:
            raise ValueError(
                "roles: expected no array with the role 'mean' with noise_multiplier, because "
                "means of statistics have no noise, got "
                f"{self.layout.num_statistics} such numbers; give them the role 'rule', 'server' "
                "or 'local'"
            )

    def arrays(self) -> dict[str, bytes]:
        """Return the model: .npy bytes by name, without arrays with the role "local"."""
        return self.layout.unflatten(self.params, self.statistics.values, self.carried)

    def array_types(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return a dict from the names of :meth:`arrays` to NumPy's dtype name and the shape."""
        return {slot.name: (slot.dtype, slot.shape) for slot in self.layout.sent}

    def names(self, count: int | None = None) -> list[str]:
        """Return the names of arrays that a framework sends without names, in the model's order.

        Args:
            count: their number. As many as :meth:`arrays` returns are those; else they are taken
                for the first arrays of the whole model, and what exceeds it is named by position.
                None: all arrays of the model.
        """
        if count == len(self.layout.sent):
            return [slot.name for slot in self.layout.sent]
        names = [slot.name for slot in self.layout.slots]
        return names if count is None else [*names, *map(str, range(len(names), count))][:count]

    def saved(self, max_norm: MaxNorm) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores beside ``params``.

        Args:
            max_norm: of the rule, as for :meth:`Statistics.state`.
        """
        state = {f"statistics.{k}": v for k, v in self.statistics.state(max_norm).items()}
        for name, data in self.carried.items():
            state[f"carried.{name}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return state

    @classmethod
    def from_saved(cls, layout: WireLayout, state: Mapping[str, Tensor]) -> GlobalModel:
        """Make the model of a checkpoint, which may come from anybody.

        Its statistics are checked, and not taken before :meth:`load_statistics`.

        Args:
            layout: the arrays.
            state: tensors of the checkpoint, among them "params" and those of :meth:`saved`.

        Raises:
            ValueError: they are not those of a model of this layout, or not finite.
        """
        params = state["params"]
        if params.shape != (layout.num_params,) or params.dtype != torch.float32:
            raise ValueError(
                f"params: expected [{layout.num_params}] float32, got {[*params.shape]} "
                f"{params.dtype}"
            )
        carried = {k: value.numpy().tobytes() for k, value in under("carried.", state).items()}
        expected = {slot.name for slot in layout.slots if slot.role == "server"}
        if carried.keys() != expected:
            raise ValueError(
                f"carried: expected the arrays {sorted(expected)}, got {sorted(carried)}"
            )
        none = torch.zeros(0, dtype=torch.float32, device="cpu")
        statistics = state.get("statistics.values", none)
        if statistics.shape != (layout.num_statistics,) or statistics.dtype != torch.float32:
            raise ValueError(
                f"statistics: expected [{layout.num_statistics}] float32, got "
                f"{[*statistics.shape]} {statistics.dtype}"
            )
        layout.flatten(layout.unflatten(params, statistics, carried))
        model = cls(layout)
        model.params, model.carried = params, carried
        return model

    def load_statistics(self, state: Mapping[str, Tensor], saved: MaxNorm, wanted: MaxNorm) -> None:
        """Take the statistics of a checkpoint; see :meth:`Statistics.load`.

        Args:
            state: tensors of the checkpoint, among them those of :meth:`saved`.
            saved: the rule's ``max_norm`` when they were saved.
            wanted: the present one.

        Raises:
            TypeError, ValueError: no rounds lead to these statistics. They are not taken.
        """
        self.statistics.load(under("statistics.", state), saved, wanted)
