# SPDX-License-Identifier: Apache-2.0
"""Short runs of what `make fuzz-long` does, and counters at the ends of their ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastagg
from fastagg.checkpoint.invariants import MOST_ROUNDS
from tests.fuzz import long

K, D = 6, 23


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fdms", "mimic", "nnm"])
def test_memory_and_descriptors_stay_flat(name: str) -> None:
    # Other tests ran in this process, and its heap may grow once; a leak grows in both runs.
    runs = [long.measure(name, long.configurations()[name], 4000) for _ in range(2)]
    assert min(run.resident_last - run.resident_first for run in runs) <= long.MOST_BYTES
    assert all(run.open_last == run.open_first for run in runs)


def test_every_rule_has_a_long_run() -> None:
    assert sorted(long.configurations()) == fastagg.available()


def test_a_run_that_grows_is_reported() -> None:
    flat = long.Run("x", 10, 10**8, 10**8, 4, 4, 10.0, 11.0, "abc")
    assert flat.problems() == []
    grown = long.Run("x", 10, 10**8, 2 * 10**8, 4, 5, 10.0, 16.0, "abc")
    assert len(grown.problems()) == 3


@pytest.mark.parametrize("name", ["fdms", "fdms-soft"])
def test_counts_stop_at_the_end_of_int16(name: str) -> None:
    agg = fastagg.make(name, num_clients=K, num_params=D)
    generator, params = torch.Generator().manual_seed(1), torch.zeros(D)
    updates = torch.randn(K, D, generator=generator)
    agg.step(params, updates, range(K))
    state = agg.state_dict()
    state["counts"] = torch.where(state["counts"] > 0, 32765, 0).to(torch.int16)
    state["rounds"].fill_(32765)
    agg.load_state_dict(state)
    before = state["scores"]
    for _ in range(5):
        agg.step(params, updates, range(K))
    after = agg.state_dict()
    assert after["counts"].max() == 32767 and after["counts"].min() == 0
    assert after["rounds"] == 32770
    # The same updates give the same similarities, so the means stay where they are.
    torch.testing.assert_close(after["scores"], before, rtol=0, atol=1e-6)
    agg.step(params, updates[:2], [0, 1])  # and the rule still finds friends
    other = fastagg.make(name, num_clients=K, num_params=D)
    other.load_state_dict(agg.state_dict())


def test_rounds_near_the_end_of_int64(tmp_path: object) -> None:
    """A file may state 2**62 rounds; steps go on from there, and the state can be saved."""
    tried = 0
    for name, options in long.configurations().items():
        agg = fastagg.make(name, num_clients=K, num_params=D, **options)
        params = torch.zeros(D)
        agg.step(params, torch.randn(3, D), [0, 2, 4])
        state = agg.state_dict()
        ends = [key for key in ("rounds", "waiting", "intervals") if key in state]
        for key in ends:
            state[key].fill_(MOST_ROUNDS)
        if not ends:
            continue
        try:
            agg.load_state_dict(state)
        except ValueError:
            continue  # this rule's counters are bounded more closely
        tried += 1
        for clients in ([1, 3, 5], [], [0, 1, 2]):
            agg.step(params, torch.randn(len(clients), D), clients)
        assert torch.isfinite(params).all()
        for key in ends:
            assert (agg.state_dict()[key] >= 0).all(), f"{name}: {key} overflowed"
    assert tried >= 3


def test_finished_rules_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "fedavg", "--steps", "300", "--out", str(tmp_path)]
    long.main(arguments)
    assert "fedavg: " in capsys.readouterr().out
    table = (tmp_path / "long_runs.csv").read_text()
    long.main(arguments)
    said = capsys.readouterr().out
    assert said.startswith("1 rules, 300 steps of each: ")
    assert (tmp_path / "long_runs.csv").read_text() == table
    long.main([*arguments[:3], "200", *arguments[4:]])  # another number of steps
    assert "fedavg: " in capsys.readouterr().out
