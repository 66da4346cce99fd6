# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: complete or refused, replaced atomically, readable by other tools."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

import fastagg
from fastagg import FDMS, MIFA, FedAvg, Theorem2Threshold, checkpoint


@pytest.fixture
def agg() -> MIFA:
    agg = MIFA(num_clients=5, num_params=100, client_weights=[1, 2, 3, 4, 5])
    agg.step(torch.zeros(100), torch.randn(2, 100), [3, 1])
    return agg


def test_what_is_in_the_file(agg: MIFA, tmp_path: Path) -> None:
    agg.save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", framework="pt") as file:
        header = file.metadata()
        assert set(file.keys()) == {"state.memory", "state.total", "option.client_weights"}
        assert torch.equal(file.get_tensor("state.memory"), agg.memory.clone())
    assert (header["format"], header["version"]) == ("fastagg.aggregator", "2")
    assert header["rule"] == "mifa"
    assert json.loads(header["options"])["num_clients"] == 5


def test_options_come_back(tmp_path: Path) -> None:
    threshold = Theorem2Threshold(4, rounds=9, beta=0.3, p=0.1, b_max=2, delta_f=0.02, factor=0.5)
    agg = FDMS(
        num_clients=4,
        num_params=3,
        server_lr=0.1,
        nonfinite="drop",
        similarity="distance",
        elimination=threshold,
        client_weights=[0.1, 0.2, 0.3, 0.7],
    )
    agg.server_lr = 1.0 / 3.0  # changed after construction: the file holds the current value
    agg.save(tmp_path / "a")
    loaded = fastagg.load(tmp_path / "a")
    assert isinstance(loaded, FDMS)
    assert loaded.server_lr == 1.0 / 3.0
    assert loaded.elimination == threshold
    options, expected = loaded.options(), agg.options()
    assert torch.equal(options.pop("client_weights"), expected.pop("client_weights"))
    assert options == expected


@pytest.mark.parametrize("name", ["theorem2", "released_case1", "released_case2"])
def test_named_thresholds_come_back(name: str, tmp_path: Path) -> None:
    FDMS(num_clients=4, num_params=3, elimination=name).save(tmp_path / "a")
    loaded = fastagg.load(tmp_path / "a")
    assert isinstance(loaded, FDMS) and loaded.elimination == name


def test_a_custom_threshold_cannot_be_saved(tmp_path: Path) -> None:
    agg = FDMS(num_clients=4, num_params=3, elimination=lambda t: 1.0 / t)
    with pytest.raises(ValueError, match=r"elimination: a custom callable.*state_dict"):
        agg.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    twin = FDMS(num_clients=4, num_params=3, elimination=lambda t: 1.0 / t)
    twin.load_state_dict(agg.state_dict())


def test_a_rule_without_state_can_be_saved(tmp_path: Path) -> None:
    FedAvg(num_clients=2, num_params=3).save(tmp_path / "a")
    assert isinstance(fastagg.load(tmp_path / "a"), FedAvg)


# --- files that must be refused ---------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, -1])
def test_truncated(agg: MIFA, tmp_path: Path, keep: float) -> None:
    agg.save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    size = int(keep * len(content)) if 0 < keep < 1 else int(keep)
    (tmp_path / "a").write_bytes(content[:size])
    with pytest.raises(ValueError, match="truncated or damaged"):
        fastagg.load(tmp_path / "a")


def test_not_a_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ValueError, match="not a checkpoint"):
        fastagg.load(tmp_path / "a")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_foreign(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "a", metadata=metadata)
    with pytest.raises(ValueError, match="not a fastagg checkpoint"):
        fastagg.load(tmp_path / "a")


def rewritten(path: Path, **changes: str) -> None:
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata() | changes
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=header)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": "3"}, r"a newer fastagg.*version 3.*reads version 2; upgrade"),
        ({"version": "1"}, r"an older fastagg.*version 1.*reads version 2"),
        ({"version": "one"}, "damaged header: version 'one'"),
        ({"options": "{"}, "damaged header"),
        ({"rule": "mystery"}, "expected one of .*'mystery'"),
        ({"rule": "stale"}, r"state: expected the tensors .*'seen'"),
    ],
)
def test_wrong_header(agg: MIFA, tmp_path: Path, changes: dict[str, str], match: str) -> None:
    agg.save(tmp_path / "a")
    rewritten(tmp_path / "a", **changes)
    with pytest.raises(ValueError, match=match):
        fastagg.load(tmp_path / "a")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        fastagg.load(tmp_path / "a")


# --- writing ----------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(
    agg: MIFA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agg.save(tmp_path / "a")
    old = (tmp_path / "a").read_bytes()
    agg.step(torch.zeros(100), torch.randn(1, 100), [0])

    def disk_full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space"):
        agg.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_saving_again_replaces(agg: MIFA, tmp_path: Path) -> None:
    agg.save(tmp_path / "a")
    agg.step(torch.zeros(100), torch.randn(1, 100), [0])
    agg.save(tmp_path / "a")
    loaded = fastagg.load(tmp_path / "a")
    assert torch.equal(loaded.state_dict()["memory"], agg.memory.clone())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_folder_must_exist(agg: MIFA, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="folder"):
        agg.save(tmp_path / "missing" / "a")


def test_the_file_has_the_usual_permissions(agg: MIFA, tmp_path: Path) -> None:
    agg.save(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


# --- state dicts ------------------------------------------------------------------------------


def changed(state: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    return {k: v for k, v in (state | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"total": None}, ValueError, r"state: expected the tensors \['memory', 'total'\]"),
        ({"seen": torch.zeros(5)}, ValueError, "state: expected the tensors"),
        ({"memory": torch.zeros(4, 100)}, ValueError, r"state\['memory'\]: expected shape"),
        ({"total": torch.zeros(100)}, TypeError, r"state\['total'\]: expected dtype"),
        ({"total": [0.0] * 100}, TypeError, r"state\['total'\]: expected a tensor"),
        ({"memory": torch.full((5, 100), math.nan)}, ValueError, r"state\['memory'\]: .*finite"),
        ({"memory": torch.zeros(5, 100, device="meta")}, ValueError, r"state\['memory'\]: .*meta"),
    ],
)
def test_a_bad_state_dict_changes_nothing(
    agg: MIFA, changes: dict[str, Tensor | None], error: type[Exception], match: str
) -> None:
    before = agg.state_dict()
    with pytest.raises(error, match=match):
        agg.load_state_dict(changed(before, **changes))
    assert all(torch.equal(v, before[k]) for k, v in agg.state_dict().items())


def test_read_returns_what_was_written(tmp_path: Path) -> None:
    options = {"a": 0.1, "b": None, "c": {"d": [1, "x"]}, "t": torch.arange(3)}
    state = {"s": torch.randn(2, 3), "n": torch.tensor(5)}
    checkpoint.write(tmp_path / "a", "some-rule", options, state)
    rule, read_options, read_state = checkpoint.read(tmp_path / "a")
    assert rule == "some-rule"
    assert torch.equal(read_options.pop("t"), torch.arange(3))
    assert read_options == {"a": 0.1, "b": None, "c": {"d": [1, "x"]}}
    assert {k: v.tolist() for k, v in read_state.items()} == {
        k: v.tolist() for k, v in state.items()
    }
