# SPDX-License-Identifier: Apache-2.0
"""Entry point of `fastagg-sim` and of `python -m fastagg_sim`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit code; 2 if packages that it needs are missing."""
    try:
        from fastagg_sim.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("fastagg", "fastagg_sim"):
            raise
        print(
            f"error: fastagg-sim needs the package {error.name!r}, which is not installed; "
            "pip install 'fastagg[sim]' installs all that it needs",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
