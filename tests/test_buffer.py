# SPDX-License-Identifier: Apache-2.0
"""Flat layouts and the update buffer: no lost values, no copies, no silent conversion."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fastagg import FedAvg, FlatLayout, UpdateBuffer


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


# --- layout -----------------------------------------------------------------------------------


def test_layout_is_the_state_dict_in_order() -> None:
    layout = FlatLayout.from_module(conv_net())
    assert layout.names == ("0.weight", "0.bias", "3.weight", "3.bias")
    assert [slot.start for slot in layout.slots] == [0, 27, 30, 462]
    assert layout.num_params == 466
    assert layout.tied == {} and layout.excluded == ()


def test_flatten_concatenates() -> None:
    net = conv_net()
    flat = FlatLayout.from_module(net).flatten(net)
    assert flat.dtype == torch.float32
    assert torch.equal(flat, torch.cat([p.detach().flatten() for p in net.parameters()]))


def test_unflatten_gives_views() -> None:
    layout = FlatLayout.from_module(conv_net())
    vector = torch.zeros(layout.num_params)
    views = layout.unflatten(vector)
    views["3.bias"].fill_(2.0)
    assert vector[462:].tolist() == [2.0] * 4
    assert views["0.weight"].shape == (3, 1, 3, 3)
    assert views["0.weight"].data_ptr() == vector.data_ptr()


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), min_size=6
    ),
    seed=st.integers(0, 2**32),
)
def test_round_trip_keeps_values_shapes_and_dtypes(
    shapes: list[list[int]], dtypes: list[torch.dtype], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"t{i}": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    state["steps"] = torch.tensor(7)
    layout = FlatLayout.from_state_dict(state, integers="exclude", convert=True)
    assert layout.excluded == ("steps",)
    assert layout.num_params == sum(t.numel() for t in state.values()) - 1
    back = layout.state_dict(layout.flatten(state), excluded=state)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)  # all of them came from float32


def test_float64_is_rounded_and_only_on_request() -> None:
    state = {"x": torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)}
    with pytest.raises(TypeError, match=r"x: expected dtype torch.float32, got torch.float64.*con"):
        FlatLayout.from_state_dict(state)
    layout = FlatLayout.from_state_dict(state, convert=True)
    assert layout.flatten(state).tolist() == [1.0]


def test_batch_norm() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match=r"1\.num_batches_tracked.*exclude"):
        FlatLayout.from_module(net)
    layout = FlatLayout.from_module(net, integers="exclude")
    assert layout.excluded == ("1.num_batches_tracked",)
    assert "1.running_var" in layout.names
    vector = layout.flatten(net)
    with pytest.raises(ValueError, match=r"excluded.*num_batches_tracked"):
        layout.state_dict(vector)
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    state = layout.state_dict(vector, excluded=net.state_dict())
    other.load_state_dict(state)
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(),
               other.state_dict().values(), strict=True))  # fmt: skip


def test_bool_buffers_count_as_integers() -> None:
    with pytest.raises(ValueError, match="mask"):
        FlatLayout.from_state_dict({"w": torch.ones(1), "mask": torch.ones(1, dtype=torch.bool)})


def test_tied_parameters_take_one_place_and_stay_tied() -> None:
    net = Tied()
    layout = FlatLayout.from_module(net)
    assert layout.names == ("encode.weight", "encode.bias", "decode.bias")
    assert layout.tied == {"decode.weight": "encode.weight"}
    assert layout.num_params == 24
    vector = layout.flatten(net)
    layout.bind(net, vector)
    assert net.decode.weight is net.encode.weight
    views = layout.unflatten(vector)
    assert views["decode.weight"].data_ptr() == views["encode.weight"].data_ptr()
    assert set(layout.state_dict(vector)) == set(net.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_names_of_one_tensor_with_different_values_are_refused(dtype: torch.dtype) -> None:
    weight = torch.tensor([1.0, math.nan]).to(dtype)
    layout = FlatLayout.from_state_dict({"a": weight, "b": weight}, convert=True)
    vector = layout.flatten({"a": weight, "b": weight.clone()})  # as received, with equal values
    torch.testing.assert_close(vector, weight.float(), rtol=0.0, atol=0.0, equal_nan=True)
    out, other = torch.zeros(2), torch.tensor([2.0, math.nan]).to(dtype)
    with pytest.raises(ValueError, match="a and b are one tensor in the layout"):
        layout.flatten({"a": weight, "b": other}, out)
    assert not out.any()
    net = Tied()
    layout = FlatLayout.from_module(net)
    net.decode.weight = nn.Parameter(torch.zeros(4, 4))  # not tied any more
    with pytest.raises(ValueError, match=r"encode\.weight and decode\.weight are one tensor"):
        layout.flatten(net)


def test_tensors_that_overlap_in_part_are_refused() -> None:
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="a and b share part"):
        FlatLayout.from_state_dict({"a": x[:6], "b": x[4:]})


def test_non_contiguous_parameters() -> None:
    net = nn.Linear(3, 5, bias=False)
    net.weight.data = torch.arange(15.0).view(3, 5).T
    layout = FlatLayout.from_module(net)
    x = torch.randn(2, 3)
    expected = net(x)
    vector = layout.flatten(net)
    assert vector[:3].tolist() == [0.0, 5.0, 10.0]  # row-major order of the parameter's shape
    layout.bind(net, vector)
    assert torch.allclose(net(x), expected)


@pytest.mark.parametrize("source", [nn.ReLU(), nn.Sequential(), {}, {"n": torch.tensor(1)}])
def test_nothing_to_flatten(source: nn.Module | dict[str, Tensor]) -> None:
    state = source.state_dict() if isinstance(source, nn.Module) else source
    with pytest.raises(ValueError, match="no floating-point tensor"):
        FlatLayout.from_state_dict(state, integers="exclude")


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ({"c": torch.zeros(1, dtype=torch.complex64)}, TypeError, "c: complex"),
        ({"x": [1.0]}, TypeError, "x: expected a tensor, got list"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, "x: expected a dense"),
    ],
)
def test_values_that_no_layout_accepts(
    state: dict[str, Tensor], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        FlatLayout.from_state_dict(state)


def test_a_lazy_module_must_have_run() -> None:
    with pytest.raises(ValueError, match="weight: is not initialised"):
        FlatLayout.from_module(nn.LazyLinear(3))


def test_a_module_of_another_layout_is_refused_and_nothing_is_written() -> None:
    layout = FlatLayout.from_module(conv_net())
    out = torch.zeros(layout.num_params)
    with pytest.raises(ValueError, match=r"missing \['0.bias'.*unknown \['bias', 'weight'\]"):
        layout.flatten(nn.Linear(2, 2), out)
    wider = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 5))
    with pytest.raises(ValueError, match=r"3\.weight: expected shape"):
        layout.flatten(wider, out)
    with pytest.raises(TypeError, match=r"0\.weight: expected dtype"):
        layout.flatten(conv_net().double(), out)
    assert not out.any()


@pytest.mark.parametrize(
    ("vector", "error", "match"),
    [
        (torch.zeros(465), ValueError, "vector: expected shape"),
        (torch.zeros(1, 466), ValueError, "vector: expected shape"),
        (torch.zeros(466, dtype=torch.float64), TypeError, "vector: expected dtype"),
        (torch.zeros(466, 2)[:, 0], ValueError, "vector: expected a contiguous"),
    ],
)
def test_bad_vectors(vector: Tensor, error: type[Exception], match: str) -> None:
    net = conv_net()
    layout = FlatLayout.from_module(net)
    for use in (layout.unflatten, lambda v: layout.bind(net, v), lambda v: layout.flatten(net, v)):
        with pytest.raises(error, match=match):
            use(vector)


# --- training in a row ------------------------------------------------------------------------


def test_a_bound_model_trains_in_its_row() -> None:
    net = conv_net()
    layout = FlatLayout.from_module(net)
    buffer = UpdateBuffer(3, layout.num_params)
    params = layout.flatten(net)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)  # made before binding, still valid
    row = buffer.row(1)
    row.copy_(params)
    layout.bind(net, row)

    first, last = row.data_ptr(), row.data_ptr() + 4 * layout.num_params
    assert all(first <= p.data_ptr() < last for p in net.parameters())

    net(torch.randn(5, 1, 8, 8)).square().mean().backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in net.parameters()])
    optimiser.step()
    assert torch.allclose(row, expected, atol=1e-7)  # 0.1 * grad may be fused
    assert not torch.equal(row, params)
    assert not buffer.row(0).any() and not buffer.row(2).any()
    assert layout.flatten(net, out=row) is row  # flattening into the own row is harmless
    assert torch.allclose(row, expected, atol=1e-7)


def test_binding_keeps_the_values_of_the_vector() -> None:
    net = conv_net()
    layout = FlatLayout.from_module(net)
    layout.bind(net, torch.full((layout.num_params,), 0.5))
    assert all(bool((p == 0.5).all()) for p in net.parameters())


def test_float_buffers_are_bound_and_counters_are_not() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    layout = FlatLayout.from_module(net, integers="exclude")
    vector = layout.flatten(net)
    layout.bind(net, vector)
    net(torch.randn(4, 3))
    assert torch.equal(layout.unflatten(vector)["1.running_mean"], net[1].running_mean)
    assert net[1].running_mean.any()
    assert net[1].num_batches_tracked == 1


def test_only_float32_can_be_bound() -> None:
    net = nn.Linear(2, 2).bfloat16()
    layout = FlatLayout.from_module(net, convert=True)
    weight = net.weight.data_ptr()
    with pytest.raises(TypeError, match=r"weight: only float32.*bfloat16"):
        layout.bind(net, torch.zeros(6))
    assert net.weight.data_ptr() == weight


def test_a_round_from_broadcast_to_step_without_a_copy() -> None:
    """Broadcast, train in the rows, subtract, step: FedAvg's new model is the models' mean."""
    net = nn.Linear(3, 2)
    layout = FlatLayout.from_module(net)
    buffer = UpdateBuffer(4, layout.num_params)
    params = layout.flatten(net)
    clients = [3, 0, 2]
    for client in clients:
        buffer.row(client).copy_(params)
        layout.bind(net, buffer.row(client))
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(5, 3)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    mean = torch.stack(buffer.rows(clients)).double().mean(dim=0)
    updates = buffer.subtract_(params, clients)
    assert [u.data_ptr() for u in updates] == [buffer.row(c).data_ptr() for c in clients]
    FedAvg(num_clients=4, num_params=layout.num_params).step(params, updates, clients)
    # two roundings, of differences and of the result, of numbers below 1
    assert (params - mean).abs().max() <= 2 * 2.0**-24


# --- buffer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_params", [1, 15, 16, 17, 1024, 4096, 21840])
def test_buffer_rows(num_params: int) -> None:
    buffer = UpdateBuffer(5, num_params)
    assert all(row.shape == (num_params,) and not row.any() for row in buffer.rows(range(5)))
    assert buffer.row(0).dtype == torch.float32
    assert (buffer.capacity, buffer.num_params) == (5, num_params)
    buffer.row(2).fill_(1.0)
    assert [row.sum().item() for row in buffer.rows(range(5))] == [0, 0, num_params, 0, 0]
    assert buffer.row(2).is_contiguous()
    starts = [row.data_ptr() for row in buffer.rows(range(5))]
    assert all(start % 64 == 0 for start in starts)
    if num_params >= 16384:  # separate pages, where all rows could compete for the same cache sets
        assert len({start % 4096 for start in starts}) == 5


def huge_kilobytes() -> int:
    found = re.search(r"^AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)
    return int(found.group(1)) if found else 0


def test_large_rows_are_in_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no huge pages on this system")
    before = huge_kilobytes()
    buffer = UpdateBuffer(4, 4_000_000)
    for row in buffer.rows(range(4)):
        row.fill_(1.0)
    assert huge_kilobytes() - before >= 32_000  # of 64,000; memory may be fragmented
    view = buffer.row(2)[10:]
    del buffer, row
    assert view.sum().item() == 4_000_000 - 10  # the memory lives as long as any view of it
    del view
    assert huge_kilobytes() - before < 16_000


def test_rows_are_trained_side_by_side() -> None:
    """Autograd's version counters tell rows apart, though they are in one mapping."""
    a, b = (row.requires_grad_() for row in UpdateBuffer(2, 8).rows([0, 1]))
    loss = (a * a).sum()
    with torch.no_grad():
        b.add_(1.0)
    loss.backward()
    assert torch.equal(a.grad, torch.zeros(8)) and b.sum().item() == 8.0


