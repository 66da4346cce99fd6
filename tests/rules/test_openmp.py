# SPDX-License-Identifier: Apache-2.0
"""Steps use no operation of torch that waits for OpenMP's threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import HANG

ROOT = Path(__file__).parents[2]
CODE = """
import sys
import time
from pathlib import Path

import torch
import fastagg
from benchmarks.regress.worker import RULES, rule_name

def others():  # threads that are not helpers of fastagg's kernels
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return len([name for name in names if name != "fastagg"])

def rules(S, d):
    sketched = {"num_byzantine": 1, "sketch": 1024}
    more = {"fdms": {"sketch": 1024}, "krum": sketched, "multi-krum": sketched}
    for name, options in [*RULES.items(), *more.items()]:
        name = rule_name(name)
        yield name, options, fastagg.make(name, num_clients=2 * S, num_params=d, **options)
    for similarity in ("cosine", "distance"):
        options = {"sketch": 1024, "similarity": similarity}
        yield "fdms", options, fastagg.make("fdms", num_clients=2 * S, num_params=d, **options)
    options = {"elimination": "released_case1", "staleness": "constant"}
    yield "fdms", options, fastagg.make("fdms", num_clients=2 * S, num_params=d, **options)

torch.set_num_threads(1)  # making the operands starts none
cases = []
for S, d in ((100, 40_000), (400, 2_000)):
    updates = torch.randn(S, d).mul_(0.01)
    cohorts = [torch.randperm(2 * S)[:S] for _ in range(3)]
    cases += [(*rule, S, updates, torch.zeros(d), cohorts) for rule in rules(S, d)]
torch.set_num_threads(2)
before = others()
for name, options, agg, S, updates, params, cohorts in cases:
    for cohort in cohorts:
        late = torch.arange(S) % 2 if "staleness" in options else None
        agg.step(params, updates, cohort, ages=late)
    end = time.monotonic() + 20.0  # a new helper has no name until it runs
    while others() > before and time.monotonic() < end:
        time.sleep(0.05)
    if others() > before:
        print(name, S, options)  # torch.profiler with record_shapes=True names the operation
        sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_operation_of_torch_starts_threads() -> None:
    """A process that has started OpenMP's threads once would not show it: this one is fresh."""
    found = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr
