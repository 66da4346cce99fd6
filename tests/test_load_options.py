# SPDX-License-Identifier: Apache-2.0
"""fastagg.load with options: those that do not fit a file are the caller's fault."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import fastagg
from fastagg import AdaptiveClip, Aggregator, CheckpointError

K, D = 5, 12
SHOWN = "loads without th"  # this option, these options


def used(name: str, *, scale: float = 1.0, **options: Any) -> Aggregator:
    """Return an aggregator after four rounds, with clients of different rates."""
    agg = fastagg.make(fastagg.RuleName(name), num_clients=K, num_params=D, **options)
    params = torch.zeros(D)
    for t in range(4):
        agg.step(params, scale * torch.randn(3, D), [t % K, (t + 1) % K, (t + 3) % K])
    return agg


@pytest.mark.parametrize(
    ("rule", "made", "given", "error"),
    [
        ("fedau", {}, {"cutoff": 1}, ValueError),
        ("fedstale", {}, {"cutoff": 1}, ValueError),
        ("fedavg", {}, {"noise_multiplier": 1.0}, ValueError),
        (
            "fedavg",
            {"nonfinite": "drop"},
            {"noise_multiplier": 1.0, "clip_norm": 1.0},
            ValueError,
        ),
        ("fedavg", {}, {"num_params": D + 1}, ValueError),
        ("fedavg", {}, {"num_params": 10**15}, ValueError),
        (
            "fedavg",
            {"staleness": "constant", "max_staleness": 3},
            {"staleness": None},
            ValueError,
        ),
        ("mimic", {}, {"staleness": "constant"}, TypeError),
        ("fdms", {"precision": "highest"}, {"sketch": 64}, ValueError),
        ("fdms", {"precision": "tf32"}, {"similarity": "distance"}, ValueError),
        ("krum", {"sketch": 64}, {"reuse": True}, ValueError),
        ("geometric-median", {"iterations": 0}, {"start": "zero"}, ValueError),
        ("nnm", {}, {"rule_options": {"nope": 1}}, TypeError),
        ("nnm", {"rule": "krum"}, {"rule_options": {"nu": 2.0}}, TypeError),
    ],
)
def test_an_option_that_does_not_fit_a_right_file_is_named(
    rule: str, made: dict[str, Any], given: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    used(rule, **made).save(tmp_path / "a", params=torch.zeros(D))
    params = torch.ones(D)
    for more in ({}, {"device": "cpu"}):
        with pytest.raises(error, match=f"^{', '.join(sorted(given))}: .*{SHOWN}") as raised:
            fastagg.load(tmp_path / "a", **given, **more)
        assert not isinstance(raised.value, CheckpointError)
        assert str(tmp_path / "a") in str(raised.value)
    with pytest.raises(error):
        fastagg.load(tmp_path / "a", params=params, **given)
    assert bool((params == 1.0).all())
    assert fastagg.load(tmp_path / "a", params=params).memory_bytes >= 0
    assert not params.any()


def test_an_unknown_rule_inside_a_wrapper_is_named(tmp_path: Path) -> None:
    used("nnm").save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"^rule: expected one of .*, got 'nope'") as raised:
        fastagg.load(tmp_path / "a", rule="nope")
    assert not isinstance(raised.value, CheckpointError)


def test_a_server_lr_that_rounding_errors_do_not_allow_is_named(tmp_path: Path) -> None:
    used("mifa", scale=1e30).save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a", server_lr=2.0).server_lr == 2.0
    with pytest.raises(ValueError, match=rf"^server_lr: .*{SHOWN}is option.*state\['total'\]"):
        fastagg.load(tmp_path / "a", server_lr=1e20)


@pytest.mark.parametrize("place", [-1, 700])
def test_a_damaged_file_is_the_fault_of_the_file(place: int, tmp_path: Path) -> None:
    file = tmp_path / "a"
    used("fedau").save(file)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    for given in ({"cutoff": 1}, {"cutoff": 50}, {"noise_multiplier": 1.0}, {"device": "cpu"}):
        with pytest.raises(CheckpointError):
            fastagg.load(file, **given)


def test_parameters_that_a_file_lacks_are_the_fault_of_the_file(tmp_path: Path) -> None:
    used("fedavg").save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="expected the parameters of a model"):
        fastagg.load(tmp_path / "a", params=torch.zeros(D), server_lr=2.0)


def test_another_rule_in_a_wrapper_does_not_get_the_options_of_the_first(tmp_path: Path) -> None:
    used("nnm").save(tmp_path / "a")
    loaded: Any = fastagg.load(tmp_path / "a", rule="krum")
    fresh: Any = fastagg.make("nnm", num_clients=K, num_params=D, rule="krum")
    assert (loaded.rule, loaded.rule_options) == ("krum", fresh.rule_options)
    loaded = fastagg.load(tmp_path / "a", rule="krum", rule_options={"num_byzantine": 1})
    assert loaded.rule_options["num_byzantine"] == 1
    used("nnm", rule_options={"nu": 0.5}).save(tmp_path / "a")
    for given in ({}, {"rule": "geometric-median"}):
        assert fastagg.load(tmp_path / "a", **given).options()["rule_options"]["nu"] == 0.5


def test_the_noise_of_a_rule_that_remembers_no_row_yet_may_change(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_clients": K, "num_params": D, "clip_norm": 1.0}
    fastagg.MIFA(**options).save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a", noise_multiplier=1.0).noise_multiplier == 1.0
    fastagg.MIFA(**options, noise_multiplier=1.0).save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a", clip_norm=0.5).clip_norm == 0.5
    agg = used("mifa", clip_norm=1.0)
    agg.save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"^noise_multiplier: expected 0.*remembers rows"):
        fastagg.load(tmp_path / "a", noise_multiplier=1.0)
    agg.forget(range(K))
    agg.save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a", noise_multiplier=1.0).noise_multiplier == 1.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1.0, 1.0, None), (None, 0.0, 5.0)),
        ((None, 0.0, 5.0), (1.0, 1.0, None)),
        ((AdaptiveClip(count_noise=4.0), 3.0, None), (AdaptiveClip(count_noise=2.0), 1.0, None)),
        ((AdaptiveClip(count_noise=2.0), 1.0, None), (AdaptiveClip(count_noise=4.0), 3.0, None)),
        ((1.0, 1.0, None), (None, 0.0, "adaptive")),
    ],
)
def test_bounds_and_noise_change_together(before: Any, after: Any, tmp_path: Path) -> None:
    names = ("clip_norm", "noise_multiplier", "max_norm")
    used("fedavg", **dict(zip(names, before, strict=True))).save(tmp_path / "a")
    given = dict(zip(names, after, strict=True))
    loaded = fastagg.load(tmp_path / "a", **given)
    fresh = fastagg.make("fedavg", num_clients=K, num_params=D, **given)
    assert loaded.options().keys() == fresh.options().keys()
    assert all(getattr(loaded, name) == getattr(fresh, name) for name in names)


def test_the_state_is_not_in_memory_twice_while_the_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used("fedau").save(tmp_path / "a", params=torch.zeros(D))
    made: list[weakref.ref[Aggregator]] = []
    alive: list[int] = []
    read = Aggregator.load_saved

    def noted(self: Aggregator, *arguments: Any) -> None:
        alive.append(sum(each() is not None for each in made))
        made.append(weakref.ref(self))
        read(self, *arguments)

    monkeypatch.setattr(Aggregator, "load_saved", noted)
    with pytest.raises(ValueError, match=f"^cutoff: .*{SHOWN}"):
        fastagg.load(tmp_path / "a", cutoff=1)
    assert alive == [0, 0]


def test_parameters_that_require_gradients_are_read_with_a_new_bound(tmp_path: Path) -> None:
    params = torch.nn.Parameter(torch.ones(6))
    fastagg.make("mifa", num_clients=3, num_params=6).save(tmp_path / "x", params=params)
    with torch.no_grad():
        params.zero_()
    fastagg.load(tmp_path / "x", params=params, max_norm=5.0)
    assert params.requires_grad and params.tolist() == [1.0] * 6


def test_lack_of_memory_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator raises RuntimeError."""
    fastagg.make("mifa", num_clients=3, num_params=6).save(tmp_path / "x")

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("fastagg.rules._memory_rule.make_memory", fail)
    with pytest.raises(MemoryError, match="can't allocate memory"):
        fastagg.load(tmp_path / "x")