def test_rows_come_in_the_order_asked() -> None:
    buffer = UpdateBuffer(5, 3)
    for client in range(5):
        buffer.row(client).fill_(client)
    for ids in ([4, 0, 2], torch.tensor([4, 0, 2])):
        assert [row[0].item() for row in buffer.rows(ids)] == [4.0, 0.0, 2.0]


@pytest.mark.parametrize("client", [-1, 5])
def test_no_such_row(client: int) -> None:
    with pytest.raises(IndexError, match=r"client: expected an id in \[0, 5\)"):
        UpdateBuffer(5, 3).row(client)


@pytest.mark.parametrize(("capacity", "num_params"), [(0, 3), (3, 0)])
def test_bad_sizes(capacity: int, num_params: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        UpdateBuffer(capacity, num_params)


@pytest.mark.parametrize(
    ("sizes", "name"), [((2.5, 3), "capacity"), (("2", 3), "capacity"), ((2, 3.0), "num_params")]
)
def test_sizes_that_are_no_integers(sizes: tuple[Any, Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected an int, got "):
        UpdateBuffer(*sizes)


@pytest.mark.parametrize("device", ["gpu", 5, None])
def test_no_such_device(device: Any) -> None:
    with pytest.raises(ValueError, match=r"^device: expected 'cpu'.*, got "):
        UpdateBuffer(2, 3, device)


@pytest.mark.parametrize(
    ("params", "clients", "error", "match"),
    [
        (torch.zeros(3), [1, 1], ValueError, "clients: expected distinct ids"),
        (torch.zeros(3), [0, 5], IndexError, "client: expected an id"),
        (torch.zeros(3), [0, 0.5], TypeError, "client: expected an integer, got 0.5"),
        (torch.zeros(4), [0], ValueError, r"params: expected \[3\] float32, got \[4\]"),
        (torch.zeros(3).double(), [0], ValueError, r"params: expected \[3\] float32"),
        ([0.0] * 3, [0], TypeError, "params: expected a torch.Tensor, got list"),
    ],
)
def test_what_is_no_model_or_no_client_is_not_subtracted(
    params: Any, clients: list[Any], error: type[Exception], match: str
) -> None:
    buffer = UpdateBuffer(2, 3)
    for row in buffer.rows([0, 1]):
        row.fill_(5.0)
    with pytest.raises(error, match=match):
        buffer.subtract_(params, clients)
    assert torch.stack(buffer.rows([0, 1])).eq(5.0).all()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda layout: FlatLayout.from_state_dict([1]), "state: expected a dict from names"),
        (lambda layout: FlatLayout.from_module({}), "module: expected a torch.nn.Module, got dict"),
        (lambda layout: layout.flatten(5), "source: expected a module or a dict"),
        (lambda layout: layout.flatten({"a": 1}), "a: expected a tensor, got int"),
        (lambda layout: layout.unflatten([1.0]), "vector: expected a torch.Tensor, got list"),
    ],
)
def test_values_of_other_types_than_a_layout_takes(
    call: Callable[[FlatLayout], object], match: str
) -> None:
    layout = FlatLayout.from_state_dict({"a": torch.zeros(1)})
    with pytest.raises(TypeError, match=f"^{match}"):
        call(layout)


def test_layout_from_an_ordered_state_dict_equals_that_from_the_module() -> None:
    net = conv_net()
    state = OrderedDict(net.state_dict())
    assert FlatLayout.from_state_dict(state).slots == FlatLayout.from_module(net).slots


@pytest.mark.parametrize("strided", [False, True])
def test_no_row_changes_if_params_cannot_be_subtracted(strided: bool) -> None:
    buffer = UpdateBuffer(3, 4)
    for client in range(3):
        buffer.row(client).fill_(client + 1.0)
    params = torch.ones(8)[::2] if strided else buffer.row(2)
    with pytest.raises(ValueError, match="params: expected a contiguous vector apart from"):
        buffer.subtract_(params, [0, 1, 2])
    assert [row[0].item() for row in buffer.rows([0, 1, 2])] == [1.0, 2.0, 3.0]
