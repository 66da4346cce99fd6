# SPDX-License-Identifier: Apache-2.0
"""Updates from clients' safetensors files: exact values, and refusal of invalid files."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import fastagg
from fastagg import Aggregator, FlatLayout, client_files, tensor_file
from fastagg.updates.files import ClientFiles
from tests.scripts import HANG

SHAPES = {"a": (3, 5), "empty": (0, 4), "b": (1,), "c": (7, 11, 13)}
D = 15 + 1 + 1001


def layout() -> FlatLayout:
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return FlatLayout.from_state_dict(
        state | {"steps": torch.zeros((), dtype=torch.int64)}, integers="exclude"
    )


def write(path: Path, vector: Tensor, dtype: torch.dtype = torch.float32) -> Path:
    views = layout().unflatten(vector)
    save_file({name: view.to(dtype).contiguous() for name, view in views.items()}, path)
    return path


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> tuple[list[Path], Tensor]:
    updates = torch.randn(4, D)
    return [write(tmp_path / f"{s}.safetensors", row) for s, row in enumerate(updates)], updates


def read(source: ClientFiles, *cuts: int) -> Tensor:
    edges = [0, *sorted(cuts), source.num_params]
    out = torch.full((len(source), source.num_params), float("nan"))
    for row, target in zip(source.rows, out, strict=True):
        assert row.problem() is None
        for begin, end in itertools.pairwise(edges):
            row.read(begin, end, target[begin:end])
    return out


@given(cuts=st.sets(st.integers(1, D - 1), max_size=5), data=st.data())
def test_any_columns_are_those_of_the_flat_vector(
    tmp_path: Path, cuts: set[int], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.half, torch.bfloat16]))
    vector = torch.randn(D)
    path = write(tmp_path / "x", vector, dtype)
    expected = vector.to(dtype).float()
    assert torch.equal(read(ClientFiles([path], layout()), *cuts)[0], expected)
    begin, end = sorted(data.draw(st.sets(st.integers(0, D), min_size=2, max_size=2)))
    base = torch.randn(end - begin)
    part = ClientFiles([path], layout(), base=base, columns=(begin, end))
    assert torch.equal(read(part)[0], expected[begin:end] - base)


@pytest.mark.parametrize("rule", ["fdms", "mifa", "scaffold"])
def test_a_step_from_files_is_one_from_rows(files: tuple[list[Path], Tensor], rule: str) -> None:
    options: dict[str, Any] = {"local_work": 1.0} if rule == "scaffold" else {}
    first, second = (fastagg.make(rule, num_clients=9, num_params=D, **options) for _ in range(2))
    paths, updates = files
    params, twin = torch.ones(D), torch.ones(D)
    for clients in ([8, 1, 5, 2], [0, 1, 2, 3]):
        first.step(params, updates, clients)
        second.step(twin, ClientFiles(paths, layout(), budget=4 * 4 * 1024), clients)
        assert torch.equal(params, twin)


# --- invalid files -----------------------------------------------------


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def wrong_shape(path: Path) -> None:
    shapes = SHAPES | {"a": (5, 3)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)


def wrong_names(path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "z": torch.zeros(2)}, path)


def integers(path: Path) -> None:
    save_file({n: torch.zeros(shape, dtype=torch.int32) for n, shape in SHAPES.items()}, path)


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("pickled",)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, "client 7: cannot be read: .*1.safetensors: "),
    "empty": (lambda p: p.write_bytes(b""), "client 7: cannot be read: "),
    "missing": (lambda p: p.unlink(), "client 7: .*there is no such file"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "client 7: .*there is no such file"),
    "garbage": (lambda p: p.write_bytes(os.urandom(5000)), "client 7: cannot be read: "),
    "pickle": (lambda p: p.write_bytes(pickle.dumps(Bomb())), "client 7: cannot be read: "),
    "shape": (wrong_shape, r"a: expected shape \[3, 5\], got \[5, 3\]"),
    "names": (wrong_names, r"missing \['b', 'c', 'empty'\], unknown \['z'\]"),
    "integers": (integers, "a: expected one of .*, got I32"),
}


@pytest.mark.parametrize("rule", ["geometric-median", "stale"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_an_error_or_a_rejected_client(
    files: tuple[list[Path], Tensor],
    kind: str,
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    damage, message = BROKEN[kind]
    paths, updates = files
    damage(paths[1])
    source, clients = ClientFiles(paths, layout()), [3, 7, 0, 4]
    agg = fastagg.make(rule, num_clients=9, num_params=D)
    params = warm(agg)
    before, state = params.clone(), agg.state_dict()
    with pytest.raises(ValueError, match=message):
        agg.step(params, source, clients)
    assert torch.equal(params, before)
    assert all(torch.equal(value, state[key]) for key, value in agg.state_dict().items())

    dropping = fastagg.make(rule, num_clients=9, num_params=D, nonfinite="drop")
    twin = warm(dropping)
    report = dropping.step(twin, source, clients)
    assert report.rejected.tolist() == [7]
    agg.step(params, updates[[0, 2, 3]], [3, 0, 4])
    assert torch.equal(params, twin)
    assert not (tmp_path / "pickled").exists()


def warm(agg: Aggregator) -> Tensor:
    params = torch.ones(D)
    agg.step(params, torch.ones(2, D) * torch.tensor([[0.5], [2.0]]), [0, 7])
    return params


@pytest.mark.parametrize("kind", ["replaced", "shorter", "raced"])
def test_a_file_that_changes_during_the_step_changes_nothing(
    files: tuple[list[Path], Tensor], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = files
    said = "the file changed during the step"
    if kind == "raced":  # truncated after its header was checked
        monkeypatch.setattr(tensor_file, "identity", lambda descriptor: ())
        said = "the file is truncated: it ends at byte"
    source = ClientFiles(paths, layout())
    last = source.rows[3]
    read_before, times = last.read, []

    def meddling(begin: int, end: int, scratch: Tensor) -> Tensor:
        times.append(begin)
        if len(times) == 2:  # the second pass
            if kind == "replaced":
                write(paths[3], torch.zeros(D))
            else:
                truncated(paths[3])
        return read_before(begin, end, scratch)

    last.read = meddling  # type: ignore[method-assign]
    agg = fastagg.make("geometric-median", num_clients=9, num_params=D, nonfinite="drop")
    params = warm(agg)
    before, state = params.clone(), agg.state_dict()
    with pytest.raises(ValueError, match=r"3.safetensors: " + said):
        agg.step(params, source, [0, 1, 2, 3])
    assert len(times) == 2
    assert torch.equal(params, before)
    assert all(torch.equal(value, state[key]) for key, value in agg.state_dict().items())


def test_a_file_that_is_replaced_while_its_header_is_read_is_noticed(
    files: tuple[list[Path], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = files
    read_header = client_files._places

    def slowly(descriptor: int, layout: FlatLayout) -> Any:
        places = read_header(descriptor, layout)
        if os.path.samestat(os.fstat(descriptor), paths[2].stat()):  # now with other offsets
            write(paths[2], torch.zeros(D), torch.float64)
        return places

    monkeypatch.setattr(client_files, "_places", slowly)
    params = torch.zeros(D)
    with pytest.raises(ValueError, match=r"2.safetensors: the file changed during the step"):
        fastagg.make("fedavg", num_clients=4, num_params=D).step(
            params, ClientFiles(paths, layout()), [0, 1, 2, 3]
        )
    assert params.count_nonzero() == 0


def test_bad_arguments(files: tuple[list[Path], Tensor]) -> None:
    paths, _ = files
    with pytest.raises(ValueError, match=r"columns: expected a part of 0:1017, got \(5, 2000\)"):
        ClientFiles(paths, layout(), columns=(5, 2000))
    with pytest.raises(ValueError, match=r"base: expected \[1017\] float32, got \[3\]"):
        ClientFiles(paths, layout(), base=torch.zeros(3))
    with pytest.raises(ValueError, match="budget: expected at least 1"):
        ClientFiles(paths, layout(), budget=0)
    with pytest.raises(TypeError, match=r"columns: expected an int, got 0\.0"):
        ClientFiles(paths, layout(), columns=(0.0, 5.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="base: expected a tensor, got list"):
        ClientFiles(paths, layout(), base=[0.0] * 1017)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"paths: expected a sequence of paths, got 'a\.safet"):
        ClientFiles("a.safetensors", layout())
    with pytest.raises(TypeError, match="paths: expected a sequence of paths, got None"):
        ClientFiles(None, layout())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layout: expected a FlatLayout, got int"):
        ClientFiles(paths, 5)  # type: ignore[arg-type]
    for columns in (5, (1,)):
        with pytest.raises(TypeError, match=r"columns: expected two ints \(begin, end\), got "):
            ClientFiles(paths, layout(), columns=columns)  # type: ignore[arg-type]


MEASURE = """
import json, sys, torch, fastagg
from fastagg import ClientFiles, ColumnBlocks, FlatLayout

