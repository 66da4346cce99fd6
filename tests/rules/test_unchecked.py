# SPDX-License-Identifier: Apache-2.0
"""Checks that the commit makes: steps that they refuse begin again, and say why.

The commit checks parameters and range unless the read phase needs the answer. The read phase of a
step with ``accept`` checks everything, so both kinds of step can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import ops
from fastagg.options import FLOAT32_LIMIT

K, S, D = 6, 4, 40
CLIENTS = [0, 2, 3, 5]
every_rule = pytest.mark.every_rule  # (name, options): see the conftest of this folder
Same = Callable[[Any, Any], None]


def make(name: str, options: dict[str, Any]) -> fastagg.Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **options)


def rows_of(seed: int) -> Tensor:
    return torch.randn(S, D, generator=torch.Generator().manual_seed(seed))


def params_and_rule(name: str, options: dict[str, Any]) -> tuple[Tensor, fastagg.Aggregator]:
    """Return parameters and a rule after two rounds."""
    params, rule = torch.linspace(-1.0, 1.0, D), make(name, options)
    for seed in range(2):
        rule.step(params, rows_of(seed), CLIENTS)
    return params, rule


@every_rule
def test_both_kinds_of_check_give_the_same_bits(
    same_bits: Same, same_state: Same, same_report: Same, name: str, options: dict[str, Any]
) -> None:
    early, late = make(name, options), make(name, options)
    one, two = torch.linspace(-1.0, 1.0, D), torch.linspace(-1.0, 1.0, D)
    for seed in range(4):
        first = early.step(one, rows_of(seed), CLIENTS, accept=lambda moved: None)
        same_report(first, late.step(two, rows_of(seed), CLIENTS))
        same_bits(one, two)
    same_state(early, late)


@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parameters_that_are_not_finite_are_named(
    same_bits: Same, same_state: Same, name: str, options: dict[str, Any], bad: float
) -> None:
    params, rule = params_and_rule(name, options)
    _, untouched = params_and_rule(name, options)
    params[17] = bad
    copy = params.clone()
    with pytest.raises(ValueError, match=r"params: expected finite values, got NaN or Inf"):
        rule.step(params, rows_of(2), CLIENTS)
    same_bits(params, copy)
    same_state(rule, untouched)
    assert rule.committed == 2


@every_rule
def test_a_step_out_of_range_is_refused_with_the_true_magnitude(
    same_bits: Same, same_state: Same, name: str, options: dict[str, Any]
) -> None:
    """Parameters and step are each in range with most rules; their sum never is."""
    _, rule = params_and_rule(name, options)
    _, untouched = params_and_rule(name, options)
    params, rule.server_lr = torch.full((D,), 0.9 * FLOAT32_LIMIT), 0.5 * FLOAT32_LIMIT
    copy = params.clone()
    with pytest.raises(ValueError, match=r"range of float32") as raised:
        rule.step(params, torch.ones(S, D), CLIENTS)
    message = str(raised.value)
    if "parameters up to" in message:
        assert f"parameters up to {0.9 * FLOAT32_LIMIT:.3g}" in message
    same_bits(params, copy)
    same_state(rule, untouched)


@every_rule
def test_the_commit_checks_what_the_read_phase_does_not(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """The tests above would compare equal steps if no commit made checks."""
    params, rule = params_and_rule(name, options)
    called = []

    def noted(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            called.append(op)
            return op(*args)

        return call

    for op in (ops.apply_aggregate_, ops.apply_weighted_sum_):
        monkeypatch.setattr(ops, op.__name__, noted(op))
    rule.step(params, rows_of(2), CLIENTS)
    # Optimizers need the largest magnitude, and so do rules that remember models.
    early = "server_optimizer" in options or name == "stale-models"
    assert len(called) == (0 if early else 1)


def test_a_sum_that_only_the_commit_can_refuse() -> None:
    """With "drop", a sum may be too large. The step begins again, and leaves out the row."""
    for mode in ("server", "client"):
        rule = fastagg.make(
            "mimic", num_clients=K, num_params=D, mode=mode, nonfinite="drop", max_norm=None
        )
        params, rows = torch.zeros(D), rows_of(0)
        rows[2] = 1e37
        report = rule.step(params, rows, CLIENTS)
        assert report.rejected.tolist() == [3] and params.abs().max() < 10.0


@every_rule
def test_no_step_is_confirmed_that_is_known_to_fail(name: str, options: dict[str, Any]) -> None:
    params, rule = params_and_rule(name, options)
    params[3] = math.nan
    confirmed: list[object] = []
    with pytest.raises(ValueError, match=r"params: expected finite values"):
        rule.step(params, rows_of(2), CLIENTS, confirm=confirmed.append)
    # These find out in the pass that moves the parameters.
    late = name in {"fedavg", "amplified", "fedau", "fedbuff"} and "server_optimizer" not in options
    assert len(confirmed) == int(late)
    good = torch.zeros(D)
    rule.step(good, rows_of(2), CLIENTS, confirm=confirmed.append)
    assert confirmed[-1] == {} and rule.committed == 3


@pytest.mark.parametrize(
    ("name", "first"),
    [("stale", 1e38), ("mifa", 1e38), ("fedvarp", 1e38), ("mimic", 1e37), ("mimic-aged", 1e37)],
)
def test_parameters_are_blamed_before_rows(name: str, first: float) -> None:
    """Rows that are too large are seen first, because the pass over them comes first."""
    rule = fastagg.make(name, num_clients=K, num_params=D)
    rule.step(torch.zeros(D), torch.full((S, D), first), CLIENTS)
    params = torch.zeros(D)
    params[9] = math.nan
    with pytest.raises(ValueError, match=r"params: expected finite values"):
        rule.step(params, torch.full((S, D), -3e38), CLIENTS)
    with pytest.raises(ValueError, match=r"updates: too large"):
        rule.step(torch.zeros(D), torch.full((S, D), -3e38), CLIENTS)


def test_the_reasons_of_late_rows_are_kept() -> None:
    rule = fastagg.make("mimic", num_clients=K, num_params=D, staleness="constant", max_staleness=1)
    params, rows = torch.zeros(D), rows_of(0)
    for _ in range(4):
        rule.step(params, rows, CLIENTS)
    params[0], rows[1] = math.nan, math.inf
    with pytest.raises(ValueError, match=r"params: expected .* \(rejected: client 0: age 3"):
        rule.step(params, rows, CLIENTS, ages=[3, 0, 0, 0])


@pytest.mark.parametrize("name", ["fedavg", "stale", "mimic", "krum", "median", "scaffold"])
def test_a_stream_is_not_read_again(name: str) -> None:
    rule = make(name, {"local_work": 0.5} if name == "scaffold" else {})
    rows, passes = rows_of(0), [0]

    def blocks() -> Iterator[Tensor]:
        passes[0] += 1
        yield from rows.split(10, dim=1)

    stream = fastagg.ColumnBlocks(blocks, num_rows=S, num_params=D)
    rule.step(torch.zeros(D), stream, CLIENTS)
    once, passes[0] = passes[0], 0
    with pytest.raises(ValueError, match=r"params: expected finite values"):
        rule.step(torch.full((D,), math.nan), stream, CLIENTS)
    assert passes[0] <= once
