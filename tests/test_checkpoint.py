# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: complete or refused, replaced atomically, readable by other tools."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import resource
import stat
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

import fastagg
from fastagg import (
    FDMS,
    MIFA,
    AdaptiveNorm,
    Aggregator,
    CheckpointError,
    FedAvg,
    Theorem2Threshold,
    checkpoint,
    tensor_file,
)


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
    assert (header["format"], header["version"]) == ("fastagg.aggregator", "3")
    assert len(header["sha256"]) == 64
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


@dataclasses.dataclass(frozen=True)
class Inverse:
    """A user's threshold, a dataclass as those of the library are."""

    c: float = 1.0

    def __call__(self, t: int) -> float:
        return self.c / t


def test_a_custom_dataclass_cannot_be_saved(tmp_path: Path) -> None:
    agg = FDMS(num_clients=4, num_params=3, elimination=Inverse())
    with pytest.raises(ValueError, match="elimination: a custom callable"):
        agg.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": fastagg.AdaptiveNorm(np.float32(5), np.int64(64), np.int64(3))},
        {"max_norm": {"window": np.int64(64)}},
        {"clip_norm": fastagg.AdaptiveClip(np.float32(1), np.float64(0.5), np.float32(0.1))},
        {"staleness": fastagg.Staleness("hinge", a=np.float32(2), b=np.int64(2))},
        {
            "elimination": Theorem2Threshold(
                np.int64(4), rounds=np.int64(9), beta=np.float32(0.5), p=np.float32(0.125),
                b_max=np.int64(2), delta_f=np.float32(0.5), factor=np.float32(0.5),
            )
        },
        {"elimination": fastagg.ReleasedThreshold(np.float32(0.5))},
        {"server_optimizer": fastagg.ServerOptimizer("adam", beta_1=np.float32(0.5))},
    ],
)  # fmt: skip
def test_numbers_of_numpy_come_back(options: dict[str, Any], tmp_path: Path) -> None:
    agg = FDMS(num_clients=4, num_params=3, **options)
    agg.save(tmp_path / "a")
    loaded = fastagg.load(tmp_path / "a").options()
    for name, value in options.items():
        expected = agg.options()[name]
        assert loaded[name] == expected and isinstance(loaded[name], type(expected)), value


@pytest.mark.parametrize(
    ("rule", "option", "value", "other"),
    [
        *(
            (rule, "client_weights", [1.0, 3.0], [3.0, 1.0])
            for rule in ("mifa", "stale", "stale-models", "fedvarp", "fedstale", "mifa-client")
        ),
        ("fdms", "similarity", "cosine", "distance"),
        ("fdms-soft", "similarity", "distance", "cosine"),
        ("fdms-means", "seed", 1, 2),
    ],
)
def test_options_of_the_state_cannot_change(
    rule: str, option: str, value: Any, other: Any, tmp_path: Path
) -> None:
    name = fastagg.RuleName(rule)
    agg = fastagg.make(name, num_clients=2, num_params=1, **{option: value})
    agg.step(torch.zeros(1), torch.tensor([[4.0], [-1.0]]), [0, 1])
    agg.save(tmp_path / "a")
    with pytest.raises(ValueError, match=f"{option}: expected that of the checkpoint"):
        fastagg.load(tmp_path / "a", **{option: other})
    loaded = fastagg.load(tmp_path / "a", **{option: value})
    params = torch.zeros(2, 1)
    for row, one in zip(params, (agg, loaded), strict=True):
        one.step(row, torch.tensor([[2.0]]), [1])
    assert torch.equal(*params)


ADAM: dict[str, Any] = {"server_optimizer": "adam"}
FLOWER = {"name": "adam", "bias_correction": "flower"}
LATE: dict[str, Any] = {"staleness": "constant", "max_staleness": 2}


