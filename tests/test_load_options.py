# SPDX-License-Identifier: Apache-2.0
"""fastagg.load with options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastagg
from fastagg import AdaptiveClip, Aggregator

K, D = 5, 12


def used(name: str, *, scale: float = 1.0, **options: Any) -> Aggregator:
    """Return an aggregator after four rounds, with clients of different rates."""
    agg = fastagg.make(fastagg.RuleName(name), num_clients=K, num_params=D, **options)
    params = torch.zeros(D)
    for t in range(4):
        agg.step(params, scale * torch.randn(3, D), [t % K, (t + 1) % K, (t + 3) % K])
    return agg


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
