# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m fastagg_sim`, which is the same as `fastagg-sim`."""

from __future__ import annotations

import sys

from fastagg_sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
