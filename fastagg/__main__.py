# SPDX-License-Identifier: Apache-2.0
"""``python -m fastagg``: print versions and build, and check every op on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import fastagg
from fastagg import ops
from fastagg.ops import selfcheck


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report; return 1 if an op disagrees with the oracle.

    Args:
        arguments: of the command line; there are none but --help.

    Raises:
        SystemExit: `arguments` are not empty.
    """
    argparse.ArgumentParser(
        prog="python -m fastagg",
        description="Print versions and build, and check every op on this machine. The exit code "
        "is 1 if an op disagrees with the oracle.",
    ).parse_args(arguments)
    info = fastagg.build_info()
    isa = f"{info['isa']} (this processor's best: {info['isa_detected']})"
    for name, value in [
        ("fastagg", fastagg.__version__),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__} (extension built against {info['torch']})"),
        ("compiler", f"{info['compiler']}, C++ {info['cxx']}"),
        ("instructions", isa),
        ("threads", _threads()),
        ("CUDA kernels", info["cuda_archs"] or "none: CPU-only build"),
        ("rules", ", ".join(fastagg.available())),
    ]:
        print(f"{name:<13} {value}")
    return 0 if all([_check(device) for device in ops.devices()]) else 1


def _threads(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the number of threads, with advice if PyTorch's own ones spin after its operations.

    Args:
        maps: names the loaded libraries; there is no such file on other systems than Linux.
    """
    count = torch.get_num_threads()
    gnu = maps.exists() and "libgomp" in maps.read_text(encoding="utf-8", errors="replace")
    passive = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"
    if count == 1 or not gnu or passive or os.environ.get("GOMP_SPINCOUNT", "").strip().isdigit():
        return str(count)
    return (
        f"{count}; PyTorch's own threads spin for some milliseconds after its operations, on the "
        "cores that a step needs: set GOMP_SPINCOUNT=1000 (docs/threads.md)"
    )


def _check(device: str) -> bool:
    """Check every op on a device and print the results; return whether all ops passed."""
    print(f"\nself-check on {device} against the float64 oracle (largest relative error, bound)")
    start = time.perf_counter()
    checks = selfcheck.run(device=device)
    width = max(len(check.op) for check in checks)
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        print(f"  {check.op:<{width}} {check.error:.1e}  <= {check.bound:.0e}  {verdict}")
    agreeing = sum(check.passed for check in checks)
    print(f"{agreeing} of {len(checks)} ops agree, {time.perf_counter() - start:.1f} s")
    return agreeing == len(checks)


def _run() -> int:
    """Return the exit code of ``main``; 141 if nobody reads the output, as with ``| head -1``."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(_run())
