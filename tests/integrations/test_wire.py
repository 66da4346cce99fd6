# SPDX-License-Identifier: Apache-2.0
"""Serialised models: valid arrays are read in one pass, invalid ones are refused by name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastagg.integrations._report import Answer
from fastagg.integrations._server import AggregationServer
from fastagg.integrations._wire import WireError, WireLayout

Npy = Callable[..., bytes]


@pytest.fixture
def model(npy: Npy) -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    return {
        "conv.weight": npy(rng.standard_normal((3, 2, 5)), np.float32),
        "bn.num_batches_tracked": npy(17, np.int64),
        "fc.weight": npy(rng.standard_normal((4, 3)), np.float64),
        "half": npy(rng.standard_normal(7), np.float16),
        "mask": npy([True, False], np.bool_),
        "scale": npy(1.5, np.float32),
        "none": npy(np.zeros((0, 3)), np.float32),
    }


def test_the_layout_of_a_model(model: dict[str, bytes]) -> None:
    layout = WireLayout.of(model)
    assert layout.num_params == 30 + 12 + 7 + 1
    places = {slot.name: (slot.start, slot.dtype, slot.shape) for slot in layout.slots}
    assert places == {
        "conv.weight": (0, "float32", (3, 2, 5)),
        "bn.num_batches_tracked": (None, "int64", ()),
        "fc.weight": (30, "float64", (4, 3)),
        "half": (42, "float16", (7,)),
        "mask": (None, "bool", (2,)),
        "scale": (49, "float32", ()),
        "none": (50, "float32", (0, 3)),
    }
    assert WireLayout.from_json(layout.to_json()) == layout


def test_arrays_in_memory_are_read_in_place(model: dict[str, bytes]) -> None:
    layout = WireLayout.of(model)
    arrays = {name: np.load(io.BytesIO(data)) for name, data in model.items()}
    found = layout.values(arrays)
    assert all(any(values is array for array in arrays.values()) for values in found)
    for values, expected in zip(found, layout.values(model), strict=True):
        np.testing.assert_array_equal(values, expected)
    with pytest.raises(WireError, match="'scale': expected shape"):
        layout.values({**arrays, "scale": np.zeros(2, np.float32)})
    with pytest.raises(WireError, match="'scale': expected dtype float32, got object"):
        layout.values({**arrays, "scale": np.array(None)})


@pytest.mark.parametrize("rule", ["fedavg", "median", "mifa"])
def test_strided_arrays_in_memory_count(rule: str, npy: Npy) -> None:
    server = AggregationServer(rule, num_clients=2)
    server.set_model({"w": npy(np.zeros((3, 4)), np.float32)})
    strided = np.repeat(np.arange(12, dtype=np.float32), 2)[::2].reshape(3, 4)
    assert not strided.flags.c_contiguous
    server.open_round(["a", "b"])
    report = server.close_round([Answer(s, {"w": strided}, k) for k, s in enumerate("ab")])
    assert report.error is None and report.active == (0, 1)
    np.testing.assert_array_equal(server.params.numpy(), np.arange(12))


def test_a_round_trip_keeps_names_dtypes_and_shapes(model: dict[str, bytes]) -> None:
    layout = WireLayout.of(model)
    params = layout.flatten(model)
    back = layout.unflatten(params, torch.zeros(0), layout.carried(model))
    assert list(back) == list(model)
    for name, data in model.items():
        expected, got = (np.load(io.BytesIO(d), allow_pickle=False) for d in (data, back[name]))
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected.astype(np.float32).astype(expected.dtype))
        if name != "fc.weight":  # float64 is rounded to float32, everything else is exact
            assert back[name] == data


@given(
    order=st.sampled_from("CF"),
    dtype=st.sampled_from(["<f4", ">f4", "<f2", ">f8"]),
    version=st.sampled_from([(1, 0), (2, 0)]),
    shape=st.lists(st.integers(0, 4), max_size=3),
)
def test_updates_are_weights_minus_model(
    order: str, dtype: str, version: tuple[int, int], shape: list[int]
) -> None:
    rng = np.random.default_rng(len(shape))
    weights = np.asarray(rng.standard_normal(shape), dtype=dtype, order=order)
    stream = io.BytesIO()
    np.lib.format.write_array(stream, weights, version=version, allow_pickle=False)
    one = np.ones(1, np.float32)
    other = io.BytesIO()
    np.save(other, one)
    arrays = {"w": stream.getvalue(), "one": other.getvalue()}
    layout = WireLayout.of(arrays)
    params = torch.randn(layout.num_params)
    row = torch.full((layout.num_params,), torch.nan)
    layout.subtract(arrays, params, row)
    flat = np.append(weights.ravel().astype(np.float64), 1.0)
    expected = (flat - params.double().numpy()).astype(np.float32)
    # float32 inputs: both subtractions round once. float16 and float64 likewise.
    np.testing.assert_array_equal(row.numpy(), expected)


def test_nan_is_passed_on_to_the_rule(npy: Npy) -> None:
    layout = WireLayout.of({"w": npy([0.0, 0.0, 0.0], np.float32)})
    row = torch.zeros(3)
    layout.subtract({"w": npy([np.nan, np.inf, 1.0], np.float32)}, torch.ones(3), row)
    assert torch.isnan(row[0])
    assert torch.isinf(row[1])
    assert row[2] == 0.0


class Trap:
    """Does harm when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("unpickled",))


