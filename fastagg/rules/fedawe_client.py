# SPDX-License-Identifier: Apache-2.0
"""The client's part of FedAWE, for a server that averages models."""

from __future__ import annotations

import torch
from torch import Tensor

from fastagg import ops
from fastagg.options import read_count, read_factor
from fastagg.updates.cohort import check_vector


class FedAWEClient:
    """Keep the model of one client between its active rounds, and echo what it has learned.

    With these clients, ``fedavg`` with ``server_lr=1`` and equal weights is FedAWE (Xiang et al.
    2024, Algorithm 1). In a round t in which client i is active::

        train from x_i, not from the server's model x; u = trained - x_i
        answer = x_i + eta (t - tau_i) u     t - tau_i: rounds since it was active last
        send answer, or answer - x to a server that takes updates
        if the answer counted: x_i = the server's new model, tau_i = t

    So the server must send its new model at the end of a round to the clients that were active in
    it. An absent client keeps its model. One whose answer was lost or rejected was absent.

    Args:
        first_model: [d] float32, the same for all clients; it is copied.
        eta: the global rate of the paper, >= 0.
        first_round: the number of the first round: 0 in the paper, 1 under Flower.

    Attributes:
        model: [d] float32, x_i.
        last: tau_i, the last round in which this client was active; at first the one before
            ``first_round``.
    """

    def __init__(self, first_model: Tensor, *, eta: float = 1.0, first_round: int = 0) -> None:
        if not isinstance(first_model, Tensor):
            raise TypeError(f"first_model: expected a tensor, got {type(first_model).__name__}")
        check_vector("first_model", first_model, first_model.numel(), first_model.device)
        self.model = first_model.detach().clone()
        self.eta = read_factor("eta", eta)
        self.last = read_count("first_round", first_round, least=0) - 1

    @torch.no_grad()
    def answer_(self, trained: Tensor, number: int) -> Tensor:
        """Change the trained model into the answer of a round, in place; return it.

        Args:
            trained: [d] float32, the result of training from :attr:`model`.
            number: of the round.

        Raises:
            TypeError, ValueError: an argument is not as described, or the client was active in this
                round or a later one.
        """
        echo = self.eta * self._rounds_since(number)
        check_vector("trained", trained, len(self.model), self.model.device)
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        ops.weighted_sum_(trained, [self.model], -one)
        return ops.weighted_sum_(trained, [self.model], one, beta=echo)

    @torch.no_grad()
    def receive(self, model: Tensor, number: int) -> None:
        """Take the server's new model [d] float32 after a round in which the answer counted.

        Raises:
            TypeError, ValueError: as for :meth:`answer_`, or the model is not finite. Nothing has
                changed.
        """
        self._rounds_since(number)
        check_vector("model", model, len(self.model), self.model.device)
        if not bool(torch.isfinite(model).all()):
            raise ValueError("model: expected finite numbers, got NaN or Inf")
        self.model = model.clone()
        self.last = number

    def _rounds_since(self, number: int) -> int:
        """Return t - tau_i."""
        return read_count("number", number, least=self.last + 1) - self.last
