# SPDX-License-Identifier: Apache-2.0
"""Roles of arrays, and layouts that take statistics out of the vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastagg import ClientFiles, FedAvg, FlatLayout
from fastagg.updates.roles import assign_roles, norm_statistics, read_roles


class Renamed(nn.BatchNorm1d):
    """A normalisation layer with a buffer whose name does not tell that it is a statistic."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("largest", torch.full((size,), 2.0))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), Renamed(2), nn.Linear(2, 1))


IS_FLOAT = {
    "conv.weight": True,
    "bn.weight": True,
    "bn.running_mean": True,
    "bn.running_var": True,
    "bn.num_batches_tracked": False,
    "head.weight": True,
}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("auto", ["rule", "rule", "mean", "mean", "server", "rule"]),
        ({}, ["rule", "rule", "mean", "mean", "server", "rule"]),
        ({"*": "rule"}, ["rule", "rule", "rule", "rule", "server", "rule"]),
        ({"bn.*": "local"}, ["rule", "local", "local", "local", "local", "rule"]),
        (  # the first match wins
            {"bn.running_*": "server", "bn.*": "mean", "conv.weight": "local"},
            ["local", "mean", "server", "server", "server", "rule"],
        ),
        # An earlier pattern may take all that a later one matches.
        (
            {"bn.*": "local", "*.running_var": "mean"},
            ["rule", "local", "local", "local", "local", "rule"],
        ),
        ({"head.*": "local"}, ["rule", "rule", "mean", "mean", "server", "local"]),
    ],
)
def test_the_first_match_decides(patterns: Any, expected: list[str]) -> None:
    assert assign_roles(IS_FLOAT, read_roles(patterns)) == dict(
        zip(IS_FLOAT, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        ({"fc.*": "local"}, ValueError, r"'fc\.\*' matches no array of the model; its arrays are"),
        ({"BN.*": "local"}, ValueError, "matches no array"),
        ({"*tracked": "mean"}, ValueError, r"'\*tracked' matches no array of floats"),
        ({"bn.*": "frozen"}, ValueError, r"'bn\.\*': expected one of \['rule', 'mean'"),
        ({3: "local"}, TypeError, "expected names or patterns as keys, got 3"),
        ("mean", TypeError, 'expected "auto" or a mapping'),
        (None, TypeError, 'expected "auto" or a mapping'),
    ],
)
def test_wrong_patterns(patterns: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assign_roles(IS_FLOAT, read_roles(patterns))


def test_statistics_are_found_by_the_type_of_their_module() -> None:
    model = net()
    assert norm_statistics(model) == {"1.running_mean", "1.running_var", "1.largest"}
    assert norm_statistics(model[1]) == {"running_mean", "running_var", "largest"}
    plain = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.GroupNorm(1, 2))
    assert norm_statistics(plain) == set()
    by_module = FlatLayout.from_module(model, roles="auto").roles
    by_name = FlatLayout.from_state_dict(model.state_dict(), roles="auto").roles
    # They are patterns for a server that has no module.
    is_float = {name: value.is_floating_point() for name, value in model.state_dict().items()}
    assert assign_roles(is_float, read_roles(by_module)) == by_module
    assert by_module.pop("1.largest") == "mean"
    assert by_name.pop("1.largest") == "rule"
    assert by_module == by_name


def test_a_layout_with_roles() -> None:
    model = net()
    layout = FlatLayout.from_module(model, roles="auto")
    assert layout.names == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    assert layout.num_params == 6 + 2 + 2 + 2 + 2 + 1
    assert [slot.name for slot in layout.statistics] == [
        *("1.running_mean", "1.running_var", "1.largest")
    ]
    assert layout.num_statistics == 6
    assert set(layout.excluded) == {
        *(slot.name for slot in layout.statistics),
        "1.num_batches_tracked",
    }
    assert layout.flatten_statistics(model).tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    partial = FlatLayout.from_module(model, roles={"2.*": "local", "1.*": "server"})
    assert partial.names == ("0.weight", "0.bias")
    assert partial.statistics == ()
    assert partial.roles["2.bias"] == "local"
    assert partial.flatten_statistics(model).shape == (0,)


def test_a_whole_name_is_no_pattern() -> None:
    """Names of a ParameterDict may have brackets, which a pattern would read as a set."""
    state = {"p.a[0]": torch.ones(2), "p.a[1]": torch.ones(3), "p.b*": torch.ones(4)}
    layout = FlatLayout.from_state_dict(state, roles={"p.a[1]": "server", "p.b*": "local"})
    assert layout.roles == {"p.a[0]": "rule", "p.a[1]": "server", "p.b*": "local"}
    with pytest.raises(ValueError, match=r"'p.a\[2\]' matches no array"):
        FlatLayout.from_state_dict(state, roles={"p.a[2]": "server"})


