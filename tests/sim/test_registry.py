# SPDX-License-Identifier: Apache-2.0
"""Options of another type than the code expects are refused, and the error names the option."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from fastagg_sim import dropout
from fastagg_sim.dropout import make_dropout
from fastagg_sim.dropout.base import PROCESSES, DropoutProcess
from fastagg_sim.dropout.trace import write_trace
from fastagg_sim.partition import PARTITIONS, partition
from fastagg_sim.value_types import fits

K = 10
LABELS = torch.arange(10).repeat_interleave(40)


def numeric(hints: dict[str, Any]) -> list[str]:
    """Return which options are numbers, or true or false."""
    return [name for name, hint in hints.items() if fits(1, hint) or fits(True, hint)]


def of_process(name: str) -> list[str]:
    hints = get_type_hints(PROCESSES[name])
    common = get_type_hints(DropoutProcess)
    return numeric({option: hint for option, hint in hints.items() if option not in common})


def of_partition(name: str) -> list[str]:
    parameters = inspect.signature(PARTITIONS[name], eval_str=True).parameters.values()
    own = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    return numeric(own)


def wrong(hint: Any) -> list[object]:
    return [value for value in ("half", True) if not fits(value, hint)]


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in dropout.available() for option in of_process(name)],
)
def test_an_option_of_a_dropout_process_of_another_type_is_named(
    name: str, option: str, tmp_path: Path
) -> None:
    write_trace(tmp_path / "trace.csv", [[0], [1]])
    needed: dict[str, Any] = {
        "adversarial": {"candidates": "all"},
        "trace": {"path": str(tmp_path / "trace.csv")},
    }.get(name, {})

    def make(**options: Any) -> DropoutProcess:
        groups, counts = [k // 2 for k in range(K)], [[1] * 10] * K
        given = {**needed, **options}
        return make_dropout(
            name, num_clients=K, seed=0, groups=groups, label_counts=counts, **given
        )

    make()
    for value in wrong(get_type_hints(PROCESSES[name])[option]):
        with pytest.raises(ValueError, match=option):
            make(**{option: value})


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in PARTITIONS for option in of_partition(name)]
)
def test_an_option_of_a_partition_of_another_type_is_named(name: str, option: str) -> None:
    needed: dict[str, Any] = {"clustered": {"samples_per_client": 20}}.get(name, {})
    partition(name, LABELS, K, 0, **needed)
    hint = inspect.signature(PARTITIONS[name], eval_str=True).parameters[option].annotation
    for value in wrong(hint):
        with pytest.raises(ValueError, match=option):
            partition(name, LABELS, K, 0, **{**needed, option: value})


def test_candidates_that_are_a_number_are_named() -> None:
    with pytest.raises(ValueError, match="candidates: expected"):
        make_dropout("adversarial", num_clients=K, seed=0, sizes="equal", candidates=5)
