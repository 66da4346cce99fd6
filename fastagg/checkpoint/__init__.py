# SPDX-License-Identifier: Apache-2.0
"""Aggregators in files: the format, and how a file is replaced atomically."""

from __future__ import annotations

from fastagg.checkpoint.atomic import replace_text
from fastagg.checkpoint.format import FORMAT, VERSION, Saved, opened, read, write

__all__ = ["FORMAT", "VERSION", "Saved", "opened", "read", "replace_text", "write"]
