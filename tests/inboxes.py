# SPDX-License-Identifier: Apache-2.0
"""Small inboxes and rows for the tests of fastagg.Inbox."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastagg import Inbox

K, D = 4, 3


def row(value: float) -> Tensor:
    return torch.full((D,), float(value))


def make(**options: Any) -> Inbox:
    return Inbox(**{"num_clients": K, "num_params": D, "capacity": 10, **options})
