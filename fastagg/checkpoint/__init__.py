# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the file format of an aggregator, and atomic replacement of files."""

from __future__ import annotations

from fastagg.checkpoint.atomic import replace_text
from fastagg.checkpoint.format import (
    FORMAT,
    HEADER_LIMIT,
    LISTS_LIMIT,
    VERSION,
    CheckpointError,
    Saved,
    Sink,
    opened,
    read,
    write,
)

__all__ = [
    "FORMAT",
    "HEADER_LIMIT",
    "LISTS_LIMIT",
    "VERSION",
    "CheckpointError",
    "Saved",
    "Sink",
    "opened",
    "read",
    "replace_text",
    "write",
]
