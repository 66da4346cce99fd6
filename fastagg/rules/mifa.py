# SPDX-License-Identifier: Apache-2.0
"""MIFA: memory-augmented impatient federated averaging (Gu et al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastagg.registry import register
from fastagg.rules._memory_rule import MemoryOptions, MemoryRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


@register("mifa")
class MIFA(MemoryRule):
    """``params += server_lr * sum_k w_k m_k`` over all K clients (Su et al. eq. 44).

    m_k is client k's last update, and zero before its first one. In a round without active clients
    the sum is that of the round before, and the parameters move by it again (Gu et al. 2021,
    Algorithm 1: in every round the server averages the remembered updates of all clients).

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: 1/K each.
        empty_rounds: "apply" moves the parameters in a round without active clients; "skip" leaves
            them unchanged.
        **options: ``memory_dtype``, ``memory_folder``, ``max_age`` (:class:`MemoryRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).
    """

    no_noise = ""

    def __init__(self, *, empty_rounds: str = "apply", **options: Unpack[MemoryOptions]) -> None:
        super().__init__(**options)
        if empty_rounds not in ("apply", "skip"):
            raise ValueError(f'empty_rounds: expected "apply" or "skip", got {empty_rounds!r}')
        self.empty_rounds = empty_rounds
        self.moves_without_clients = empty_rounds == "apply"
