# SPDX-License-Identifier: Apache-2.0
"""Entry point of `fastagg-sim` and of `python -m fastagg_sim`."""

from __future__ import annotations

import os
import select
import signal
import sys

_CLOSED = 128 + signal.SIGPIPE  # as shells report a program that this signal ends


def main() -> int:
    """Run the command line and return its exit code.

    It is 2 if packages that the command needs are missing, and 141 if nobody reads its output any
    more, as in `fastagg-sim run --help | head`.
    """
    try:
        try:
            return _run()
        finally:
            if sys.stdout is not None:  # as it is where the shell has closed it
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED


def _has_lost_its_reader(descriptor: int) -> bool:
    """Return whether a file descriptor is a pipe whose reading end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # an error is reported without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run() -> int:
    """Run the command line; report a package that is missing."""
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