@pytest.mark.parametrize(
    ("rule", "made", "changed"),
    [
        ("mifa", {}, {"staleness": "constant"}),
        ("mifa", {}, {"memory_dtype": "bfloat16"}),
        ("mifa", {}, {"num_clients": 5}),
        ("mifa", {}, {"num_params": 7}),
        ("mifa", {"max_age": 2}, {"max_age": None}),
        ("mimic", LATE, {"max_staleness": 3}),
        ("krum", {}, {"reuse": True}),
        ("fdms-means", {}, {"sketch": 64}),
        ("fedavg", ADAM, {"server_optimizer": FLOWER}),
        ("fedavg", {}, {"num_clients": 5}),  # no state, but weights of clients
    ],
)
def test_options_that_change_the_size_of_the_state_are_named(
    rule: str, made: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    agg = fastagg.make(fastagg.RuleName(rule), num_clients=3, num_params=4, **made)
    agg.step(torch.zeros(4), torch.randn(3, 4), range(3))
    agg.save(tmp_path / "a")
    (name,) = changed
    for also in ({}, {"server_lr": 0.5}):
        with pytest.raises(ValueError, match=f"^{name}: expected that of the checkpoint") as raised:
            fastagg.load(tmp_path / "a", **changed, **also)
        assert not isinstance(raised.value, CheckpointError)
        assert ("grow" in str(raised.value)) is (name == "num_clients")
    loaded = fastagg.load(tmp_path / "a", server_lr=0.5)
    assert loaded.memory_bytes == agg.memory_bytes


def test_several_options_that_change_the_size_of_the_state_are_named(tmp_path: Path) -> None:
    MIFA(num_clients=3, num_params=4).save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"^max_age, memory_dtype: expected those of the"):
        fastagg.load(tmp_path / "a", memory_dtype="int8", nonfinite="drop", max_age=3)
    with pytest.raises(ValueError, match=r"^memory_dtype: expected one of"):
        fastagg.load(tmp_path / "a", memory_dtype="int3")
    agg = MIFA(num_clients=3, num_params=4, client_weights=[1.0, 2.0, 3.0])
    agg.save(tmp_path / "a")
    file = tmp_path / "a"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        fastagg.load(file, max_age=3)


@pytest.mark.parametrize("nonfinite", ["raise", "drop"])
def test_a_limit_of_norms_may_be_auto(nonfinite: str, tmp_path: Path) -> None:
    agg = FedAvg(num_clients=3, num_params=4, nonfinite=nonfinite)
    agg.save(tmp_path / "a")
    loaded = fastagg.load(tmp_path / "a", max_norm="auto")
    assert loaded.max_norm == agg.max_norm == (AdaptiveNorm() if nonfinite == "drop" else None)
    agg.max_norm = 3.0
    agg.max_norm = "auto"
    assert agg.max_norm == loaded.max_norm
    noise: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    noisy = FedAvg(num_clients=3, num_params=4, nonfinite=nonfinite, **noise)
    noisy.save(tmp_path / "a")
    assert fastagg.load(tmp_path / "a", max_norm="auto").max_norm is None
    noisy.max_norm = "auto"
    assert noisy.max_norm is None


def test_weights_of_remembered_rows_change_by_growing(tmp_path: Path) -> None:
    agg = MIFA(num_clients=2, num_params=1)
    agg.step(torch.zeros(1), torch.tensor([[4.0], [0.0]]), [0, 1])
    agg.save(tmp_path / "a")
    loaded = fastagg.load(tmp_path / "a")
    loaded.grow(2, client_weights=[3.0, 1.0])
    params = torch.zeros(1)
    loaded.step(params, torch.zeros(2, 1), [0, 1])
    assert params.tolist() == [0.0]


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
        ({"version": "4"}, r"a newer fastagg.*version 4.*reads versions 2 and 3; upgrade"),
        ({"version": "1"}, r"an older fastagg.*version 1.*reads versions 2 and 3"),
        ({"version": "one"}, "damaged header: version 'one'"),
        ({"options": "{"}, "damaged header"),
        ({"rule": "mystery"}, "expected one of .*'mystery'"),
        ({"rule": "stale"}, r"options: expected some of .* rule 'stale', got \['empty_rounds'\]"),
        ({"rule": "fedvarp"}, r"for rule 'fedvarp', got \['empty_rounds'\]"),
        ({"rule": "mifa "}, "rule: expected one of"),
        ({"sha256": "0" * 63}, "expected one checksum of 64 digits"),
        ({"sha257": ""}, r"expected the fields .*, got .*'sha257'"),
        ({"options": "[]"}, "options: expected an object"),
        ({"options": "[" * 100_000}, "nested too deeply"),
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


