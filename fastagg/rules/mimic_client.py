# SPDX-License-Identifier: Apache-2.0
"""The client's part of MimiC, for servers that use ``MimiC(mode="client")``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import ops


class MimiCClient:
    """A client that keeps its correction itself (``MimiC(mode="client")``).

    In a round in which it takes part, the client sends ``correct_(update)``. When the server has
    sent v back, the client calls ``learn(sent, v)``. If v does not arrive, the client keeps the
    correction of the last round in which it did.

    Args:
        num_params: d.
        device: where the correction lives.

    Attributes:
        correction: [d] float32, c; zeros at first. The client's only state.
    """

    def __init__(self, num_params: int, device: str | torch.device = "cpu") -> None:
        self.correction = torch.zeros(num_params, device=device)

    @torch.no_grad()
    def correct_(self, update: Tensor) -> Tensor:
        """Add the correction to ``update`` [d] float32, in place, and return it: u + c, to send."""
        return ops.weighted_sum_(update, [self.correction], torch.ones(1))

    @torch.no_grad()
    def learn(self, sent: Tensor, aggregate: Tensor) -> None:
        """Replace the correction by ``v - u``, that is, by ``c + v - sent``.

        The rounding of ``sent`` enters both c and ``sent``, so roundings do not add up over rounds.

        Args:
            sent: [d] float32, what :meth:`correct_` returned in this round; not changed.
            aggregate: [d] float32, v, the server's ``aggregate``; not changed.
        """
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        ops.weighted_sum_(self.correction, [aggregate, sent], signs)
