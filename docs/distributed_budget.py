# SPDX-License-Identifier: Apache-2.0
"""Print the tables of docs/distributed.md: ``python docs/distributed_budget.py``.

All numbers come from ``fastagg.plan``. The rates are those of one rank with 2 threads on the
machine of benchmarks/results/avx512-32/ops.csv (``gram`` of 100 x 1M, and its read ceiling), and
10 Gbit/s between ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import fastagg
from fastagg.planning.rates import Rates

RATES = Rates(bytes_per_s=43e9, flops_per_s=250e9, wire_bytes_per_s=1.25e9)
BUDGET = 4 << 30
SIZES = [(10**9, 8), (10**10, 64)]  # d, ranks
COHORTS = [(100, 50), (1000, 100), (10_000, 1000)]  # K, S
MANY = (10**6, 10_000)  # K, S: for rules whose state does not have K rows of d numbers
WITHOUT_ROWS = ("fedavg", "fdms", "fdms-means")
RULES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fdms", {}),
    ("fdms", {"sketch": 1024}),
    ("fdms-means", {}),
    ("geometric-median", {}),
    ("mimic", {}),
    ("mifa", {}),
    ("mifa", {"memory_dtype": "bfloat16"}),
]


def short(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def lines() -> list[str]:
    """Return the lines of one table: one for each rule, model and cohort."""
    table = [
        "| rule | d | ranks | K | S | state | scratch | updates | sent and received | time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, options), (d, ranks), (K, S) in itertools.product(RULES, SIZES, [*COHORTS, MANY]):
        if (K, S) == MANY and name not in WITHOUT_ROWS:
            continue
        plan = fastagg.plan(
            name,
            num_clients=K,
            num_active=S,
            num_params=d,
            ranks=ranks,
            budget=BUDGET,
            rates=RATES,
            **options,
        )
        assert plan.seconds is not None
        rule = ", ".join([name, *(f"{option}={value}" for option, value in options.items())])
        sizes = [plan.state_bytes, plan.scratch_bytes, plan.update_bytes, plan.wire_bytes]
        cells = [rule, f"{d:.0e}".replace("e+", "e"), ranks, f"{K:,}", f"{S:,}"]
        cells += [*(short(size, "B") for size in sizes), short(plan.seconds, "s")]
        table.append("| " + " | ".join(map(str, cells)) + " |")
    return table


if __name__ == "__main__":
    print("\n".join(lines()))
