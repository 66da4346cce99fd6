# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: control variates against client drift (Karimireddy et al. 2020)."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastagg import ops
from fastagg.aggregator import Aggregator, CommonOptions, Prepared, State
from fastagg.costs import Cost, Sizes
from fastagg.options import FLOAT32_LIMIT
from fastagg.registry import register
from fastagg.rules._overlap import refuse_shared_memory
from fastagg.updates.cohort import Cohort

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ROUNDING = 1.0 + 2.0**-20
"""Covers the float32 roundings of one round's control variates, a few of relative size 2^-24."""


@register("scaffold")
class Scaffold(Aggregator):
    """The server's part of SCAFFOLD (Algorithm 1, option II), in one pass over the updates.

    Every client i has a control variate c_i, the server has their mean c; all are zero at first.
    An active client adds ``control(i) = c - c_i`` to each of the gradients of its K_i local steps
    at rate eta_l, and the server does, for the active clients i::

        params += server_lr * mean_i u_i
        c_i    += d_i,   d_i = -c - u_i / (K_i eta_l)      # the mean of its local gradients
        c      += 1/K sum_i d_i

    In the paper a client keeps its c_i and uploads d_i besides u_i. Since d_i follows from u_i,
    the server here does that for the clients: they need no state, but the server must know
    K_i eta_l. Uploads are still to be counted as the paper's, two for a client and round.

    Option I of the paper, c_i = the gradient at the global model, is not offered: it takes a
    further pass over the clients' data and a second row from each of them.

    Args:
        local_work: K_i eta_l > 0, the number of local steps times the local learning rate (the sum
            of the rates, if they change within the round): one number, or [K] of them. May be
            changed between steps, and has to be where the learning rate decays.
        **options: those of :class:`fastagg.aggregator.Aggregator`.

    Attributes:
        controls: [K, d] float32, c_i.
        mean_control: [d] float32, c.
    """

    column_state = frozenset({"controls", "mean_control"})
    uploads_per_client: ClassVar[int] = 2
    """Vectors of size d that the paper's clients send in a round."""

    def __init__(
        self, *, local_work: float | Sequence[float] | Tensor, **options: Unpack[CommonOptions]
    ) -> None:
        super().__init__(**options)
        self.local_work = local_work
        self.controls = torch.zeros(self.num_clients, self.num_params, device=self.device)
        self.mean_control = torch.zeros(self.num_params, device=self.device)
        self._peaks = torch.zeros(self.num_clients, dtype=torch.float64)  # >= |controls[k]|
        self._mean_peak = 0.0  # >= |mean_control|

    @property
    def local_work(self) -> Tensor:
        """K_i eta_l of every client: [K] float64, > 0. A number sets all of them."""
        return self._local_work

    @local_work.setter
    def local_work(self, value: float | Sequence[float] | Tensor) -> None:
        self._local_work = _read_work(value, self.num_clients)

    @torch.no_grad()
    def control(self, client: int, out: Tensor | None = None) -> Tensor:
        """c - c_i, what the client adds to each of its gradients in the coming round.

        Args:
            client: its id.
            out: [d] float32, contiguous, to be overwritten; None: a new tensor.

        Returns:
            ``out``.

        Raises:
            IndexError: there is no such client.
        """
        client = operator.index(client)
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client: expected an id in [0, {self.num_clients}), got {client}")
        if out is None:
            out = torch.empty_like(self.mean_control)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        return ops.weighted_sum_(out, [self.mean_control, self.controls[client]], signs, beta=0.0)

    def _prepare(self, params: Tensor, cohort: Cohort) -> Prepared:
        peak = self._params_peak(params)
        clients, size = cohort.clients, len(cohort)
        refuse_shared_memory(cohort, [self.controls, self.mean_control])
        row_peaks = self._row_peaks(cohort)  # [S]
        self._check_range(peak, row_peaks.mean().item())
        gradients = row_peaks / self.local_work[clients]  # [S], bounds of u_i / (K_i eta_l)
        if not self._fits(clients, gradients):
            self._measure()
            if not self._fits(clients, gradients):
                raise ValueError(
                    "updates: too large, control variates could leave the range of float32 "
                    f"(updates up to {row_peaks.max().item():.3g}, local_work from "
                    f"{self.local_work[clients].min().item():.3g})"
                )
        inverse = -1.0 / self.local_work[clients]  # [S]
        weights = torch.full((size,), 1.0 / size, dtype=torch.float64)

        def commit() -> None:
            ops.weighted_sum_(params, cohort.tensors, self.server_lr * weights)
            factors = torch.stack([torch.full_like(inverse, -1.0), inverse], dim=1)  # [S, 2]
            for client, row, own in zip(cohort.ids, cohort.tensors, factors, strict=True):
                ops.weighted_sum_(self.controls[client], [self.mean_control, row], own)
            share = size / self.num_clients
            ops.weighted_sum_(
                self.mean_control, cohort.tensors, inverse / self.num_clients, beta=1.0 - share
            )
            self._peaks[clients] = self._bounds(clients, gradients)
            self._mean_peak = _ROUNDING * (
                (1.0 - share) * self._mean_peak + gradients.sum().item() / self.num_clients
            )

        return Prepared(weights, commit)

    def _bounds(self, clients: Tensor, gradients: Tensor) -> Tensor:
        """Bounds of the new control variates of ``clients``, [S]: old, mean, and new part."""
        return (self._peaks[clients] + self._mean_peak + gradients) * _ROUNDING

    def _fits(self, clients: Tensor, gradients: Tensor) -> bool:
        """Whether the new control variates, and differences of any two, fit into float32."""
        bounds = self._bounds(clients, gradients)
        mean = self._mean_peak + gradients.sum().item() / self.num_clients
        return bool((2.0 * (bounds + mean) <= FLOAT32_LIMIT).all())

    def _measure(self) -> None:
        self._peaks = self.columns.abs_max(self.controls).to(torch.float64)
        self._mean_peak = self.columns.abs_max([self.mean_control]).item()

    def _state(self) -> State:
        return {"controls": self.controls, "mean_control": self.mean_control}

    def _state_loaded(self) -> None:
        self._measure()

    def options(self) -> dict[str, Any]:
        return super().options() | {"local_work": self.local_work}

    @classmethod
    def cost(cls, sizes: Sizes, options: Mapping[str, Any]) -> Cost:
        # abs_max of params and rows; rows to params; each with c to c_i; rows to c
        K, S, d = sizes.K, sizes.S, sizes.d
        return Cost(4 * K * d + 4 * d, 0, 28 * S * d + 20 * d, 8 * S * d + d)


def _read_work(value: object, num_clients: int) -> Tensor:
    if isinstance(value, bool):
        raise TypeError(f"local_work: expected a number or {num_clients} of them, got {value}")
    try:
        work = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"local_work: expected a number or {num_clients} of them, got {value!r}: {error}"
        ) from error
    if work.shape not in ((), (num_clients,)):
        raise ValueError(
            f"local_work: expected a number or shape [{num_clients}], got {list(work.shape)}"
        )
    if not bool(((work > 0) & torch.isfinite(work)).all()):
        raise ValueError(f"local_work: expected finite numbers > 0, got {work.tolist()}")
    return work.expand(num_clients).clone()
