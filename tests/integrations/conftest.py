# SPDX-License-Identifier: Apache-2.0
"""Models in .npy form, as frameworks send them."""

from __future__ import annotations

import importlib
import io
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest


@pytest.fixture
def npy() -> Callable[..., bytes]:
    """Return an array as the bytes of a .npy file."""

    def pack(values: object, dtype: object = None) -> bytes:
        stream = io.BytesIO()
        np.save(stream, np.asarray(values, dtype=dtype), allow_pickle=False)
        return stream.getvalue()

    return pack


class _Messages(logging.Handler):
    """Appends the text of all log records to a list."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that Flower and the strategies log, from INFO on."""
    logger, handler = logging.getLogger("flwr"), _Messages()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def flower_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let newer versions of Flower make messages in a process that they did not start."""
    try:
        module = importlib.import_module("flwr.supercore.task_identity")
    except ModuleNotFoundError:
        return
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(module.TaskIdentity, name, 1)
