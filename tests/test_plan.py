# SPDX-License-Identifier: Apache-2.0
"""fastagg.plan: the memory it states is what rules have, and its numbers are the formulas'."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastagg
from fastagg import Aggregator, UpdateBuffer, ops
from fastagg.planning.rates import Rates, measure
from fastagg.updates.columns import Columns
from fastagg.updates.streams import TensorRows

K, S, D = 9, 4, 37
REQUIRED: dict[str, dict[str, Any]] = {"scaffold": {"local_work": 1.0}}


def after_rounds(name: str, owned: bool, options: dict[str, Any], rounds: int) -> Aggregator:
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    buffer, params = UpdateBuffer(K, D), torch.zeros(D)
    for _ in range(rounds):
        clients = torch.randperm(K)[:S].tolist()
        for row in buffer.rows(clients):
            row.normal_()
        agg.step(params, buffer if owned else buffer.rows(clients), clients)
    return agg


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, REQUIRED.get(name, {})) for name in fastagg.available()),
        ("fdms", {"elimination": "theorem2"}),
        ("fdms", {"sketch": 64}),
        ("fdms-means", {}),
        ("krum", {"sketch": 64}),
        ("geometric-median", {"reuse": True, "client_weights": [1.0] * K}),
        ("centered-clip", {"reuse": True}),
        ("bucketing", {"rule": "centered-clip"}),
        ("mimic", {"mode": "client"}),
    ],
)
def test_the_state_is_what_the_plan_says(name: str, options: dict[str, Any], owned: bool) -> None:
    plan = fastagg.plan(name, num_clients=K, num_active=S, num_params=D, owned=owned, **options)
    sizes = [after_rounds(name, owned, options, rounds).memory_bytes for rounds in (0, 1, 12)]
    remembers = name in ("mimic", "mimic-aged", "stale-models") and options.get("mode") != "client"
    if owned and remembers:  # and one vector per round still referred to
        assert sizes[0] < sizes[1] <= sizes[2] <= plan.state_bytes
        assert sizes[1] == sizes[0] + 4 * D
        assert plan.state_bytes == sizes[0] + 4 * D * (K - S + 1)
    else:
        assert sizes == [plan.state_bytes] * 3


def test_no_more_vectors_than_the_plan_says() -> None:
    # The worst case: after a round of all clients, the others return one at a time.
    agg = fastagg.make("mimic", num_clients=K, num_params=D)
    buffer, params = UpdateBuffer(K, D), torch.zeros(D)
    for clients in ([0], [1], [2], [3], [4], [5, 6, 7, 8]):
        agg.step(params, buffer, clients)
    plan = fastagg.plan("mimic", num_clients=K, num_active=4, num_params=D, owned=True)
    assert agg.memory_bytes == plan.state_bytes


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *itertools.product(
            ["mimic", "mimic-aged"], ["stream", "late", "late stream", "late buffer"]
        ),
        ("stale-models", "stream"),
    ],
)
def test_copied_rows_need_no_reference(name: str, form: str) -> None:
    """The state is not larger than the plan says, and has the bits of one with references."""
    late, streamed, buffered = "late" in form, "stream" in form, "buffer" in form
    options: dict[str, Any] = {"staleness": "constant", "max_staleness": 3} if late else {}
    agg = fastagg.make(name, num_clients=K, num_params=D, **options)
    twin = fastagg.make(name, num_clients=K, num_params=D, **options)  # takes rows, if in time
    buffer, own = UpdateBuffer(K, D), UpdateBuffer(K, D)
    params, other = torch.zeros(D), torch.zeros(D)
    plan = fastagg.plan(
        name,
        num_clients=K,
        num_active=3,
        num_params=D,
        owned=buffered,
        budget=10**6 if streamed else None,
        **options,
    )
    for t in range(2 * K):
        clients = sorted((t + offset) % K for offset in range(3))
        updates = torch.randn(3, D)
        ages = [0, t % 2, 1] if late and t > 0 else None
        for row, again, update in zip(
            buffer.rows(clients), own.rows(clients), updates, strict=True
        ):
            row.copy_(update)
            again.copy_(update)
        rows = TensorRows(updates) if streamed else buffer if buffered else updates
        agg.step(params, rows, clients, ages=ages)
        twin.step(other, own, clients, ages=ages)
        assert agg.memory_bytes <= plan.state_bytes
        assert torch.equal(params.view(torch.int32), other.view(torch.int32))
        state, expected = agg.state_dict(), twin.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state)
    if not buffered:
        assert agg.memory_bytes == plan.state_bytes


@pytest.mark.slow
def test_references_of_a_large_model_are_limited(tmp_path: Path) -> None:
    """Beyond four, the corrections with the oldest reference are written into their rows."""
    d = (1 << 20) + 5  # two rows are larger than 8 MB
    agg = fastagg.make("mimic", num_clients=K, num_params=d, memory_folder=tmp_path)
    twin = fastagg.make("mimic", num_clients=K, num_params=d)
    expected, params, other = torch.zeros(K, d), torch.zeros(d), torch.zeros(d)
    for t in range(12):
        clients = [t % K, (t + 1 + t // K) % K]
        updates = torch.randn(len(clients), d)
        mean = (updates.double() + expected[clients].double()).mean(0).float()
        expected[clients] = mean - updates
        agg.step(params, updates, clients)
        twin.step(other, updates, clients)
        plan = fastagg.plan("mimic", num_clients=K, num_active=2, num_params=d)
        assert agg.memory_bytes <= plan.state_bytes == 4 * d * (K + 4)
    assert agg.memory_bytes == plan.state_bytes
    assert torch.equal(params, other)
    assert torch.equal(agg.corrections.clone(), twin.corrections.clone())
    # v is a sum of at most two rows in float32 and a product in float64
    assert (agg.corrections.clone() - expected).abs().max() <= 12 * 2.0**-22 * expected.abs().max()


def test_the_formulas() -> None:
    def of(name: str, **options: Any) -> tuple[int, int, int]:
        sizes = {"num_clients": 100, "num_active": 10, "num_params": 1000}
        plan = fastagg.plan(name, **sizes, **options)
        return plan.scratch_bytes, plan.bytes_moved, plan.flops

    sd, d = 10 * 1000, 1000
    assert of("fedavg") == of("fedavg", owned=True) == (4 * d, 4 * sd + 12 * d, 2 * sd)
    assert of("fedavg", budget=10**5)[1] == 4 * sd + 24 * d
    assert of("fedavg", device="cuda", rates=RATES)[1] == 4 * sd + 24 * d
    assert of("fedavg", noise_multiplier=1.0, clip_norm=1.0)[1] == 8 * sd + 24 * d
    assert of("fedavg", ranks=2, rates=RATES)[1] == (4 * sd + 24 * d) // 2
    assert of("fedavg", server_optimizer="momentum")[1] == 4 * sd + 32 * d
    assert of("mifa") == (8 * d + 4 * sd, 12 * sd + 36 * d, 3 * sd + 3 * d)
    assert of("mifa", owned=True) == (8 * d, 8 * sd + 36 * d, 3 * sd + 3 * d)
    assert of("mifa-client") == (12 * d, 4 * sd + 44 * d, 3 * sd + 4 * d)
    assert of("stale-models", owned=True) == (12 * d, 8 * sd + 52 * d, 5 * sd + 3 * d)
    assert of("mimic") == (12 * d + 4 * sd, 12 * sd + 32 * d, 5 * sd + 3 * d)
    assert of("mimic", owned=True) == (12 * d, 8 * sd + 36 * d, 5 * sd + 3 * d)
    assert of("mimic", mode="client") == (8 * d, 4 * sd + 24 * d, 2 * sd + 2 * d)
    assert of("fedvarp") == (8 * d + 4 * sd, 12 * sd + 60 * d, 3 * sd + 6 * d)
    assert of("fedvarp", owned=True)[1] == 8 * sd + 60 * d
    assert of("fedstale") == (16 * d + 4 * sd, 12 * sd + 44 * d, 7 * sd + 4 * d)
    assert of("fedstale", owned=True)[:2] == (16 * d, 8 * sd + 44 * d)
    assert of("mimic-aged") == of("mimic")
    assert of("mimic-aged", owned=True) == of("mimic", owned=True)
    assert of("fedau") == of("fedavg")
    assert of("scaffold", local_work=1.0) == (12 * d + 4 * sd, 12 * sd + 36 * d, 6 * sd + 6 * d)
    # With the rows minus a common one: all of 1000 columns.
    assert of("krum") == (4 * d + 6400 + 4 * sd, 8 * sd + 24 * d, 110 * d + 20 * d)
    # For 10 rows, 4 * 5 / 2 minima and maxima for each value; bulyan sorts 10 - 2 rows: 3 * 4 / 2.
    assert of("median") == of("meamed") == (4 * d, 4 * sd + 24 * d, 11 * sd)
    assert of("bulyan", num_byzantine=1) == (*of("krum")[:2], of("krum")[2] + 6 * 8 * d)
    scratch = 4 * d + 64 * 101**2 + 4 * 101 * d + 4 * sd
    reused = 8 * 101 * d + 8 * sd + 24 * d
    # 11 changed rows, the previous aggregate one of them, and 90 others, whose squares are computed
    flops = 2 * (66 + 11 * 90 + 90) * d + 2 * 101 * d
    assert of("centered-clip", reuse=True) == (scratch, reused, flops)
    assert of("centered-clip", reuse=True, owned=True)[1] == reused - 8 * sd
    pairs = 6 * 100 * 90 + 52 * 10 * 10
    assert of("fdms") == (4 * d + 1600, 4 * sd + 24 * d + pairs, 13 * sd)  # rows are read once
    sketches = 10 * 64  # S k
    scratch, moved, flops = of("fdms", sketch=64)
    assert scratch == 4 * d + 1600 + 20 * sketches
    assert moved == 4 * sd + 24 * d + pairs + 40 * sketches
    assert flops == 6 * sd + 11 * sketches
    assert of("fdms", sketch=64, elimination="theorem2")[1:] == (
        of("fdms", elimination="theorem2")[1] - 4 * sd + 40 * sketches,
        flops,
    )
    means = 100 * 72  # K (k + 8)
    plan = fastagg.plan("fdms-means", num_clients=100, num_active=10, num_params=1000, sketch=64)
    assert plan.state_bytes == means
    assert of("fdms-means", sketch=64) == (
        4 * d + 40 * sketches + 64 * 100,
        8 * sd + 24 * d + 80 * sketches + 90 * 64,
        6 * sd + 2 * 90 * 10 * 64,
    )
    assert of("multi-krum", sketch=64) == (
        4 * d + 6400 + 24 * sketches,
        8 * sd + 24 * d + 40 * sketches,
        flops,
    )


@pytest.mark.parametrize("name", fastagg.available())
def test_a_bound_of_norms_costs_a_pass_where_there_is_no_gram_matrix(name: str) -> None:
    sizes = {"num_clients": 100, "num_active": 10, "num_params": 1000, "ranks": 4}
    options = REQUIRED.get(name, {})
    without = fastagg.plan(name, **sizes, **options)
    bounded = fastagg.plan(name, max_norm=1.0, **sizes, **options)
    passes = 0 if {"gram", "sketch"} & _ops_of(name) else 1
    assert bounded.bytes_moved == without.bytes_moved + passes * 4 * 10 * 250
    assert bounded.flops == without.flops + passes * 2 * 10 * 250
    assert bounded.wire_bytes == without.wire_bytes + passes * (2 * 8 * 10 + 512 * 4)


@pytest.mark.parametrize("name", fastagg.available())
def test_clipping_costs_a_pass_and_an_adaptive_bound_one_number(name: str) -> None:
    sizes = {"num_clients": 100, "num_active": 10, "num_params": 1000}
    options = REQUIRED.get(name, {})
    without = fastagg.plan(name, **sizes, **options)
    if name == "mifa-client":
        with pytest.raises(ValueError, match="clip_norm: expected None for mifa-client"):
            fastagg.plan(name, clip_norm=1.0, **sizes, **options)
        return
    clipped = fastagg.plan(name, clip_norm=1.0, **sizes, **options)
    assert clipped.bytes_moved == without.bytes_moved + 4 * 10 * 1000
    assert clipped.flops == without.flops + 2 * 10 * 1000
    adaptive = fastagg.plan(name, clip_norm="adaptive", **sizes, **options)
    assert adaptive.state_bytes == without.state_bytes + 8 == clipped.state_bytes + 8


def _ops_of(name: str) -> set[str]:
    """Return the operations on all columns of a step without a norm bound."""
    agg = fastagg.make(name, num_clients=3, num_params=5, **REQUIRED.get(name, {}))
    asked: set[str] = set()

    class Asked(Columns):
        def __getattribute__(self, attribute: str) -> Any:
            asked.add("gram" if attribute.startswith("gram") else attribute)
            return super().__getattribute__(attribute)

    agg.columns = Asked(8)
    agg.step(torch.zeros(5), torch.randn(3, 5), [0, 1, 2])
    return asked


def _value(formula: str, **sizes: int) -> int:
    """ "8Sd + 6K(K - S) + K ceil(K/8)" as a number."""
    code = re.sub(r"\((\*+|\+)\)", "", formula).strip()  # a footnote
    code = code.replace("ceil(K/8)", "c").replace("^", "**")
    code = re.sub(r"(?<=[\dKSdc)]) ?(?=[KSdc(])", "*", code)
    return int(eval(code, {"__builtins__": {}}, sizes | {"c": -(-sizes["K"] // 8)}))


def test_the_table_in_the_documentation() -> None:
    sizes = {"K": 101, "S": 11, "d": 1003}
    starts = [match.start() for match in re.finditer("=+", _table()[0])]
    columns = [slice(*ends) for ends in itertools.pairwise([*starts, None])]
    checked = []
    for line in _table()[2:]:
        rule, state, moved, flops = (line[column].strip() for column in columns)
        if rule not in fastagg.available() or " as " in f" {state} {moved}":
            continue
        copying, _, owned = moved.partition("; owned ")
        for text, owns in ((copying, False), (owned or copying, True)):
            plan = fastagg.plan(
                rule,
                num_clients=101,
                num_active=11,
                num_params=1003,
                owned=owns,
                **REQUIRED.get(rule, {}),
            )
            assert plan.bytes_moved == _value(text, **sizes), (rule, text)
            references = 101 - 11 + 1 if owns and "(*" in state else 0
            assert plan.state_bytes == _value(state, **sizes) + 4 * 1003 * references, rule
            if not (owns and "(**)" in flops):
                assert plan.flops == _value(flops, **sizes), rule
        checked.append(rule)
    assert len(checked) >= 8 and {"fdms", "mimic", "stale-models"} <= set(checked)


def _table() -> list[str]:
    lines = (fastagg.plan.__doc__ or "").splitlines()
    first, _, last = (n for n, line in enumerate(lines) if line.strip().startswith("====="))
    return [line.removeprefix("    ") for line in lines[first:last]]


def test_it_prints_a_table() -> None:
    plan = fastagg.plan("mifa", num_clients=100, num_active=20, num_params=10**6, owned=True)
    lines = str(plan).splitlines()
    assert lines[0] == "mifa: K = 100, S = 20, d = 1,000,000, rows exchanged"
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[1:]] == [
        ["state", "408 MB"],
        ["scratch", "8 MB"],
        ["moved per round", "196 MB"],
        ["work per round", "63 Mflop"],
    ]
    assert max(map(len, lines)) <= 80


def test_it_is_frozen() -> None:
    plan = fastagg.plan("mifa", num_clients=2, num_active=1, num_params=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.flops = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"name": "mimik"}, ValueError, r"name: expected one of .*Did you mean 'mimic'"),
        ({"beta": 2.0}, TypeError, r"rule 'mimic' has no option\(s\) \['beta'\]"),
        ({"num_active": 5}, ValueError, "num_active: expected at most num_clients, 4, got 5"),
        ({"num_active": 0}, ValueError, "num_active: expected at least 1"),
        ({"num_params": 2.5}, TypeError, "num_params: expected an int"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"name": "mimic", "num_clients": 4, "num_active": 2, "num_params": 3} | changes
    with pytest.raises(error, match=match):
        fastagg.plan(arguments.pop("name"), **arguments)


@pytest.mark.parametrize("num_clients", [K, 1000])  # of 1000 clients, a plan makes fewer
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mimic", {"mode": "x"}),
        ("mimic", {"max_age": -1}),
        ("mimic", {"staleness": "constant", "max_staleness": -1}),
        ("mimic", {"max_staleness": 5000}),
        ("mimic", {"staleness": "constant", "max_staleness": 2**70}),
        ("amplified", {"beta": -1}),
        ("fedavg", {"nonfinite": "x"}),
        ("fedavg", {"noise_multiplier": 1.0}),
        ("fedavg", {"min_active": 1001}),
        ("fedavg", {"client_weights": [1.0] * 3}),
        ("fedavg", {"client_weights": [*([1.0] * 999), -1.0]}),
        ("fdms", {"max_share": 1e-4}),
        ("fdms", {"elimination": 3}),
        ("fdms", {"precision": "highest", "sketch": 64}),
        ("scaffold", {}),
        ("scaffold", {"local_work": [*([1.0] * 999), 0.0]}),
        ("krum", {"memory_dtype": "int8"}),
        ("mifa", {"memory_folder": "no-such-folder"}),
        ("bucketing", {"rule": "median"}),
    ],
)
def test_it_refuses_what_make_refuses(name: str, options: dict[str, Any], num_clients: int) -> None:
    sizes = {"num_clients": num_clients, "num_params": D}
    with pytest.raises((TypeError, ValueError)) as expected:
        fastagg.make(name, **sizes, **options)
    with pytest.raises(expected.type) as found:
        fastagg.plan(name, num_active=2, **sizes, **options)
    assert str(found.value) == str(expected.value)


def test_it_takes_options_of_each_client() -> None:
    many = 1000
    sizes = {"num_clients": many, "num_active": 2, "num_params": D}
    options = {"client_weights": torch.rand(many), "min_active": 999, "max_share": 1.5 / many}
    fastagg.plan("fdms", **sizes, **options)
    fastagg.plan("scaffold", **sizes, local_work=torch.rand(many) + 0.1)


def test_it_does_not_need_the_memory_that_it_states() -> None:
    sizes = {"num_clients": 10**6, "num_active": 2, "num_params": 10**9}
    assert fastagg.plan("fdms", **sizes, elimination="theorem2").state_bytes > 6 * 10**12
    late = {"staleness": "constant", "max_staleness": 10**9}
    assert fastagg.plan("mimic", **sizes, **late).state_bytes > 4 * 10**18


# --- time, ranks and streams ----------------------------------------------------------------


RATES = Rates(bytes_per_s=1e10, flops_per_s=1e11, wire_bytes_per_s=1e9)


def test_time_is_that_of_bytes_and_flops() -> None:
    plan = fastagg.plan("fedavg", num_clients=20, num_active=10, num_params=10**6, rates=RATES)
    assert plan.seconds == pytest.approx((40e6 + 12e6) / 1e10 + 20e6 / 1e11)
    lines = [re.split(r"\s{2,}", line.strip()) for line in str(plan).splitlines()[-2:]]
    assert lines == [["total memory", "48 MB"], ["time per round", "5.4 ms"]]


def test_a_plan_says_when_sketches_pay() -> None:
    sizes = {"num_clients": 2000, "num_params": 10**6, "rates": RATES}
    many = fastagg.plan("fdms", num_active=1000, **sizes)
    sketched = fastagg.plan("fdms", num_active=1000, sketch=1024, **sizes)
    assert many.sketched_seconds == sketched.seconds and sketched.sketched_seconds is None
    assert many.seconds is not None and sketched.seconds is not None
    assert 10 * sketched.seconds < many.seconds  # S(S + 3)d flops against 6Sd
    name, seconds = re.split(r"\s{2,}", str(many).splitlines()[-1].strip())
    assert name == "sketch=1024" and seconds.endswith("s")
    few = fastagg.plan("fdms", num_active=3, **sizes)  # S(S + 3)d are as few
    assert few.sketched_seconds is None and "sketch" not in str(few)
    assert fastagg.plan("krum", num_active=1000, **sizes).sketched_seconds is not None
    assert fastagg.plan("krum", num_active=100, reuse=True, **sizes).sketched_seconds is None
    assert fastagg.plan("nnm", num_active=1000, **sizes).sketched_seconds is None
    precise = fastagg.plan("fdms", num_active=1000, precision="highest", **sizes)
    assert precise.sketched_seconds is None  # sketches need precision="high"


def test_sketches_must_pay_beside_products_that_are_computed_while_rows_are_read() -> None:
    """Sketches of 2 x 10^9 numbers a second are slower than reading 10^10 bytes."""
    rates = dataclasses.replace(RATES, sketched_per_s=2e9)
    sizes = {"num_clients": 2000, "num_params": 10**6, "rates": rates}
    found = {}
    for S in (20, 50, 200):
        exact = fastagg.plan("fdms", num_active=S, **sizes)
        sketched = fastagg.plan("fdms", num_active=S, sketch=1024, **sizes)
        assert exact.seconds is not None and sketched.seconds is not None
        rest = sketched.bytes_moved - 4 * S * 10**6, sketched.flops - 6 * S * 10**6
        expected = S * 10**6 / 2e9 + rest[0] / 1e10 + rest[1] / 1e11
        assert sketched.seconds == pytest.approx(expected)
        found[S] = exact.sketched_seconds
        assert exact.seconds > sketched.seconds  # exact.seconds adds both parts
    assert found[20] is None and found[50] is None and found[200] is not None


def test_time_of_a_device_is_measured() -> None:
    plan = fastagg.plan("mimic", num_clients=4, num_active=4, num_params=100, device="cpu")
    assert plan.seconds is not None and 0.0 < plan.seconds < 1.0
    assert 1e8 < measure("cpu").bytes_per_s < 1e13
    assert 1e8 < measure("cpu").flops_per_s < 1e15
    sketched = measure("cpu").sketched_per_s
    assert sketched is not None and 1e7 < sketched < 1e12
    for rates in (None, RATES):
        with pytest.raises(ValueError, match="device"):
            sizes = {"num_clients": 4, "num_active": 4, "num_params": 100}
            fastagg.plan("mimic", **sizes, device="moon", rates=rates)


@pytest.mark.parametrize("name", fastagg.available())
def test_ranks_share_what_has_columns(name: str) -> None:
    sizes = {"num_clients": 50, "num_active": 10, **REQUIRED.get(name, {})}
    one = fastagg.plan(name, num_params=80_000, **sizes)
    four = fastagg.plan(name, num_params=80_000, ranks=4, rates=RATES, **sizes)
    own = fastagg.plan(name, num_params=20_000, rates=RATES, **sizes)
    assert (four.state_bytes, four.flops) == (own.state_bytes, own.flops)
    assert one.wire_bytes == own.wire_bytes == 0 < four.wire_bytes
    assert four.seconds is not None and own.seconds is not None and four.seconds > own.seconds


def test_bytes_on_the_wire_do_not_depend_on_d() -> None:
    small, large = (
        fastagg.plan("fdms", num_clients=1000, num_active=100, num_params=d, ranks=8).wire_bytes
        for d in (10**6, 10**10)
    )
    assert small == large == 2 * 4 * 100 * 101 + 5 * 512 * 8 + 8 * 102


@pytest.mark.parametrize(
    ("name", "options", "staged"),
    [
        ("fdms", {}, 0),
        ("geometric-median", {}, 0),
        ("centered-clip", {}, 0),
        ("centered-clip", {"reuse": True}, 0),  # streams are read into spare rows
        ("mifa", {}, 0),
        ("mifa", {"memory_dtype": "bfloat16"}, 0),
        ("mifa", {"memory_dtype": "int8"}, 0),
        ("krum", {"memory_dtype": "int8", "reuse": True}, 0),
        ("mimic", {}, 0),
        ("mimic-aged", {}, 0),
    ],
)
def test_streams(name: str, options: dict[str, Any], staged: int) -> None:
    sizes = {"num_clients": 9, "num_active": 5, "num_params": 1000}
    plain = fastagg.plan(name, **sizes, **options)
    streamed = fastagg.plan(name, budget=4096, **sizes, **options)
    assert plain.update_bytes == 4 * 1000 + 4 * 5 * 1000
    assert streamed.update_bytes == 4 * 1000 + 4096
    assert streamed.scratch_bytes == plain.scratch_bytes + staged
    assert "rows streamed, 4.1 kB at a time" in str(streamed)


def test_ranks_keep_a_matrix_for_each_piece_of_a_stream() -> None:
    sizes = {"num_clients": 9, "num_active": 5, "num_params": 10_000, "ranks": 2}  # 5,000 columns
    matrix = 4 * 5 * 6  # bytes of half a Gram matrix of 5 rows
    whole = fastagg.plan("krum", **sizes)
    for columns, pieces in ((5_000, 1), (4_999, 2), (2_500, 3), (1, 5)):
        streamed = fastagg.plan("krum", budget=4 * 5 * columns, **sizes)
        assert streamed.scratch_bytes - whole.scratch_bytes == (pieces - 1) * matrix


def test_a_mapped_memory_copies_the_rows_of_a_buffer(tmp_path: Path) -> None:
    sizes = {"num_clients": K, "num_active": S, "num_params": D}
    mapped = fastagg.plan("mimic", owned=True, memory_folder=tmp_path, **sizes)
    assert mapped.bytes_moved == fastagg.plan("mimic", **sizes).bytes_moved


def test_a_bfloat16_memory_takes_half() -> None:
    options = {"memory_dtype": "bfloat16"}
    assert after_rounds("mifa", False, options, 3).memory_bytes == 2 * K * D + 8 * D
    sizes = {"num_clients": K, "num_active": S, "num_params": D}
    assert fastagg.plan("mifa", **sizes, **options).state_bytes == 2 * K * D + 8 * D
    wide = fastagg.plan("mifa", **sizes)  # spare rows as well
    assert fastagg.plan("mifa", **sizes, **options).scratch_bytes == wide.scratch_bytes - 2 * S * D


@pytest.mark.parametrize(
    ("name", "options"),
    [("mifa", {}), ("stale", {"max_age": 3}), ("fedvarp", {}), ("krum", {"reuse": True})],
)
def test_an_int8_memory_takes_a_byte_a_number_and_a_scale_a_block(
    name: str, options: dict[str, Any]
) -> None:
    sizes = {"num_clients": K, "num_active": S, "num_params": D}
    wide = fastagg.plan(name, **sizes, **options)
    narrow = fastagg.plan(name, **sizes, **options, memory_dtype="int8")
    saved = 3 * D - 4 * -(-D // 256)
    assert narrow.state_bytes == wide.state_bytes - K * saved
    zeros = int("max_age" in options)  # a row of zeros in the place of expired ones
    assert narrow.scratch_bytes == wide.scratch_bytes - (S + zeros) * saved
    agg = after_rounds(name, False, options | {"memory_dtype": "int8"}, 3)
    assert agg.memory_bytes == narrow.state_bytes


def test_mifa_of_ten_thousand_clients_in_int8() -> None:
    """Issue of the memory of many clients: at most 0.65 GB instead of 2.48 GB."""
    sizes = {"num_clients": 10_000, "num_params": 62_006}
    plan = fastagg.plan("mifa", **sizes, num_active=100, memory_dtype="int8")
    assert plan.state_bytes == 10_000 * (62_006 + 4 * 243) + 8 * 62_006 <= 0.65e9


@pytest.mark.parametrize("owned", [False, True])
def test_expired_rows_take_a_total_without_them_and_a_row_of_zeros(owned: bool) -> None:
    d, block = 10**6, 1 << 18
    sizes = {"num_clients": K, "num_active": S, "num_params": d, "owned": owned}

    def more(name: str, **options: Any) -> int:
        plain = fastagg.plan(name, **sizes, **options)
        return fastagg.plan(name, max_age=1, **sizes, **options).scratch_bytes - plain.scratch_bytes

    for name in ("mifa", "stale", "fedvarp", "fedstale", "stale-models"):
        assert more(name) == 12 * d + 12 * block, name
    assert more("mifa", memory_dtype="bfloat16") == 10 * d + 12 * block
    assert more("krum", reuse=True) == 4 * d
    assert more("krum", reuse=True, memory_dtype="bfloat16") == 2 * d


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks")
@pytest.mark.parametrize("name", ["mifa", "fedstale", "stale-models"])
def test_a_step_in_which_rows_expire_takes_what_the_plan_says(name: str) -> None:
    d = 1 << 21
    options = {"num_clients": 4, "num_params": d}
    agg = fastagg.make(name, max_age=1, **options)
    params, rows = torch.zeros(d), torch.ones(2, d)
    for clients in ([0, 1], [2, 3]) * 2:  # writes all rows and spare rows
        agg.step(params, rows, clients)
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = _status("VmRSS")
    agg.step(params, rows, [0, 1])  # their rows have expired, and new ones enter
    grown = _status("VmHWM") - before
    scratch = [
        fastagg.plan(name, num_active=2, max_age=max_age, **options).scratch_bytes
        for max_age in (1, None)
    ]
    # 2 MB for small things; a copy of a row and its float64 numbers would take 24 MB.
    assert grown <= scratch[0] - scratch[1] + (2 << 20)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize(
    ("name", "memory_dtype"),
    [
        *itertools.product(["mifa", "stale"], ["float32", "bfloat16", "int8"]),
        ("stale-models", "float32"),
    ],
)
def test_expired_rows_leave_the_total_in_pieces_of_the_same_bits(
    name: str, memory_dtype: str, owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for block in (256, 1 << 18):
        monkeypatch.setattr("fastagg.rules._memory_rule._BLOCK", block)
        torch.manual_seed(1)
        options = {"max_age": 1, "memory_dtype": memory_dtype}
        agg = fastagg.make(name, num_clients=K, num_params=1003, **options)
        buffer, params = UpdateBuffer(K, 1003), torch.zeros(1003)
        for clients in ([0, 1, 2], [3, 4], [1, 2], [0, 5], [6]):
            for row in buffer.rows(clients):
                row.normal_()
            agg.step(params, buffer if owned else buffer.rows(clients), clients)
        agg.forget([0])
        found.append((params, agg.state_dict()["total"]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, REQUIRED.get(name, {})) for name in fastagg.available()),
        ("fdms", {"sketch": 64}),
        ("krum", {"sketch": 64}),
        ("krum", {"reuse": True}),
    ],
)
def test_rules_that_compute_a_gram_matrix_have_the_memory_of_its_kernel(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spy(owner: object, method: str) -> None:
        compute = getattr(owner, method)

        def noted(*args: Any, **more: Any) -> Any:
            calls.append(method)
            return compute(*args, **more)

        monkeypatch.setattr(owner, method, noted)

    for method in ("gram", "gram_rows", "gram_and_sum_"):
        spy(Columns, method)
    spy(ops, "gram")
    after_rounds(name, False, options, 2)
    plan = fastagg.plan(name, num_clients=K, num_active=S, num_params=D, **options)
    assert (plan.kernel_bytes > 0) == bool(calls)


def test_no_gram_matrix_has_so_many_rows() -> None:
    sizes = {"num_clients": 10**9, "num_params": 10}
    for name, options in (("num_active", {}), ("num_clients", {"reuse": True})):
        with pytest.raises(ValueError, match=rf"^{name}: expected at most 16777216 for 'krum'"):
            fastagg.plan("krum", num_active=10**8, **sizes, **options)
