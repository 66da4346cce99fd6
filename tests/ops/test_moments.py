# SPDX-License-Identifier: Apache-2.0
"""Steps of server optimizers: against the oracle, by hand, and the same bits everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastagg import _C, ops
from fastagg.ops import reference
from tests.ops.conftest import available

F32, F64 = torch.float32, torch.float64
KINDS = ("adagrad", "adam", "yogi")
SIZES = (1, 3, 15, 16, 17, 64, 65, 1_003, 16_384 + 7, 100_003)  # around a vector and a block
ULP = 2.0**-24  # half of the distance of two neighbouring float32 numbers near 1


@dataclass
class Step:
    """The arguments of one step, and a call of each op with them."""

    params: Tensor
    m: Tensor
    s: Tensor
    aggregate: Tensor
    norm: float = 1.0
    models: bool = False
    lr: float = 0.3
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    @classmethod
    def random(cls, d: int, wide: bool = False, models: bool = False, seed: int = 0) -> Step:
        g = torch.Generator().manual_seed(seed)
        numbers = torch.randn(4, d, generator=g, dtype=F64)
        params, m, s, v = (numbers * torch.tensor([1.0, 0.1, 1e-2, 0.1])[:, None]).to(F32)
        return cls(
            params, m, s.abs(), v.to(F64) * 7.1 if wide else v, 1 / 7 if wide else 1.0, models
        )

    def momentum(self, module: object, nesterov: bool) -> list[Tensor]:
        params, m = self.params.clone(), self.m.clone()
        found = module.add_momentum_(  # type: ignore[attr-defined]
            params, m, self.aggregate, self.lr, self.beta_1, nesterov, self.norm, self.models
        )
        assert found is params
        return [params, m]

    def adaptive(self, module: object, kind: str) -> list[Tensor]:
        params, m, s = self.params.clone(), self.m.clone(), self.s.clone()
        found = module.add_adaptive_(  # type: ignore[attr-defined]
            params, m, s, self.aggregate, kind, self.lr, self.beta_1, self.beta_2, self.tau,
            self.norm, self.models,
        )  # fmt: skip
        assert found is params
        return [params, m, s]

    def all(self, module: object) -> list[Tensor]:
        """Return the results of every optimizer."""
        found = self.momentum(module, False) + self.momentum(module, True)
        return found + [x for kind in KINDS for x in self.adaptive(module, kind)]

    def v(self) -> Tensor:
        mean = self.norm * self.aggregate.to(F64)
        return mean - self.params.to(F64) if self.models else mean


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize(("wide", "models"), [(False, False), (True, False), (True, True)])
def test_momentum_against_the_oracle(isa: str, d: int, wide: bool, models: bool) -> None:
    step = Step.random(d, wide, models)
    terms = step.beta_1 * step.m.double().abs() + step.v().abs()
    for nesterov in (False, True):
        (params, m), (right, right_m) = (step.momentum(x, nesterov) for x in (ops, reference))
        # beta, v and the sum are rounded
        assert ((m - right_m).abs() <= 3 * ULP * terms).all()
        # with nesterov, beta and the sum once more, of terms that are less than twice as large;
        # then lr, and the parameter
        bound = 10 * ULP * step.lr * terms + 2 * ULP * right.double().abs()
        assert ((params.double() - right.double()).abs() <= bound).all()


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize(("wide", "models"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_against_the_oracle(isa: str, d: int, wide: bool, models: bool, kind: str) -> None:
    step = Step.random(d, wide, models)
    (params, m, s), right = step.adaptive(ops, kind), step.adaptive(reference, kind)
    v, old = step.v(), step.s.double()
    terms = step.beta_1 * step.m.double().abs() + (1 - step.beta_1) * v.abs()
    # v, both coefficients, the product and the sum are rounded
    assert ((m.double() - right[1].double()).abs() <= 5 * ULP * terms).all()
    squares = old + v * v * (1.0 if kind == "adagrad" else 1 - step.beta_2)
    # v counts twice; the square is rounded as well
    assert ((s.double() - right[2].double()).abs() <= 7 * ULP * squares).all()
    # The root halves the error of s; root, tau, sum, quotient and lr are rounded
    size = step.lr * terms / (right[2].double().sqrt() + step.tau)
    bound = 15 * ULP * size + 2 * ULP * right[0].double().abs()
    assert ((params.double() - right[0].double()).abs() <= bound).all()


def steps_by_hand(name: str, values: list[float]) -> list[list[float]]:
    """Return params, m and s after each step from zero; all coefficients are powers of two."""
    params, m, s = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    found = []
    for value in values:
        v = torch.tensor([value])
        if name in KINDS:
            ops.add_adaptive_(params, m, s, v, name, 1.0, 0.5, 0.75, 1.0)
        else:
            ops.add_momentum_(params, m, v, 0.5, 0.5, name == "nesterov")
        found.append([params.item(), m.item(), s.item()])
    return found


def test_steps_by_hand(isa: str) -> None:
    assert steps_by_hand("momentum", [2.0, 2.0, -3.0]) == [[1, 2, 0], [2.5, 3, 0], [1.75, -1.5, 0]]
    # v + m / 2 with the new m is 3, then 3.5, then -3.75
    assert steps_by_hand("nesterov", [2.0, 2.0, -3.0]) == [
        [1.5, 2, 0],
        [3.25, 3, 0],
        [1.375, -1.5, 0],
    ]
    # m = 1, s = 4 / 4: 1 / (1 + 1). Then m = 1/2 + 1, s = 3/4 + 4/4
    adam = steps_by_hand("adam", [2.0, 2.0])
    assert adam == [[0.5, 1, 1], pytest.approx([0.5 + 1.5 / (1.75**0.5 + 1), 1.5, 1.75])]
    # s + q / 4 = 1, as q = 4 is larger; then q = 1 is equal; then q = 1/4 is smaller: 1 - 1/16
    yogi = steps_by_hand("yogi", [2.0, 1.0, 0.5])
    assert [s for _, _, s in yogi] == [1, 1, 0.9375]
    assert [m for _, m, _ in yogi] == [1, 1, 0.75]
    assert [p for p, _, _ in yogi[:2]] == [0.5, 1.0]
    assert yogi[2][0] == pytest.approx(1.0 + 0.75 / (0.9375**0.5 + 1))
    # s = 9, then 9 + 16: 1.5 / (3 + 1), then (0.75 + 2) / (5 + 1)
    adagrad = steps_by_hand("adagrad", [3.0, 4.0])
    assert adagrad == [[0.375, 1.5, 9], pytest.approx([0.375 + 2.75 / 6, 2.75, 25])]


def test_a_sum_of_models_by_hand(isa: str) -> None:
    params, m, s = torch.tensor([1.0]), torch.zeros(1), torch.zeros(1)
    total = torch.tensor([6.0], dtype=F64)  # of two models: the mean is 3, and v = 2
    ops.add_adaptive_(params, m, s, total, "adam", 1.0, 0.5, 0.75, 1.0, 0.5, True)
    assert (params.item(), m.item(), s.item()) == (1.5, 1.0, 1.0)
    params, m = torch.tensor([1.0]), torch.zeros(1)
    ops.add_momentum_(params, m, total, 1.0, 0.5, False, 0.5, True)
    assert (params.item(), m.item()) == (3.0, 2.0)


@given(
    seed=st.integers(0, 2**31),
    d=st.integers(1, 300_000),
    wide=st.booleans(),
    models=st.booleans(),
    threads=st.integers(1, 4),
)
def test_threads_and_instruction_sets_do_not_matter(
    seed: int, d: int, wide: bool, models: bool, threads: int
) -> None:
    step, before = Step.random(d, wide, models, seed), _C.isa()
    if models:  # products that are exact ties in float32 show whether they are fused
        step.norm, step.aggregate = 1 / 3, step.aggregate.float().to(step.aggregate.dtype)
    torch.set_num_threads(1)
    expected = step.all(ops)
    torch.set_num_threads(threads)
    try:
        for name in available():
            if name != "cuda":
                _C.set_isa(name)
                assert all(map(torch.equal, step.all(ops), expected)), name
    finally:
        _C.set_isa(before)


def test_a_float64_aggregate_has_the_bits_of_a_float32_one(isa: str) -> None:
    step = Step.random(1_003)
    expected = step.all(ops)
    step.aggregate = step.aggregate.double() * 4.0
    step.norm = 0.25
    assert all(map(torch.equal, step.all(ops), expected))
    step.aggregate = step.aggregate.float()
    assert all(map(torch.equal, step.all(ops), expected))


def test_momentum_without_memory_is_a_plain_step(isa: str) -> None:
    step = Step.random(1_003)
    step.beta_1 = 0.0
    for nesterov in (False, True):
        params, m = step.momentum(ops, nesterov)
        assert torch.equal(m, step.aggregate)
        plain = step.params.double() + float(torch.tensor(step.lr)) * step.aggregate.double()
        assert torch.equal(params, plain.float())


def test_columns_that_stop_changing_come_to_zero(isa: str) -> None:
    smallest = torch.finfo(F32).tiny
    step = Step.random(67)
    step.m.fill_(smallest), step.s.fill_(smallest), step.aggregate.zero_()
    for found in (step.momentum(ops, True), step.adaptive(ops, "adam")):
        assert not any(bool(moment.any()) for moment in found[1:])
    _, m, s = step.adaptive(ops, "adagrad")
    assert not m.any() and torch.equal(s, step.s)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_shows_in_its_column_only(isa: str, bad: float) -> None:
    step = Step.random(1_003)
    step.aggregate[777] = bad
    clean = torch.arange(1_003) != 777
    for params, *moments in [step.momentum(ops, False)] + [step.adaptive(ops, k) for k in KINDS]:
        assert not params[777].isfinite()
        assert all(bool(x[clean].isfinite().all()) for x in (params, *moments))


def test_an_empty_vector(isa: str) -> None:
    empty = torch.zeros(0)
    step = Step(empty, empty.clone(), empty.clone(), empty.clone())
    assert all(len(x) == 0 for x in step.all(ops))


def test_what_is_refused(isa: str) -> None:
    step = Step.random(8)
    with pytest.raises(ValueError, match=r'^kind: expected "adagrad", "adam" or "yogi", got "sgd"'):
        step.adaptive(ops, "sgd")
    for name, value, error in [
        ("m", torch.zeros(7), ValueError),
        ("m", torch.zeros(8, dtype=F64), TypeError),
        ("s", torch.zeros(8, dtype=F64), TypeError),
        ("s", torch.zeros(8, 1), ValueError),
        ("aggregate", torch.zeros(9), ValueError),
        ("aggregate", torch.zeros(8, dtype=torch.int32), TypeError),
        ("params", torch.zeros(8, dtype=F64), TypeError),
    ]:
        wrong = Step.random(8)
        setattr(wrong, name, value)
        with pytest.raises(error, match=f"^{name}: expected "):
            wrong.adaptive(ops, "adam")
        if name != "s":
            with pytest.raises(error, match=f"^{name}: expected "):
                wrong.momentum(ops, False)