def test_only_the_owner_may_read_the_file(agg: MIFA, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "a").chmod(0o644)
    agg.save(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_symbolic_link_is_followed(agg: MIFA, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "disk" / "b")
    agg.save(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()
    assert isinstance(fastagg.load(tmp_path / "disk" / "b"), MIFA)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_only_regular_files_are_replaced(agg: MIFA, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    make = {"folder": Path.mkdir, "pipe": os.mkfifo, "loop": lambda link: link.symlink_to("a")}
    make[kind](path)
    before = os.lstat(path)
    with pytest.raises(OSError, match="expected a regular file or none") as raised:
        agg.save(path)
    assert raised.value.filename == str(path)
    assert os.path.samestat(os.lstat(path), before)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_the_last_files_are_kept(agg: MIFA, tmp_path: Path) -> None:
    contents = []
    for _ in range(5):
        agg.step(torch.zeros(100), torch.randn(1, 100), [0])
        agg.save(tmp_path / "a", keep=3)
        contents.append((tmp_path / "a").read_bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1", "a.2"]
    kept = [(tmp_path / name).read_bytes() for name in ("a.2", "a.1", "a")]
    assert kept == contents[-3:]
    with pytest.raises(ValueError, match="keep: expected"):
        agg.save(tmp_path / "a", keep=0)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO])
def test_files_are_kept_where_there_are_no_hard_links(
    agg: MIFA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    agg.save(tmp_path / "a", keep=2)
    first = (tmp_path / "a").read_bytes()
    agg.step(torch.zeros(100), torch.randn(1, 100), [0])
    if code == errno.EIO:  # another error is one
        with pytest.raises(OSError, match="cannot be written: Input/output error"):
            agg.save(tmp_path / "a", keep=2)
        assert (tmp_path / "a").read_bytes() == first
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        return
    agg.save(tmp_path / "a", keep=2)
    assert (tmp_path / "a.1").read_bytes() == first != (tmp_path / "a").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1"]
    assert stat.S_IMODE((tmp_path / "a.1").stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_no_folder_or_pipe_in_the_place_of_an_older_file_is_removed(
    agg: MIFA, tmp_path: Path, make: Any, number: int
) -> None:
    agg.save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    path = tmp_path / f"a.{number}"
    make(path)
    before = os.lstat(path)
    agg.step(torch.zeros(100), torch.randn(1, 100), [0])
    with pytest.raises(OSError, match="expected a regular file or none") as raised:
        agg.save(tmp_path / "a", keep=3)
    assert raised.value.filename == str(path)
    assert os.path.samestat(os.lstat(path), before)
    assert (tmp_path / "a").read_bytes() == content
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", path.name]


def test_what_dead_writers_left_behind_is_removed(agg: MIFA, tmp_path: Path) -> None:
    dead = tmp_path / ".a.0123456789abcdef.partial"
    dead.write_bytes(b"half a file")
    alive = tmp_path / ".a.123456789abcdef0.partial"
    other = tmp_path / ".b.0123456789abcdef.partial"
    other.write_bytes(b"of another file")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        agg.save(tmp_path / "a")
        assert not dead.exists() and alive.exists() and other.exists()
    agg.save(tmp_path / "a")
    assert not alive.exists() and other.exists()


def test_writers_of_one_file_do_not_mix_their_contents(tmp_path: Path) -> None:
    def save(number: int) -> None:
        agg = MIFA(num_clients=5, num_params=20_000)
        params = torch.zeros(20_000)
        for _ in range(20):
            agg.step(params, torch.full((5, 20_000), float(number)), range(5))
            agg.save(tmp_path / "a", params=params)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(save, number) for number in range(1, 5)]:
            for _ in range(20):
                if (tmp_path / "a").exists():
                    memory = fastagg.load(tmp_path / "a").state_dict()["memory"]
                    assert len(memory.unique()) == 1
            future.result()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- parameters and keys ----------------------------------------------------------------------


def test_parameters_are_in_the_same_file(agg: MIFA, tmp_path: Path) -> None:
    params = torch.randn(100)
    agg.save(tmp_path / "a", params=params)
    found = torch.full((100,), math.nan)
    loaded = fastagg.load(tmp_path / "a", params=found)
    assert torch.equal(found, params)
    assert all(torch.equal(v, agg.state_dict()[k]) for k, v in loaded.state_dict().items())
    with pytest.raises(ValueError, match="params: expected finite"):
        agg.save(tmp_path / "a", params=params / 0)
    with pytest.raises(ValueError, match=r"params: expected shape \[100\]"):
        fastagg.load(tmp_path / "a", params=torch.zeros(99))
    agg.save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="expected the parameters of a model"):
        fastagg.load(tmp_path / "a", params=found)
    assert torch.equal(found, params)


def test_a_refused_file_leaves_the_parameters(agg: MIFA, tmp_path: Path) -> None:
    agg.save(tmp_path / "a", params=torch.randn(100))
    content = bytearray((tmp_path / "a").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a").write_bytes(content)
    params = torch.ones(100)
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        fastagg.load(tmp_path / "a", params=params)
    assert torch.equal(params, torch.ones(100))


def test_a_key_signs_the_file(agg: MIFA, tmp_path: Path) -> None:
    key = bytes(range(32))
    agg.save(tmp_path / "a", key=key)
    agg.save(tmp_path / "b")
    assert isinstance(fastagg.load(tmp_path / "a", key=key), MIFA)
    with pytest.raises(CheckpointError, match="signature is wrong, or it was signed with another"):
        fastagg.load(tmp_path / "a", key=bytes(32))
    with pytest.raises(CheckpointError, match="signed with a key: pass it as key="):
        fastagg.load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="expected a file that is signed"):
        fastagg.load(tmp_path / "b", key=key)
    with pytest.raises(ValueError, match="key: expected at least 16 bytes, got 15"):
        fastagg.load(tmp_path / "a", key=bytes(15))
    with pytest.raises(TypeError, match="key: expected bytes"):
        agg.save(tmp_path / "a", key="secret" * 9)  # type: ignore[arg-type]


def test_a_file_of_version_2_is_loaded_with_a_warning(agg: MIFA, tmp_path: Path) -> None:
    path = old_file(agg, tmp_path / "a")
    with pytest.warns(UserWarning, match="has no checksum"):
        loaded = fastagg.load(path)
    assert all(torch.equal(v, agg.state_dict()[k]) for k, v in loaded.state_dict().items())
    with pytest.raises(CheckpointError, match="signed"):
        fastagg.load(path, key=bytes(32))


def old_file(agg: Aggregator, path: Path, **changes: Tensor) -> Path:
    """Write a file as fastagg did before format version 3, with some tensors changed."""
    options = agg.options()
    tensors = {f"state.{name}": value for name, value in agg.state_dict().items()} | changes
    tensors |= {f"option.{k}": v for k, v in options.items() if isinstance(v, Tensor)}
    plain = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
    header = {"format": "fastagg.aggregator", "version": "2", "rule": agg.name}
    save_file(tensors, path, metadata=header | {"options": json.dumps(plain)})
    return path


def test_the_file_does_not_choose_the_memory_folder(agg: MIFA, tmp_path: Path) -> None:
    options = agg.options() | {"memory_folder": str(tmp_path)}
    checkpoint.write(tmp_path / "a", "mifa", options, agg.live_state())
    with pytest.raises(CheckpointError, match=r"options: expected .*got \['memory_folder'\]"):
        fastagg.load(tmp_path / "a")


@pytest.mark.parametrize("pair", ["mifa fedvarp", "stale stale-models", "krum multi-krum"])
def test_a_file_does_not_load_under_another_rule(pair: str, tmp_path: Path) -> None:
    name, other = pair.split()
    fastagg.make(name, num_clients=4, num_params=5).save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(f'"{name}"'.encode(), f'"{other}"'.encode())
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"checksum is wrong|empty_rounds"):
        fastagg.load(tmp_path / "a")


def test_memory_is_not_allocated_for_what_a_header_claims(tmp_path: Path) -> None:
    for clients, params in ((12_000, 3), (2**31, 2**31), (2**61, 2**61), (10**30, 1)):
        for name in ("fdms", "mifa", "mimic", "fedavg", "fedau", "stale", "scaffold"):
            options = {"num_clients": clients, "num_params": params}
            state = {"total": torch.zeros(3, dtype=torch.float64)}
            checkpoint.write(tmp_path / "a", name, options, state)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
            with pytest.raises(CheckpointError, match=r"bytes for rule|num_clients|client_weights"):
                fastagg.load(tmp_path / "a", **({"local_work": 1.0} if name == "scaffold" else {}))
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


@pytest.mark.parametrize("shape", [[0, 2**48, 2**48], [2**40, 2**40, 0], [0, 2**62], [1] * 40])
def test_an_empty_tensor_of_an_enormous_shape_is_refused(
    agg: MIFA, tmp_path: Path, shape: list[int]
) -> None:
    """Its strides would overflow."""
    agg.save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    end = [len(data)] * 2 if 0 in shape else [len(data), len(data) + 4]
    header["state.more"] = {"dtype": "F32", "shape": shape, "data_offsets": end}
    text = json.dumps(header).encode()
    data += bytes(end[1] - end[0])
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + data)
    for read in (checkpoint.read, fastagg.load):
        with pytest.raises(CheckpointError, match="expected a shape of at most 32 dimensions"):
            read(tmp_path / "a")


