# SPDX-License-Identifier: Apache-2.0
"""The speed of this tree compared with that of an earlier commit."""

from benchmarks.regress.compare import add_options, run

__all__ = ["add_options", "run"]
