# SPDX-License-Identifier: Apache-2.0
"""fastagg's rules as strategies of Flower.

``FastAggStrategy`` is for Flower's message API (``flwr.serverapp``), ``FastAggLegacyStrategy`` for
the older API (``flwr.server``). Both need flwr 1.22 or newer: ``pip install 'fastagg[flower]'``.
"""

from fastagg.integrations._optional import require

require("flwr", "flower", "fastagg.integrations.flower")

from fastagg.integrations._flower_legacy import FastAggLegacyStrategy  # noqa: E402
from fastagg.integrations._flower_message import FastAggStrategy  # noqa: E402

__all__ = ["FastAggLegacyStrategy", "FastAggStrategy"]
