# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.gpu_sanitized [cuda|cpu]``: short runs of every op for compute-sanitizer.

Runs small shapes of both Gram kernels, TF32, and rows of 16-bit floats, and prints each result when
it is known. The exit status is 1 if a result is wrong. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 with
compute-sanitizer: in torch's pool of memory, most overruns stay inside a block of the pool.
"""

from __future__ import annotations

import sys

import torch

from fastagg import ops
from fastagg.ops import selfcheck

SHAPES = ((9, 5, 1003), (60, 50, 2048), (150, 135, 601))  # K, S, d


def run(K: int, S: int, d: int, device: str) -> bool:
    """Run every op on one shape; return whether all results are right."""
    wrong = [check.op for check in selfcheck.run(K, S, d, device=device) if not check.passed]
    print(f"K = {K}, S = {S}, d = {d}:", f"WRONG: {wrong}" if wrong else "all agree", flush=True)
    rows = torch.ones(S, d, device=device)
    right = [bool((ops.gram(rows, precision=p) == d).all()) for p in ("high", "tf32")]
    for short in (rows.bfloat16(), rows.half()):
        params, total = torch.zeros(d, device=device), torch.zeros(d, device=device).double()
        memory, clients = torch.zeros(K, d, device=device), torch.arange(S)
        weights = torch.ones(S)
        ops.weighted_sum_(params, short, weights.to(device))
        right.append(bool((params == S).all()))
        ops.mimic_(params, short, memory, clients, 1.0)
        ops.memory_update_(params, total, memory, short, clients, weights, 1.0, 1.0)
        right.append(bool((memory[:S] == 1).all()))
    verdict = "right" if all(right) else f"WRONG: {right}"
    print("gram in other precisions, bfloat16, float16:", verdict, flush=True)
    return not wrong and all(right)


def main(arguments: list[str]) -> int:
    device = arguments[0] if arguments else "cuda"
    return 0 if all([run(*shape, device=device) for shape in SHAPES]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