def test_without_roles_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    layout = FlatLayout.from_module(model, integers="exclude")
    assert layout.num_params == 8 + 4 + 4
    assert layout.statistics == ()
    assert layout.excluded == ("1.num_batches_tracked",)
    assert set(layout.roles.values()) == {"rule", "server"}
    with pytest.raises(ValueError, match="integers="):
        FlatLayout.from_module(model)


def test_statistics_go_through_their_vector_and_not_through_the_other() -> None:
    model = net()
    layout = FlatLayout.from_module(model, roles="auto")
    params = layout.flatten(model)
    before, start = layout.flatten_statistics(model), params.clone()
    layout.bind(model, params)
    model(torch.randn(4, 3))
    after = layout.flatten_statistics(model)
    assert torch.equal(params, start)  # the model trained nothing, and has run
    assert not torch.equal(after, before)
    model.load_state_dict(layout.unflatten_statistics(before), strict=False)
    assert torch.equal(layout.flatten_statistics(model), before)
    out = torch.full((6,), 9.0)
    assert layout.flatten_statistics(model, out) is out
    assert torch.equal(out, before)
    state = layout.state_dict(
        params, excluded={**model.state_dict(), **layout.unflatten_statistics(after)}
    )
    net().load_state_dict(state)
    assert torch.equal(state["1.running_var"], after[2:4])


@pytest.mark.parametrize(
    ("vector", "error", "match"),
    [
        (torch.zeros(5), ValueError, r"expected shape \[6\], got \[5\]"),
        (torch.zeros(6, dtype=torch.float64), TypeError, "expected dtype"),
        (torch.zeros(6, 2)[:, 0], ValueError, "contiguous"),
    ],
)
def test_wrong_vectors_of_statistics(vector: Tensor, error: type[Exception], match: str) -> None:
    model = net()
    layout = FlatLayout.from_module(model, roles="auto")
    for use in (layout.unflatten_statistics, lambda v: layout.flatten_statistics(model, v)):
        with pytest.raises(error, match=match):
            use(vector)


def test_statistics_of_another_shape_or_dtype_are_refused() -> None:
    layout = FlatLayout.from_module(net(), roles="auto")
    state = net().state_dict()
    with pytest.raises(ValueError, match=r"1\.running_var: expected shape"):
        layout.flatten_statistics(state | {"1.running_var": torch.ones(3)})
    with pytest.raises(TypeError, match=r"1\.running_var: expected dtype"):
        layout.flatten(state | {"1.running_var": torch.ones(2).double()})
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}
    with pytest.raises(TypeError, match="convert=True"):
        FlatLayout.from_state_dict(half, roles="auto")
    with pytest.raises(TypeError, match=r"0\.bias: expected dtype .*float32, got torch\.bfloat16"):
        # Only what is in a vector has to be float32.
        FlatLayout.from_state_dict(half, roles={"0.weight": "local"})
    kept = state | {"0.weight": half["0.weight"]}
    assert "0.weight" in FlatLayout.from_state_dict(kept, roles={"0.weight": "local"}).excluded


def test_tied_tensors_need_one_role() -> None:
    weight = torch.ones(2)
    state = {"a": weight, "b": weight, "c": torch.ones(1)}
    assert FlatLayout.from_state_dict(state, roles={"a": "local", "b": "local"}).names == ("c",)
    for other in ("local", "mean", "server"):
        with pytest.raises(ValueError, match=f"a and b are one tensor.*'rule' and '{other}'"):
            FlatLayout.from_state_dict(state, roles={"b": other})
    with pytest.raises(ValueError, match="no floating-point tensor to flatten"):
        FlatLayout.from_state_dict(state, roles={"*": "mean"})


def test_files_of_clients_may_lack_what_is_not_in_the_vector(tmp_path: Path) -> None:
    model = net()
    layout = FlatLayout.from_module(model, roles={"2.*": "local"})
    state = {k: torch.ones_like(v) for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "whole")
    save_file({name: state[name] for name in layout.names}, tmp_path / "part")
    params = torch.zeros(layout.num_params)
    agg = FedAvg(num_clients=2, num_params=layout.num_params)
    agg.step(params, ClientFiles([tmp_path / "whole", tmp_path / "part"], layout), [0, 1])
    assert params.tolist() == [1.0] * layout.num_params
