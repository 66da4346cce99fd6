# SPDX-License-Identifier: Apache-2.0
"""The client's part of MimiC, for servers that use ``MimiC(mode="client")``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_device, read_size
from fastagg.updates.cohort import check_vector


class MimiCClient:
    """Keep and apply the correction of one client, for a server with ``MimiC(mode="client")``.

    In each round in which it is active, the client sends ``correct_(update)``. When the server has
    sent v back, the client calls ``learn(sent, v)``. If v does not arrive, the client does not call
    it and keeps its present correction.

    Args:
        num_params: d.
        device: where the correction lives.

    Attributes:
        correction: [d] float32, c; zeros at first. The client's only state.
    """

    def __init__(self, num_params: int, device: str | torch.device = "cpu") -> None:
        size, place = read_size("num_params", num_params), read_device(device)
        self.correction = torch.zeros(size, device=place, dtype=torch.float32)

    @torch.no_grad()
    def correct_(self, update: Tensor) -> Tensor:
        """Add the correction to ``update`` [d] float32 in place; return it, to be sent.

        Raises:
            TypeError, ValueError: ``update`` is not as described.
        """
        check_vector("update", update, len(self.correction), self.correction.device)
        one = torch.ones(1, dtype=torch.float32, device="cpu")
        return ops.weighted_sum_(update, [self.correction], one)

    @torch.no_grad()
    def learn(self, sent: Tensor, aggregate: Tensor) -> None:
        """Replace the correction by ``v - u``, computed as ``c + v - sent``.

        The error of c is the rounding of this ``sent`` only: errors do not accumulate over rounds.

        Args:
            sent: [d] float32, the result of :meth:`correct_` in this round; not changed.
            aggregate: [d] float32, v, the server's ``aggregate``; not changed.

        Raises:
            TypeError, ValueError: an argument is not as described. The correction is unchanged.
        """
        for name, value in (("sent", sent), ("aggregate", aggregate)):
            check_vector(name, value, len(self.correction), self.correction.device)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64, device="cpu")
        ops.weighted_sum_(self.correction, [aggregate, sent], signs)
