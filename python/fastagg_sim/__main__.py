# SPDX-License-Identifier: Apache-2.0
"""Entry point of `fastagg-sim` and of `python -m fastagg_sim`."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from typing import TextIO

_CLOSED = 128 + signal.SIGPIPE  # as shells report a program that this signal ends


def main() -> int:
    """Run the command line and return its exit code.

    It is 2 if packages that the command needs are missing, FASTAGG_ISA is wrong, or the output
    cannot be written; 130 after Ctrl-C, also while packages are imported; and 141 if nobody reads
    the output any more, as in `fastagg-sim run --help | head`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # "±" where the output is ASCII
    try:
        try:
            return _run()
        finally:
            if sys.stdout is not None:  # as it is where the shell has closed it
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if sys.stdout is None or not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        _discard_output()
        return _CLOSED
    except OSError as error:
        if error.filename is not None or not _is_full(sys.stdout):
            raise
        _discard_output()
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        return 2


def _discard_output() -> None:
    """Let nobody get what is still to be written: Python flushes once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_full(stream: TextIO | None) -> bool:
    """Return whether a stream refuses one more line, as on a full disk."""
    try:
        if stream is not None:
            stream.flush()
            os.write(stream.fileno(), b"\n")
    except OSError:
        return True
    return False


def _has_lost_its_reader(descriptor: int) -> bool:
    """Return whether a file descriptor is a pipe whose reading end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # an error is reported without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run() -> int:
    """Run the command line; report a package that is missing, and a wrong FASTAGG_ISA."""
    try:
        import fastagg  # noqa: F401 (reads FASTAGG_ISA)
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
    except ValueError as error:
        if not str(error).startswith("FASTAGG_ISA="):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
