# SPDX-License-Identifier: Apache-2.0
"""MIFA: memory-augmented impatient federated averaging (Gu et al. 2021)."""

from __future__ import annotations

from fastagg.registry import register
from fastagg.rules._memory_rule import MemoryRule


@register("mifa")
class MIFA(MemoryRule):
    """``params += server_lr * sum_k w_k m_k`` over all K clients (Su et al. eq. 44).

    m_k is client k's last update, zero as long as it was never active.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: 1/K each.
        **options: those of :class:`fastagg.aggregator.Aggregator`.
    """