def peak():  # bytes
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

def grows(paths):
    if WIDTH:
        sizes = {"num_rows": len(paths), "num_params": d}
        source = ColumnBlocks(lambda: blocks(len(paths)), budget=BUDGET, **sizes)
    else:
        source = ClientFiles(paths, layout, budget=BUDGET)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins again here
    before = peak()
    agg.step(params, source, range(len(paths)))
    return peak() - before

def blocks(size):
    for begin in range(0, d, WIDTH):
        generator = torch.Generator().manual_seed(begin)
        yield torch.randn(size, min(WIDTH, d - begin), generator=generator)

BUDGET, d, WIDTH, (rule, options), paths = *map(json.loads, sys.argv[1:5]), sys.argv[5:]
torch.set_num_threads(1)
layout = FlatLayout.from_state_dict({"x": torch.zeros(d)})
params = torch.ones(d)
agg = fastagg.make(rule, num_clients=len(paths), num_params=d, **options)
grows(paths[:2])  # touches what is touched once
print(grows(paths))
"""


LIMITED = """
import resource, sys, torch, fastagg
from fastagg import ClientFiles, FlatLayout

budget, d, folder, paths = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
torch.set_num_threads(1)
layout = FlatLayout.from_state_dict({"x": torch.zeros(d)})
sizes = {"num_clients": len(paths), "num_params": d}
params = torch.ones(d)
agg = fastagg.make("mifa", memory_folder=folder, **sizes)
agg.step(params, ClientFiles(paths[:2], layout, budget=budget), [0, 1])  # allocates what stays
line = next(l for l in open("/proc/self/status") if l.startswith("VmData"))
limit = 1024 * int(line.split()[1]) + budget + (16 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # files that are mapped do not count
agg.step(params, ClientFiles(paths, layout, budget=budget), range(len(paths)))
try:
    fastagg.make("mifa", **sizes)
except (MemoryError, RuntimeError):
    print("rows in memory do not fit")
"""


@pytest.mark.slow
def test_a_memory_in_a_file_takes_no_memory(tmp_path: Path) -> None:
    num_params, budget = 1 << 21, 1 << 23
    paths = [tmp_path / f"{s}.safetensors" for s in range(12)]
    for path in paths:
        save_file({"x": torch.randn(num_params)}, path)
    assert run_script(LIMITED, budget, num_params, tmp_path, *paths) == "rows in memory do not fit"


def run_script(script: str, *arguments: object) -> str:
    # glibc would keep up to two of the largest freed blocks.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, **malloc, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "rule"),  # columns of a block of an iterator; 0: files
    [
        (0, ("geometric-median", {})),
        (10_000, ("geometric-median", {})),
        (10_000, ("fedavg", {"max_norm": 1e6})),
        (300_000, ("fdms", {})),
    ],
    ids=str,
)
def test_memory_stays_within_the_budget(
    tmp_path: Path, rule: tuple[str, dict[str, float]], width: int
) -> None:
    num_params, budget = 1 << 21, 1 << 23  # 8 MB a row, 8 MB in all
    paths = [tmp_path / f"{s}.safetensors" for s in range(12)]
    for path in paths:
        save_file({"x": torch.randn(num_params)}, path)
    grown = int(run_script(MEASURE, budget, num_params, width, json.dumps(rule), *paths))
    # The kernel's own scratch and the allocator's slack come on top; rows would be 96 MB.
    assert grown <= budget + 4 * 12 * width + (4 << 20)
