# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: streams, graphs, waiting, devices, alignment, size, and accuracy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastagg import FDMS, EnqueuedFDMS, ops
from fastagg.ops import reference
from fastagg.ops.scales import num_scales

if "cuda" not in ops.devices():
    pytest.skip("no CUDA kernels in this build, or no GPU", allow_module_level=True)

K, S, D = 24, 13, 40_003
F64 = torch.float64


class Server:
    """The state of an FDMS server and the rows of a round, all on the GPU."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        common = torch.randn(D, generator=g)
        self.updates = (torch.randn(S, D, generator=g) + common).cuda()
        self.short = self.updates.bfloat16()
        self.params = torch.randn(D, generator=g).cuda()
        self.memory = torch.randn(K, D, generator=g).cuda()
        self.total = self.memory.double().sum(dim=0)
        self.clients = torch.randperm(K, generator=g)[:S].sort().values.cuda()
        self.agg = FDMS(num_clients=K, num_params=D, device="cuda", elimination="theorem2")
        self.agg.scores.copy_(torch.rand(K, K, generator=g))
        self.agg.counts.copy_(torch.randint(0, 3, (K, K), generator=g, dtype=torch.int16))
        self.rounds = EnqueuedFDMS(self.agg, self.params)
        self.weights = torch.rand(S, generator=g).cuda()
        self.yes = torch.ones((), dtype=torch.bool, device="cuda")

    def state(self) -> list[Tensor]:
        assert self.agg.candidates is not None
        pairs = [self.agg.scores, self.agg.counts, self.agg.candidates]
        return [self.params, *pairs, self.memory, self.total]


def fdms_step(s: Server) -> None:
    """A whole round of FDMS with elimination."""
    s.rounds.enqueue(s.updates, s.clients, 0.3)


def row_steps(s: Server) -> None:
    """Rounds of MimiC and of a rule that remembers models."""
    clients = torch.arange(S)  # on the CPU, which computes the row addresses
    ops.mimic_(s.params, s.updates, s.memory, clients, 0.1)
    ops.memory_update_(
        s.params, s.total, s.memory, s.updates, clients, torch.ones(S), 0.1, 1 / K, models=True
    )


def short_steps(s: Server) -> None:
    """Rows in bfloat16, and a Gram matrix in TF32."""
    rows, clients = s.short, torch.arange(S)
    gram = ops.gram(s.updates, dtype=F64, precision="tf32")
    fresh = ops.cosine_scores(gram)
    ops.update_scores_(s.agg.scores, s.agg.counts, fresh, s.clients, when=s.yes)
    ops.weighted_sum_(s.params, rows, s.weights)
    ops.mimic_(s.params, rows, s.memory, clients, 0.1)
    ops.memory_update_(s.params, s.total, s.memory, rows, clients, torch.ones(S), 0.1, 1 / K)


def statistic_and_int8_steps(s: Server) -> None:
    """The means around the medians, and a memory of int8 rows."""
    ops.meamed_(s.params, torch.empty(1, device="cuda"), s.updates, S - 3)
    before, after = torch.empty(2, S, D, dtype=torch.int8, device="cuda")
    scales, new_scales = torch.empty(2, S, num_scales(D), device="cuda")
    ops.quantize_(list(before), scales, s.memory[:S])
    total, peaks = torch.empty_like(s.total), torch.empty(S, device="cuda")
    ops.quantized_total_(
        total, peaks, s.total, list(before), list(scales), s.updates, torch.arange(S),
        torch.ones(S), list(after), new_scales,
    )  # fmt: skip
    ops.dequantize_(list(s.memory[:S]), list(after), list(new_scales))
    s.total.copy_(total)


STEPS = [fdms_step, row_steps, short_steps, statistic_and_int8_steps]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("step", STEPS)
def test_the_same_bits_from_run_to_run(step: Callable[[Server], None]) -> None:
    expected = Server()
    step(expected)
    for _ in range(5):
        server = Server()
        torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # poison free memory
        step(server)
        assert_same(server.state(), expected.state())


@pytest.mark.parametrize("step", STEPS)
def test_another_stream(step: Callable[[Server], None]) -> None:
    expected, server = Server(), Server()
    step(expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(server)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(server.state(), expected.state())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("step", STEPS)
def test_nothing_waits_and_nothing_is_allocated_after_the_first_call(
    step: Callable[[Server], None],
) -> None:
    server = Server()
    step(server)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(server)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


@pytest.mark.parametrize("step", STEPS)
def test_a_captured_graph_does_the_same(step: Callable[[Server], None]) -> None:
    expected, server = Server(), Server()
    for _ in range(4):
        step(expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(server)  # warms up, and is the first of the four
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(server)
    for _ in range(3):
        graph.replay()
    assert_same(server.state(), expected.state())


def test_a_graph_repeats_a_round_with_other_clients_and_rows() -> None:
    expected, server = Server(), Server()
    for s in (expected, server):
        fdms_step(s)  # warms up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fdms_step(server)
    g = torch.Generator().manual_seed(7)
    for _ in range(3):
        clients = torch.randperm(K, generator=g)[:S].sort().values.cuda()
        rows = torch.randn(S, D, generator=g).cuda()
        server.clients.copy_(clients)
        server.updates.copy_(rows)
        graph.replay()
        expected.rounds.enqueue(rows, clients, 0.3)
    assert_same(server.state(), expected.state())
    assert server.rounds.settle() == expected.rounds.settle() == 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])  # 3e38: a step of 1e39
def test_a_refused_round_changes_nothing_and_does_not_synchronize(value: float) -> None:
    server, before = Server(), Server()
    server.updates[4, 777] = value
    server.agg.server_lr = 100.0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        happened = server.rounds.enqueue(server.updates, server.clients, 0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not happened
    assert server.rounds.settle() == 0
    assert_same(server.state(), before.state())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(-1, IndexError), (K, IndexError), (1 << 62, IndexError), (None, ValueError)],
)
def test_wrong_ids_change_nothing_and_the_gpu_goes_on(
    wrong: int | None, error: type[Exception]
) -> None:
    server, before = Server(), Server()
    s, fresh = server, torch.rand(S, S, device="cuda")
    bad = s.clients.clone()
    bad[3] = s.clients[2] if wrong is None else wrong
    with pytest.raises(error, match="clients: expected"):
        ops.update_scores_(s.agg.scores, s.agg.counts, fresh, bad)
    ops.update_scores_(s.agg.scores, s.agg.counts, fresh, bad, when=s.yes)
    assert not s.rounds.enqueue(s.updates, bad, 0.3)
    with pytest.raises(error, match="clients: expected"):
        s.rounds.settle()
    if error is IndexError:
        words = torch.ones(K, 32, dtype=torch.int8, device="cuda")
        with pytest.raises(IndexError, match="query_ids: expected ids in"):
            ops.most_similar(words, words, torch.ones(K, device="cuda"), bad)
    assert_same(server.state(), before.state())
    fdms_step(server)
    fdms_step(before)
    assert_same(server.state(), before.state())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    rows = torch.randn(5, 999)
    expected = ops.gram(rows.cuda(0))
    assert torch.equal(ops.gram(rows.cuda(1)).cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0


def test_tensors_on_two_devices_are_refused() -> None:
    rows = torch.randn(3, 9)
    with pytest.raises(ValueError, match="out: expected a CUDA tensor"):
        ops.weighted_sum_(torch.zeros(9), rows.cuda(), torch.ones(3))
    with pytest.raises(ValueError, match="rows: expected device cuda:0, got cpu"):
        ops.weighted_sum_(torch.zeros(9, device="cuda"), rows, torch.ones(3))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [5, 20, 40, 64, 70])
def test_any_alignment_gives_the_same_bits(offset: int, count: int) -> None:
    rows = torch.randn(count, 5_003)
    wide = torch.zeros(count, 5_012, device="cuda")  # rows 16-byte aligned
    wide[:, :5_003] = rows.cuda()
    shifted = torch.zeros(count * 5_008 + offset, device="cuda")[offset:].view(count, 5_008)
    shifted[:, :5_003] = rows.cuda()
    a, b = wide[:, :5_003], shifted[:, :5_003]
    assert torch.equal(ops.gram(a, dtype=F64), ops.gram(b, dtype=F64))
    assert torch.equal(ops.abs_max(a), ops.abs_max(b))
    weights = torch.rand(count)
    out, other = (torch.zeros(5_003, device="cuda") for _ in range(2))
    assert torch.equal(ops.weighted_sum_(out, a, weights), ops.weighted_sum_(other, b, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_short_rows_at_any_alignment_give_the_bits_of_long_ones(
    offset: int, dtype: torch.dtype
) -> None:
    place = torch.zeros(20 * 5_008 + offset, device="cuda", dtype=dtype)[offset:]
    rows = place.view(20, 5_008)[:, :5_003].copy_(torch.randn(20, 5_003))
    weights = torch.rand(20)
    out, other = (torch.zeros(5_003, device="cuda") for _ in range(2))
    ops.weighted_sum_(out, rows, weights)
    assert torch.equal(out, ops.weighted_sum_(other, rows.float(), weights))


@pytest.mark.parametrize("count", [4, 64, 80])
def test_rows_out_of_range_are_rescued(count: int) -> None:
    rows = torch.randn(count, 3_000)
    scale = torch.tensor([1e-30, 1.0, 1e25, 0.0])[torch.arange(count) % 4]
    rows = rows * scale[:, None]
    got = ops.gram(rows.cuda(), dtype=F64).cpu()
    x = rows.double()
    bound = (2**7 + 2**4 + 512 / 16) * 2.0**-24 * (x.abs() @ x.abs().T)  # see test_gram.py
    assert ((got - reference.gram(rows, dtype=F64)).abs() <= bound).all()


def cosine(gram: Tensor) -> Tensor:
    norms = gram.diagonal().sqrt()
    return gram / norms[:, None] / norms


@pytest.mark.parametrize("kind", ["positive", "correlated"])
@pytest.mark.parametrize("count", [6, 66])
def test_cosines_of_large_models_are_right(kind: str, count: int) -> None:
    d = 100_000_000 if count == 6 else 10_000_000
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * count * d * 4:
        pytest.skip(f"needs {6 * count * d * 4 >> 30} GiB of free memory on the GPU")
    rows = torch.rand(count, d, device="cuda")
    if kind == "correlated":
        rows = rows.sub_(0.5).mul_(0.1).add_(torch.randn(d, device="cuda"))
    exact = torch.zeros(count, count, dtype=F64, device="cuda")
    for part in rows.split(1 << 20, dim=1):
        wide = part.double()
        exact += wide @ wide.T
    got = ops.gram(rows, dtype=F64)
    assert (cosine(got) - cosine(exact)).abs().max() < 1e-7  # the bound in docs/kernels.md


def test_more_than_two_to_the_31_elements() -> None:
    count, d = 9, 300_000_007
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * count * d * 4:
        pytest.skip("needs 31 GiB of free memory on the GPU")
    rows = torch.ones(count, d, device="cuda")
    rows[-1, -1] = 5.0
    assert ops.abs_max(rows).tolist() == [1.0] * 8 + [5.0]
    gram = ops.gram(rows, dtype=F64)
    assert gram[0, 0] == d and gram[8, 8] == d + 24 and gram[8, 0] == d + 4
    out = torch.zeros(d, device="cuda")
    ops.weighted_sum_(out, rows, torch.ones(count))
    assert out[-1] == 13.0 and out[0] == 9.0
    ops.mimic_(out, rows[:4], rows[4:8].clone(), torch.arange(4), 1.0)
    assert out[-1] == 15.0