def test_a_large_header_is_refused_before_it_is_read(agg: MIFA, tmp_path: Path) -> None:
    options = agg.options() | {"more": [[] for _ in range(1 << 20)]}  # 4 MB of JSON take 100 MB
    with pytest.raises(ValueError, match="expected a header of at most 1048576 bytes"):
        checkpoint.write(tmp_path / "a", "mifa", options, agg.live_state())
    checkpoint.write(
        tmp_path / "a", "mifa", options, agg.live_state(), limit=checkpoint.LISTS_LIMIT
    )
    size = (tmp_path / "a").stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="expected a header of at most 1048576 bytes"):
            fastagg.load(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < size / 10
    finally:
        tracemalloc.stop()


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


def test_an_error_does_not_repeat_all_names_of_a_state(agg: MIFA) -> None:
    many = {f"{i:03d} {'x' * 1000}": torch.zeros(1) for i in range(100)}
    with pytest.raises(ValueError, match="expected the tensors") as found:
        agg.load_state_dict(agg.state_dict() | many)
    assert str(found.value).endswith("x', '...']") and len(str(found.value)) < 2_000


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


@pytest.mark.parametrize("number", ["1e999", "-1e400", "NaN", "Infinity"])
def test_numbers_of_a_header_are_finite(agg: MIFA, tmp_path: Path, number: str) -> None:
    with pytest.raises(tensor_file.TensorFileError, match=f"finite numbers, got {number}"):
        tensor_file.parse_json(f'{{"server_lr": [{number}]}}')
    assert tensor_file.parse_json("[1e308, 1e-400, -0.5]") == [1e308, 0.0, -0.5]


@pytest.mark.parametrize(
    ("name", "forged", "given"),
    [
        ("noise_multiplier", torch.zeros(5), {"max_norm": "auto"}),
        ("noise_multiplier", "x", {"noise_multiplier": 0.0}),
        ("clip_norm", [1], {"clip_norm": 1.0}),
        ("server_optimizer", "x", {"server_optimizer": "sgd"}),
    ],
)
def test_an_error_in_an_option_of_the_file_is_one_of_the_file(
    name: str, forged: Any, given: dict[str, Any], tmp_path: Path
) -> None:
    agg = FedAvg(num_clients=5, num_params=3, nonfinite="drop", max_norm=None)
    options = agg.options() | {name: forged}
    checkpoint.write(tmp_path / "a", "fedavg", options, agg.live_state())
    with pytest.raises(CheckpointError, match=f"options: {name}: expected "):
        fastagg.load(tmp_path / "a", **given)


def test_a_number_of_thousands_of_digits_is_named() -> None:
    with pytest.raises(ValueError, match=r"^num_clients: expected at most \d+, got a value of"):
        FedAvg(num_clients=10**5000, num_params=1)
