# SPDX-License-Identifier: Apache-2.0
"""Stale models: use the last local model of an absent client again (released FL-FDMS code)."""

from __future__ import annotations

from fastagg.registry import register
from fastagg.rules.stale import Stale
from fastagg.staleness import no_late_rows


@register("stale-models")
class StaleModels(Stale):
    """``params += server_lr * (weighted mean of m_k over the clients seen - params)``.

    m_k is client k's last local model: the global model of its last active round plus its update.
    With ``server_lr=1`` the new model is the mean of the last local models, as in the released
    FL-FDMS code. This mean contains old global models, so progress is slower and smoother than with
    :class:`fastagg.Stale`.

    The rule takes no late rows: their local models contain the global model of their own round,
    which the server does not keep. ``stale`` takes them.

    Args:
        client_weights: [K] relative weights, for instance sample counts; None: equal.
        **options: ``memory_dtype``, ``memory_folder``, ``max_age`` (:class:`MemoryRule`), and the
            options of every rule (:class:`fastagg.Aggregator`).

    A step raises ValueError if all clients seen so far have weight 0.
    """

    remembers_models = True
    refused_staleness = no_late_rows(
        "the local model of a late row contains the global model of its own round, which the "
        'server does not keep; use the rule "stale"'
    )
    no_noise = "it averages local models, in whose rounding an update is not bounded by clip_norm"