def wrong_arrays(npy: Npy) -> dict[str, tuple[dict[str, object], str]]:
    good = npy(np.zeros((2, 3)), np.float32)
    header = good[: good.index(b"\n") + 1]
    pickled = io.BytesIO()
    np.save(pickled, np.array([Trap()] * 6, dtype=object).reshape(2, 3), allow_pickle=True)
    record = npy(np.zeros((2, 3), dtype=[("a", "<f4")]))
    return {
        "missing": ({}, "missing"),
        "unknown": ({"w": good, "v": good}, "unknown"),
        "transposed": ({"w": npy(np.zeros((3, 2)), np.float32)}, "expected shape"),
        "flat": ({"w": npy(np.zeros(6), np.float32)}, "expected shape"),
        "float64": ({"w": npy(np.zeros((2, 3)), np.float64)}, "expected dtype float32"),
        "int32": ({"w": npy(np.zeros((2, 3)), np.int32)}, "expected dtype float32"),
        "complex": ({"w": npy(np.zeros((2, 3)), np.complex64)}, "expected dtype float32"),
        "record": ({"w": record}, "plain numbers"),
        "pickle in npy": ({"w": pickled.getvalue()}, "plain numbers"),
        "pickle": ({"w": pickle.dumps(Trap())}, "npy header"),
        "short": ({"w": good[:-1]}, "24 bytes"),
        "long": ({"w": good + b"\0"}, "24 bytes"),
        "empty": ({"w": b""}, "npy header"),
        "header only": ({"w": header}, "24 bytes"),
        "half a header": ({"w": good[:20]}, "npy header"),
        "no npy": ({"w": b"x" * 1000}, "npy header"),
        "version": ({"w": good[:6] + b"\x09\x00" + good[8:]}, "npy header"),
        "huge": ({"w": good.replace(b"(2, 3)", b"(2, 3000000000000)")}, "npy header|shape"),
        "negative": ({"w": good.replace(b"(2, 3)", b"(-2, -3)")}, "npy header|shape"),
        "code": ({"w": good.replace(b"(2, 3), }      ", b"exit(1), }     ")}, "npy header"),
        "not bytes": ({"w": [0.0] * 6}, "expected bytes"),
    }


@pytest.mark.parametrize("shape", ["(0, 2", "(1" + "0" * 30 + ", 0"])
def test_a_model_with_an_enormous_shape_is_refused(npy: Npy, shape: str) -> None:
    good = npy(np.zeros((2, 3)), np.float32)
    sizes = f"{shape}, {2**48}, {2**48})"
    header = good[10 : good.index(b"\n")].decode().replace("(2, 3)", sizes).rstrip()
    data = good[:8] + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n"
    with pytest.raises(WireError, match=r"'w': expected at most 2\^48 numbers"):
        WireLayout.of({"w": data, "v": good})


@pytest.mark.parametrize("case", wrong_arrays(lambda *_: b"\x93NUMPY\n"))
def test_wrong_arrays_are_refused(case: str, npy: Npy) -> None:
    arrays, message = wrong_arrays(npy)[case]
    layout = WireLayout.of({"w": npy(np.zeros((2, 3)), np.float32)})
    with pytest.raises(WireError, match=message):
        layout.subtract(arrays, torch.zeros(6), torch.zeros(6))  # type: ignore[arg-type]


@given(st.binary(max_size=200), st.integers(0, 150))
def test_malformed_bytes_only_raise(garbage: bytes, place: int) -> None:
    stream = io.BytesIO()
    np.save(stream, np.zeros((2, 3), np.float32))
    good = stream.getvalue()
    layout = WireLayout.of({"w": good})
    for data in (garbage, good[:place] + garbage + good[place + len(garbage) :]):
        try:
            layout.subtract({"w": data}, torch.zeros(6), torch.zeros(6))
        except WireError:
            continue
        assert len(data) == len(good)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"n": np.array([1], np.int64)}, "float32"),
        ({}, "float32"),
        ({"c": np.zeros(2, np.complex64)}, "complex64"),
        ({"s": np.array(["a"])}, "<U1"),
    ],
)
def test_models_that_are_refused(arrays: dict[str, np.ndarray], message: str, npy: Npy) -> None:
    with pytest.raises(WireError, match=message):
        WireLayout.of({name: npy(value) for name, value in arrays.items()})


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_model_must_be_finite_in_float32(value: float, npy: Npy) -> None:
    arrays = {"w": npy([0.0, value], np.float64)}
    with pytest.raises(WireError, match="finite"):
        WireLayout.of(arrays).flatten(arrays)


def test_a_model_that_outgrew_its_float16(npy: Npy) -> None:
    layout = WireLayout.of({"w": npy([1.0, 2.0], np.float16)})
    with pytest.raises(WireError, match=r"'w'.*float16"):
        layout.unflatten(torch.tensor([1.0, 1e6]), torch.zeros(0), {})
