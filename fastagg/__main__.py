# SPDX-License-Identifier: Apache-2.0
"""``python -m fastagg``: print versions and build, and check every op on this machine."""

from __future__ import annotations

import platform
import sys
import time

import torch

import fastagg
from fastagg import ops
from fastagg.ops import selfcheck


def main() -> int:
    """Print the report; return 1 if an op disagrees with the oracle."""
    info = fastagg.build_info()
    isa = f"{info['isa']} (this processor's best: {info['isa_detected']})"
    for name, value in [
        ("fastagg", fastagg.__version__),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__} (extension built against {info['torch']})"),
        ("compiler", f"{info['compiler']}, C++ {info['cxx']}"),
        ("instructions", isa),
        ("threads", torch.get_num_threads()),
        ("CUDA kernels", info["cuda_archs"] or "none: CPU-only build"),
        ("rules", ", ".join(fastagg.available())),
    ]:
        print(f"{name:<13} {value}")
    return 0 if all([_check(device) for device in ops.devices()]) else 1


def _check(device: str) -> bool:
    """Check every op on a device and print the results; return whether all ops passed."""
    print(f"\nself-check on {device} against the float64 oracle (largest relative error, bound)")
    start = time.perf_counter()
    checks = selfcheck.run(device=device)
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        print(f"  {check.op:<16} {check.error:.1e}  <= {check.bound:.0e}  {verdict}")
    agreeing = sum(check.passed for check in checks)
    print(f"{agreeing} of {len(checks)} ops agree, {time.perf_counter() - start:.1f} s")
    return agreeing == len(checks)


if __name__ == "__main__":
    sys.exit(main())
