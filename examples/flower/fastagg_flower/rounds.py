# SPDX-License-Identifier: Apache-2.0
"""A file with one line per round: active, absent and rejected clients, and a hash of the model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from fastagg import FlatLayout
from fastagg_flower import task


def digest(params: Tensor) -> str:
    """Return a hash of the bits of a model, [d] float32."""
    return hashlib.sha256(params.numpy().tobytes()).hexdigest()


class RoundLog:
    """Appends one line per round to the file ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, report: Any, params: Tensor) -> None:
        line = {
            "round": report.round,
            "active": report.active,
            "nodes": report.ids,
            "absent": report.absent,
            "rejected": report.rejected,
            "friends": report.friends,
            "accuracy": self.accuracy(params),
            "params": digest(params),
            "pid": os.getpid(),  # of the server, which may be restarted
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @staticmethod
    def accuracy(params: Tensor) -> float:
        net = task.model()
        layout = FlatLayout.from_module(net)
        net.load_state_dict(layout.state_dict(params))
        return task.accuracy(net)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
