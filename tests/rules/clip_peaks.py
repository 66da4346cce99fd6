# SPDX-License-Identifier: Apache-2.0
"""Print how much memory a step takes without and with ``clip_norm``, by rule and form of updates.

    python -m tests.rules.clip_peaks [RULE ...]

All K updates are too long, and a copy of them would take 48 MiB. A step with ``clip_norm`` may take
scratch of a constant size more than one without. There are two exceptions, which the pass writes in
any case for other forms: a rule that would take ownership of the rows of a buffer writes them into
its memory, as it does with those of a matrix; int8 memory writes its rows, of d bytes each. Exits
with 1 if a step takes more.

Peaks are those of the kernel for this process (VmHWM).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastagg
from fastagg import ColumnBlocks
from fastagg.updates.differences import Differences
from tests.rules.conftest import CLIPPING, as_form

K, D = 6, 1 << 21
SCRATCH = 40 << 20  # bytes; two pieces of rows, of 16 MiB each, and what is small
CLIP = 1.0
FORMS = ("matrix", "list", "buffer", "stream", "float32", "bfloat16")
KINDS = ("similarity", "sketch", "reuse", "memory_dtype", "mode")


def peak_of_step(agg: fastagg.Aggregator, params: Tensor, updates: Any) -> int:
    """Run a step of all clients; return by how many bytes the process was larger within it."""
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = _status("VmRSS")
    report = agg.step(params, updates, range(K))
    assert report.clipped is None or len(report.clipped) == K
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def given(form: str, rows: Tensor) -> Any:
    if form == "stream":
        blocks = rows.split(1 << 16, dim=1)
        return ColumnBlocks(lambda: iter(blocks), num_rows=K, num_params=D)
    if form in ("float32", "bfloat16"):  # models of clients, minus that of the server
        dtype = getattr(torch, form)
        return Differences([[row.to(dtype)] for row in rows], torch.zeros(D))
    return as_form(form, rows, [*range(K)], K)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    block = torch.randn(K, 1 << 16, generator=draw)
    seen, wrong, of_matrix = set(), 0, 0
    for name, options in CLIPPING:
        kind = (name, *(f"{key}={options[key]}" for key in KINDS if key in options))
        if kind in seen or (names and name not in names):
            continue
        seen.add(kind)
        for form in FORMS:
            peaks = []
            for clip_norm in (None, CLIP):
                more = {"clip_norm": clip_norm, "max_norm": None}
                agg = fastagg.make(name, num_clients=K, num_params=D, **(options | more))
                params = torch.zeros(D)
                rows = block.repeat(1, D >> 16)
                peaks.append(max(peak_of_step(agg, params, given(form, rows)) for _ in range(2)))
            least, clipped = peaks
            of_matrix = least if form == "matrix" else of_matrix
            most = max(least, of_matrix if form == "buffer" else 0) + SCRATCH
            most += K * D if options.get("memory_dtype") == "int8" else 0
            wrong += clipped > most
            said = "  <- more than scratch" if clipped > most else ""
            print(f"{' '.join(kind):40} {form:9}", *(f"{p / 2**20:7.1f}" for p in peaks), said)
    print(f"{len(seen)} configurations, {wrong} steps took more than scratch")
    return 1 if wrong or not seen else 0


if __name__ == "__main__":
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:  # tensors then have pages of their own
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        os.execv(sys.executable, [sys.executable, "-m", "tests.rules.clip_peaks", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
