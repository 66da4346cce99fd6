# SPDX-License-Identifier: Apache-2.0
"""Server optimizers: how the parameters move along the aggregate of a rule (``server_optimizer``).

The optimizers and the names of their arguments are those of Reddi et al. 2021, "Adaptive Federated
Optimization" (FedOpt). Momentum on the server (FedAvgM) is from Hsu et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from fastagg import ops
from fastagg.checkpoint import invariants
from fastagg.costs import Cost
from fastagg.options import (
    FLOAT32_LIMIT,
    LARGEST_ROW,
    from_saved,
    read_choice,
    read_factor,
    replace_fields,
)
from fastagg.report import Aggregate
from fastagg.updates.allocation import allocate_vector
from fastagg.updates.columns import Columns

_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sgd": {},
        "momentum": {"beta_1": 0.9},
        "nesterov": {"beta_1": 0.9},
        "adam": {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3, "bias_correction": "none"},
        "yogi": {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3},
        "adagrad": {"beta_1": 0.0, "tau": 1e-3},
    }
)
"""The arguments of each optimizer, and their defaults."""
_CORRECTIONS = {"none": None, "adam": 0, "flower": 1}
"""Values of ``bias_correction``, and what is added to the number of the step."""

_LARGEST_BETA = 1.0 - 2.0**-20
"""Then a sum of aggregates with momentum is at most 2^20 times the largest one."""
_LEAST_TAU = 1e-12
"""Far above the root of the smallest normal float32, which is the smallest s that is kept."""
_LARGEST_ADAPTIVE = 1e10
"""Largest magnitude in a row with ``nonfinite="drop"``, for server_lr <= 1. The aggregates of 10^6
rounds of any rule are below 2e6 times this, and the sum of their squares fits into float32."""
_ADAPTIVE_ERROR = 1e12
"""Error of an aggregate near 1.8e19, the root of the float32 maximum, that the margin of
``FLOAT32_LIMIT`` allows for in its square."""
_ROUNDING = 1.0 + 2.0**-20
"""Margin for the float32 roundings of a step, each of relative size 2^-24."""


@dataclass(frozen=True)
class ServerOptimizer:
    """The option ``server_optimizer``: how a step moves the parameters along its aggregate v.

    ::

        "sgd"       params += server_lr * v
        "momentum"  m = beta_1 m + v
                    params += server_lr * m
        "nesterov"  m = beta_1 m + v
                    params += server_lr * (v + beta_1 m)
        "adam", "yogi", "adagrad"
                    m = beta_1 m + (1 - beta_1) v
                    s = beta_2 s + (1 - beta_2) v^2                 # "adam"
                        s - (1 - beta_2) v^2 sign(s - v^2)          # "yogi"
                        s + v^2                                     # "adagrad"
                    params += server_lr * m / (sqrt(s) + tau)

    m and s are zero at first, and steps use their new values. "momentum" is FedAvgM of Hsu et al.
    2019; "nesterov" takes the step of ``torch.optim.SGD(nesterov=True)``. "adam", "yogi" and
    "adagrad" are FedAdam, FedYogi and FedAdagrad of Reddi et al. 2021, Algorithm 2, where s is
    v_t, with the difference that the paper starts s at tau^2 or more. The defaults are those of
    its experiments; Flower's FedAdam and FedAdagrad have ``tau=1e-9``.

    Args:
        name: one of the names above.
        beta_1: in [0, 1 - 2^-20]; not "sgd". Default: 0.9; 0 for "adagrad".
        beta_2: in [0, 1 - 2^-20]; "adam" and "yogi" only. Default: 0.99.
        tau: >= 1e-12, in units of the updates; adaptive optimizers only. Default: 1e-3.
        bias_correction: "adam" only. With "adam" or "flower", ``server_lr`` is multiplied by
            ``sqrt(1 - beta_2^n) / (1 - beta_1^n)``. In step t = 1, 2, ..., "adam" has n = t
            (Kingma and Ba 2015), and "flower" has n = t + 1, as Flower's FedAdam. Default: "none",
            as in FedOpt.

    Raises:
        TypeError, ValueError: an argument is not as described, or the optimizer does not have it.
    """

    name: str = "sgd"
    beta_1: float | None = None
    beta_2: float | None = None
    tau: float | None = None
    bias_correction: str | None = None

    def __post_init__(self) -> None:
        read_choice("server_optimizer: name", self.name, list(_DEFAULTS))
        defaults = _DEFAULTS[self.name]
        for field in fields(self)[1:]:
            name, value = field.name, getattr(self, field.name)
            if value is not None and name not in defaults:
                raise ValueError(
                    f"server_optimizer: {name}: expected None, because {self.name!r} has "
                    f"{list(defaults) or 'no arguments'}, got {value!r}"
                )
            if name in defaults:
                value = _read_argument(name, defaults[name] if value is None else value)
            replace_fields(self, **{name: value})

    @property
    def is_adaptive(self) -> bool:
        """Whether it has a second moment s."""
        return self.tau is not None

    @property
    def largest_row(self) -> float:
        """Largest accepted magnitude in a row with ``nonfinite="drop"``, for server_lr <= 1."""
        return _LARGEST_ADAPTIVE if self.is_adaptive else LARGEST_ROW * self._room

    @property
    def largest_error(self) -> float:
        """Largest error of the bound of an aggregate that range checks allow for."""
        return _ADAPTIVE_ERROR if self.is_adaptive else LARGEST_ROW * self._room

    @property
    def _room(self) -> float:
        """1 / (the largest sum of aggregates of magnitude 1), without a second moment."""
        return 1.0 - (self.beta_1 or 0.0)


def _read_argument(name: str, value: object) -> Any:
    label = f"server_optimizer: {name}"
    if name == "bias_correction":
        return read_choice(label, value, list(_CORRECTIONS))
    number = read_factor(label, value)
    if name == "tau":
        if number < _LEAST_TAU:
            raise ValueError(f"{label}: expected a number >= {_LEAST_TAU}, got {number}")
    elif number > _LARGEST_BETA:
        raise ValueError(f"{label}: expected a number in [0, 1 - 2^-20], got {number}")
    return number


def read_server_optimizer(value: object) -> ServerOptimizer:
    """Return the option ``server_optimizer``.

    Args:
        value: a name, a :class:`ServerOptimizer`, or a mapping of its arguments, as
            :func:`fastagg.options.to_saved` makes it.

    Raises:
        TypeError, ValueError: ``value`` is not as described.
    """
    if isinstance(value, ServerOptimizer):
        return value
    if isinstance(value, str):
        return ServerOptimizer(read_choice("server_optimizer", value, list(_DEFAULTS)))
    if not isinstance(value, Mapping):
        raise TypeError(
            f"server_optimizer: expected one of {list(_DEFAULTS)}, a ServerOptimizer or a mapping "
            f"of its arguments, got {value!r} ({type(value).__name__})"
        )
    return from_saved("server_optimizer", value, ServerOptimizer)


def optimizer_cost(value: object, num_params: int) -> Cost:
    """Return what an option ``server_optimizer`` adds to the cost of a rule.

    Raises:
        TypeError, ValueError: the option is not valid.
    """
    optimizer, d = read_server_optimizer(value), num_params
    if optimizer.name == "sgd":
        return Cost(0, 0, 0, 0)
    count = 8 if _counts_steps(optimizer) else 0
    if not optimizer.is_adaptive:
        return Cost(4 * d + count, 0, 8 * d, (4 if optimizer.name == "nesterov" else 2) * d)
    # m takes three operations, s up to six with the square; root, sum and quotient are the step
    return Cost(8 * d + count, 0, 16 * d, 12 * d)


def _counts_steps(optimizer: ServerOptimizer) -> bool:
    return _CORRECTIONS.get(optimizer.bias_correction or "none") is not None


class Moments:
    """The state of a server optimizer other than "sgd", and its steps.

    Args:
        optimizer: the option.
        num_params: d.
        device: where the moments live.

    Attributes:
        m: [d] float32, the momentum, or the first moment.
        s: [d] float32, >= 0, the second moment; None without it.
        steps: [] int64, the number of steps; None without bias correction.
    """

    column_state = frozenset({"m", "s"})
    """Names of the state whose last dimension is d."""

    def __init__(self, optimizer: ServerOptimizer, num_params: int, device: torch.device) -> None:
        self.optimizer = optimizer
        self.m = allocate_vector(num_params, device)
        self.s = allocate_vector(num_params, device) if optimizer.is_adaptive else None
        self.steps: Tensor | None = None
        if _counts_steps(optimizer):
            self.steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._bounds = (0.0, 0.0)  # >= |m|, >= s

    def rate(self, server_lr: float) -> float:
        """Return the learning rate of the next step."""
        if self.steps is None:
            return server_lr
        offset = _CORRECTIONS[cast(str, self.optimizer.bias_correction)]
        n = int(self.steps) + 1 + cast(int, offset)
        beta_1, beta_2 = cast(float, self.optimizer.beta_1), cast(float, self.optimizer.beta_2)
        return server_lr * math.sqrt(1.0 - beta_2**n) / (1.0 - beta_1**n)

    def change(self, aggregate: float, server_lr: float) -> float:
        """Return a bound of how far the next step moves a parameter.

        Args:
            aggregate: an upper bound of the magnitudes in the aggregate.
            server_lr: the server learning rate.

        Returns:
            The bound; infinite if moments or the step could leave the range of float32.
        """
        first, second = self._after(aggregate)
        step = first
        if self.optimizer.name == "nesterov":
            step = aggregate + first
        elif self.optimizer.is_adaptive:
            step = first / cast(float, self.optimizer.tau) * _ROUNDING
        if not max(first, second, step) <= FLOAT32_LIMIT:
            return math.inf
        return self.rate(server_lr) * step

    def _after(self, aggregate: float) -> tuple[float, float]:
        """Return bounds of |m| and s after a step with an aggregate up to ``aggregate``."""
        first, second = self._bounds
        beta_1 = cast(float, self.optimizer.beta_1)
        if not self.optimizer.is_adaptive:
            return (beta_1 * first + aggregate) * _ROUNDING, 0.0
        square = aggregate * aggregate
        if self.optimizer.name == "adagrad":
            second += square
        else:  # the s of "yogi" grows to less than 2 v^2, and that of "adam" not above v^2
            second = max(second, 2.0 * square)
        return max(first, aggregate) * _ROUNDING, second * _ROUNDING

    def measure(self, columns: Columns) -> None:
        """Replace the bounds of the moments by their exact values."""
        moments = [self.m] if self.s is None else [self.m, self.s]
        peaks = columns.abs_max(moments).tolist()
        self._bounds = peaks[0], (peaks[1] if self.s is not None else 0.0)

    def move_(self, params: Tensor, aggregate: Aggregate, server_lr: float) -> None:
        """Take a step, in place. ``change`` must have been finite."""
        rate, bounds = self.rate(server_lr), self._after(aggregate.peak)
        vector, norm, models = aggregate.vector, aggregate.norm, aggregate.models
        beta_1 = cast(float, self.optimizer.beta_1)
        if self.s is None:
            nesterov = self.optimizer.name == "nesterov"
            ops.add_momentum_(params, self.m, vector, rate, beta_1, nesterov, norm, models)
        else:
            beta_2, tau = self.optimizer.beta_2 or 0.0, cast(float, self.optimizer.tau)
            name = self.optimizer.name
            ops.add_adaptive_(
                params, self.m, self.s, vector, name, rate, beta_1, beta_2, tau, norm, models
            )
        if self.steps is not None:
            self.steps += 1
        self._bounds = bounds

    def state(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint holds, not copied."""
        state = {"m": self.m, "s": self.s, "steps": self.steps}
        return {name: value for name, value in state.items() if value is not None}

    def state_loaded(self) -> None:
        """Forget bounds of the moments from before; the next step measures them."""
        self._bounds = (math.inf, math.inf)


def check_moments(state: invariants.State) -> None:
    """Check the moments in a state, whose numbers are finite.

    Raises:
        ValueError: no steps lead to this state.
    """
    if "s" in state:
        invariants.check_range("s", cast(Tensor, state["s"]), 0.0, FLOAT32_LIMIT)
    if "steps" in state:
        steps = cast(Tensor, state["steps"])
        invariants.check_rounds("steps", steps)
        if int(steps) == 0:
            for name in ("m", "s"):
                blank = not bool(cast(Tensor, state[name]).any())
                invariants.require(blank, name, "zeros, because there was no step")
