# SPDX-License-Identifier: Apache-2.0
"""``noise_multiplier``: noise on the aggregate, and what one client can change in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import AdaptiveClip, Aggregator
from fastagg.noise import add_noise_, standard_normal

K, D = 6, 23
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
ROUNDING = 1.0 + 2.0**-16
FLOAT32_SUM, FLOAT64_SUM = 2.0**-19, 2.0**-23
Check = Callable[..., None]
every_rule = pytest.mark.every_rule
NOISY: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedavg", {"client_weights": WEIGHTS}),
    ("amplified", {"beta": 2.0}),
    ("amplified", {"client_weights": WEIGHTS, "sequential": True}),
    ("fedau", {"cutoff": 3}),
    ("fdms", {}),
    ("fdms", {"similarity": "distance", "client_weights": WEIGHTS}),
    ("fdms", {"elimination": lambda t: 0.05}),
    ("fdms", {"max_share": 0.25}),
    ("fdms-soft", {"friends": 2, "client_weights": WEIGHTS}),
    ("fdms-means", {"sketch": 64}),
    ("fdms-means", {"sketch": 64, "max_share": 0.3, "client_weights": WEIGHTS}),
    ("mifa", {}),
    ("mifa", {"client_weights": WEIGHTS, "max_age": 2}),
    ("stale", {"client_weights": WEIGHTS}),
    ("stale", {"max_age": 1}),
    ("fedvarp", {}),
    ("fedvarp", {"client_weights": WEIGHTS, "max_age": 2}),
]
noisy = pytest.mark.parametrize(
    ("name", "options"), NOISY, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)


def make(name: str, options: dict[str, Any], **more: Any) -> Aggregator:
    return fastagg.make(name, num_clients=K, num_params=D, **(options | more))


def keyed(key: bytes) -> Callable[[int], bytes]:
    """Return a source of bytes that depends on the key alone, for tests."""
    drawn = 0

    def random_bytes(count: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(key + drawn.to_bytes(8, "little")).digest(count)

    return random_bytes


# --- the numbers --------------------------------------------------------------------------------


def test_numbers_follow_the_oracle() -> None:
    numbers, data = standard_normal(7, keyed(b"k")), keyed(b"k")(16 * 4)
    words = [int.from_bytes(data[i : i + 8], "little") >> 11 for i in range(0, len(data), 8)]
    uniform = [(word + 0.5) / 2**53 for word in words]
    radii = [math.sqrt(-2.0 * math.log(u)) for u in uniform[:4]]
    angles = [2.0 * math.pi * u for u in uniform[4:]]
    expected = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
    # errors of a few units in the last place of NumPy's functions
    assert np.abs(numbers - expected[:7]).max() <= 1e-14


def test_numbers_are_standard_normal() -> None:
    n = 1_000_000
    numbers = np.sort(standard_normal(n, keyed(b"statistics")))
    # The largest distance to the normal distribution, which exceeds 1.95 / sqrt(n) in one of a
    # thousand keys (Kolmogorov and Smirnov); this key is fixed.
    exact = np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in numbers[::1000]])
    assert np.abs(exact - np.arange(0, n, 1000) / n).max() <= 1.95 / math.sqrt(n)
    assert abs(numbers.mean()) <= 4.0 / math.sqrt(n)  # four standard deviations
    assert abs(numbers.var() - 1.0) <= 4.0 * math.sqrt(2.0 / n)
    assert np.abs(numbers).max() > 4.5
    pairs = standard_normal(n, keyed(b"pairs"))
    assert abs((pairs[: n // 2] * pairs[n // 2 :]).mean()) <= 4.0 / math.sqrt(n / 2)


def test_sums_lie_on_a_grid_whatever_the_vector() -> None:
    for std in (0.75, 1.0, 3e-20, 1e6):
        grid = 2.0 ** (math.frexp(std)[1] - 12)
        assert 2.0**-12 < grid / std <= 2.0**-11
        for vector in (torch.randn(70_000) * std, torch.full((5,), 1e-38), torch.ones(3) * std):
            found = add_noise_(vector.clone(), std)
            assert (torch.remainder(found.double(), grid) == 0.0).all()
            assert (found != vector).any()


def test_the_system_is_the_source_of_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first = add_noise_(torch.zeros(100), 1.0)
    torch.manual_seed(0)
    assert not torch.equal(add_noise_(torch.zeros(100), 1.0), first)
    asked: list[int] = []
    monkeypatch.setattr(Aggregator, "random_bytes", lambda self, n: asked.append(n) or bytes(n))
    agg = make("fedavg", {}, clip_norm=1.0, noise_multiplier=1.0)
    agg.step(torch.zeros(D), torch.randn(2, D), [0, 1])
    assert asked == [16 * 12]


# --- a step -------------------------------------------------------------------------------------


def test_hand_worked() -> None:
    agg = fastagg.FedAvg(
        num_clients=4, num_params=2, server_lr=0.5, clip_norm=5.0, noise_multiplier=2.0
    )
    agg.random_bytes = keyed(b"step")
    params = torch.zeros(2)
    # the mean of (3, 4) and (1, 0), and noise of 2 * 5 / 2 = 5
    report = agg.step(params, torch.tensor([[6.0, 8.0], [1.0, 0.0]]), [2, 0])
    sensitivity = 5.0 * (ROUNDING / 2 + FLOAT32_SUM)
    std = 2.0 * sensitivity
    grid = 2.0 ** (3 - 12)  # 4 < std < 8
    sums = np.array([2.0, 2.0]) + std * standard_normal(2, keyed(b"step"))
    expected = 0.5 * np.round(sums / grid) * grid
    assert params.tolist() == expected.tolist()
    assert report.noise is not None
    assert report.noise.multiplier == 2.0
    assert report.noise.sensitivity == pytest.approx(sensitivity, rel=1e-12)
    assert report.noise.std == pytest.approx(std, rel=1e-12)


@noisy
def test_noise_is_added_to_the_aggregate_and_nothing_else(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"clip_norm": 3.0, "server_optimizer": "momentum"}
    agg, plain = make(name, options, noise_multiplier=0.5, **more), make(name, options, **more)
    params, bound = torch.zeros(D), 0.0
    generator = torch.Generator().manual_seed(1)
    for t in range(6):
        clients = torch.randperm(K, generator=generator)[:4]
        rows, twin = torch.randn(4, D, generator=generator), params.clone()
        plain.load_state_dict(agg.state_dict())
        agg.random_bytes = keyed(bytes([t]))
        report, expected = agg.step(params, rows, clients), plain.step(twin, rows, clients)
        assert report.noise is not None and expected.noise is None
        drawn = report.noise.std * standard_normal(D, keyed(bytes([t])))
        # rounding to the grid, and roundings of the aggregates and parameters to float32
        bound = 2.0**-12 * report.noise.std * 2.0 + 8 * 2.0**-24 * float(params.abs().max())
        assert np.abs((params - twin).double().numpy() - drawn).max() <= bound
        same_bits(report.weights, expected.weights)
        for key, value in plain.state_dict().items():
            if key != "m":  # the optimizer sees the noise, what the rule remembers does not
                same_bits(value, agg.state_dict()[key], key)


@noisy
@given(data=st.data())
def test_one_client_changes_no_more_than_the_sensitivity(
    name: str, options: dict[str, Any], data: st.DataObject
) -> None:
    """Compare runs in which all rows of one client are zero, or not, with the same other rows."""
    seed, odd = data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, K - 1))
    scale = data.draw(st.sampled_from([0.1, 1.0, 10.0]))
    directions = data.draw(st.sampled_from([1, 2, D]))  # in few directions, friends change often
    generator = torch.Generator().manual_seed(seed)
    agg, without = make(name, options, clip_norm=1.0), make(name, options, clip_norm=1.0)
    noise = make(name, options, clip_norm=1.0, noise_multiplier=1.0)
    for _ in range(8):
        size = int(torch.randint(1, K + 1, (), generator=generator))
        clients = torch.randperm(K, generator=generator)[:size]
        rows = torch.zeros(size, D)
        rows[:, :directions] = scale * torch.randn(size, directions, generator=generator)
        zeroed = rows * (clients != odd)[:, None]
        first, second = torch.zeros(D), torch.zeros(D)
        agg.step(first, rows, clients)
        without.step(second, zeroed, clients)
        report = noise.step(torch.zeros(D), rows, clients)
        assert report.noise is not None
        assert float((first - second).double().norm()) <= report.noise.sensitivity


def test_sensitivities() -> None:
    rows = torch.eye(D)[:3]

    def found(name: str, clients: list[int], rounding: float, **options: Any) -> float:
        agg = make(name, {}, clip_norm=2.0, noise_multiplier=1.0, **options)
        report = agg.step(torch.zeros(D), rows[: len(clients)], clients)
        assert report.noise is not None
        return (report.noise.sensitivity / 2.0 - rounding) / ROUNDING

    def near(value: float) -> Any:
        return pytest.approx(value, rel=1e-12)

    one, exact = FLOAT32_SUM, FLOAT64_SUM  # the factors add up to 1, but for three rules
    assert found("fedavg", [0, 3, 5], one) == near(1 / 3)
    assert found("fedavg", [0, 3, 5], one, client_weights=WEIGHTS) == near(9 / 13)
    assert found("amplified", [0, 1], 2 * 3 / K * one, beta=3.0) == near(3 / K)
    assert found("fedau", [0, 1], 2 / K * one) == near(1 / K)
    assert found("mifa", [0, 1], exact) == near(1 / K)
    assert found("mifa", [0, 1], exact, client_weights=WEIGHTS) == near(9 / 23)
    # of the two clients seen so far; the rows of the other four are zero, but count here
    assert found("stale", [0, 1], K / 2 * exact) == near(1 / 2)
    assert found("fedvarp", [0, 1], (1 + 2) * exact) == near(2 / 2 - 1 / K)
    assert found("fdms", [0, 3, 5], one) == near((2 * 3 + 1) / K)
    assert found("fdms", [0], one) == near((2 * 5 + 1) / K)
    agg = make("fdms", {}, clip_norm=2.0, noise_multiplier=1.0)
    report = agg.step(torch.zeros(D), torch.eye(D)[:K], range(K))
    assert report.noise is not None
    assert report.noise.sensitivity == near(2.0 * (ROUNDING / K + one))


@pytest.mark.parametrize("name", ["fedavg", "amplified", "fedau", "fdms", "mifa", "fedvarp"])
@pytest.mark.parametrize("size", [64, 4096])
def test_roundings_are_within_the_sensitivity(name: str, size: int) -> None:
    """Of 2^14 numbers, the one for which rounding the mean of equal rows moves it farthest.

    With 4096 rows, the mean moves by 1.0002 of what it would without roundings.
    """
    numbers = (1.0 + np.arange(2**14) * 2.0**-23).astype(np.float32).astype(np.float64)
    moved = numbers - (numbers * (size - 1) / size).astype(np.float32)
    row = torch.full((16,), float(numbers[np.argmax(moved / numbers)]))
    clip_norm = float(row.double().norm())
    ends, report = [], None
    for first, multiplier in ((row, 0.0), (torch.zeros(16), 0.0), (row, 1.0)):
        agg = fastagg.make(
            name, num_clients=size, num_params=16, clip_norm=clip_norm, noise_multiplier=multiplier
        )
        ends.append(torch.zeros(16))
        report = agg.step(ends[-1], [first, *[row] * (size - 1)], range(size))
    assert report is not None and report.noise is not None
    change = float((ends[0].double() - ends[1].double()).norm())
    plain = (1.0 + 2.0**-16) * clip_norm / size  # of which no rule has more than that here
    assert change <= report.noise.sensitivity < 1.02 * plain * (2 if name == "fedvarp" else 1)
    assert size == 64 or name == "fedvarp" or change > plain


def test_a_row_too_long_to_scale_is_a_row_of_zeros_with_noise() -> None:
    """A rejection, and a mean of the others, would show that it was so long."""
    agg = fastagg.FedAvg(num_clients=2, num_params=2, clip_norm=1e-6, noise_multiplier=1.0)
    agg.random_bytes = lambda count: bytes(count)
    drawn = torch.from_numpy(standard_normal(2, agg.random_bytes)).abs().max()
    params = torch.zeros(2)
    report = agg.step(params, torch.tensor([[2e38, 0.0], [0.0, 0.5]]), [0, 1])
    assert report.active.tolist() == [0, 1] and not report.rejected.numel()
    assert report.noise is not None
    assert params[0].abs() <= drawn * report.noise.std * 1.01


def test_the_largest_weight_is_no_bound_for_fdms() -> None:
    """The friends follow from earlier rows: a client changes which rows of others count."""
    results = []
    for zeroed in (False, True):
        agg, params = fastagg.FDMS(num_clients=8, num_params=2, clip_norm=1.0), torch.zeros(2)
        first = torch.tensor([[0.0 if zeroed else 1.0, 0.0], *[[1.0, 0.05]] * 7])
        first[2] = torch.tensor([0.2, 1.0])
        agg.step(params, first, range(8))
        last = torch.tensor([[0.0, 0.0] if zeroed else [1.0, 0.0], [-1.0, 0.0]])
        agg.step(params.zero_(), last, [0, 2])  # 0 is the friend of six clients, or 2 is
        results.append(params.clone())
    change, largest_weight = float((results[0] - results[1]).norm()), 7 / 8
    assert largest_weight < change <= (2 * 6 + 1) / 8


@noisy
def test_a_refused_step_changes_nothing(
    same_bits: Check, name: str, options: dict[str, Any]
) -> None:
    agg, params = make(name, options, clip_norm=1.0, noise_multiplier=1.0), torch.randn(D)
    agg.step(params, torch.randn(4, D), [0, 1, 2, 3])
    state, before, report = agg.state_dict(), params.clone(), agg.last_report
    agg.clip_norm = 1e38
    with pytest.raises(ValueError, match="float32"):
        agg.noise_multiplier = 1e3
        agg.step(params, torch.randn(3, D), [0, 1, 2])
    same_bits(params, before)
    for key, value in agg.state_dict().items():
        same_bits(value, state[key], key)
    assert agg.last_report is report


def test_a_step_whose_noise_is_no_number_is_an_error_without_warnings() -> None:
    agg = fastagg.make("fedavg", num_clients=4, num_params=3, clip_norm=1e-320, noise_multiplier=1)
    params = torch.ones(3)
    with pytest.raises(ValueError, match="the step could leave the range of float32"):
        agg.step(params, torch.full((2, 3), 1e-3), [0, 1])
    assert params.tolist() == [1.0] * 3


def test_mifa_releases_its_memory_in_rounds_without_clients() -> None:
    agg, params = make("mifa", {}, clip_norm=1.0, noise_multiplier=1.0), torch.zeros(D)
    agg.step(params, torch.ones(K, D), range(K))
    total = agg.state_dict()["total"]
    report = agg.step(params, torch.zeros(0, D), [])
    assert not report.skipped and report.noise is not None
    assert report.noise.sensitivity == pytest.approx(ROUNDING / K + FLOAT64_SUM)
    assert torch.equal(agg.state_dict()["total"], total)  # no noise in what it remembers


@noisy
def test_the_noise_covers_rows_of_rounds_with_another_bound(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Whatever change of options is accepted, the sensitivity bounds what a client has changed."""
    rows = torch.randn(K, D)
    rows[0] = 1e3  # clipped, at the bound of the first round

    def first(changed: dict[str, Any]) -> tuple[Aggregator, Aggregator]:
        agg, without = (make(name, options, clip_norm=5.0, **changed) for _ in range(2))
        agg.step(torch.zeros(D), rows, range(K))
        without.step(torch.zeros(D), torch.cat([torch.zeros(1, D), rows[1:]]), range(K))
        return agg, without

    def later(agg: Aggregator, without: Aggregator) -> None:
        released, sensitivity = [], 0.0
        for each in (agg, without):
            each.random_bytes = keyed(b"same")
            params = torch.zeros(D)
            report = each.step(params, 0.01 * rows[1:], range(1, K))
            assert report.noise is not None
            released.append(params)
            sensitivity = report.noise.sensitivity
        rounding = sum(2.0**-24 * float(params.norm()) for params in released)  # to float32
        assert float((released[0] - released[1]).norm()) <= sensitivity + rounding

    remembers = name in ("mifa", "stale", "fedvarp")
    noise_later = [("noise_multiplier", 1e-3)]
    for start, changes in (
        ({}, noise_later),
        ({}, [("clip_norm", 0.1), *noise_later]),
        ({"noise_multiplier": 1e-3}, [("clip_norm", 0.1)]),
    ):
        pair = first(dict(start))
        if remembers:
            with pytest.raises(
                ValueError, match=r"^(noise_multiplier|clip_norm): expected .*rememb"
            ):
                for option, value in changes:
                    setattr(pair[0], option, value)
            pair = first(dict(start))
            pair[0].save(tmp_path / "agg")
            with pytest.raises(
                ValueError, match=r"^(noise_multiplier|clip_norm): expected .*rememb"
            ):
                fastagg.load(tmp_path / "agg", **dict(changes))
        else:
            for agg in pair:
                for option, value in changes:
                    setattr(agg, option, value)
            later(*pair)
    pair = first({"noise_multiplier": 1e-3})
    for agg in pair:  # a larger bound covers the rows of a smaller one
        agg.clip_norm, agg.noise_multiplier = 6.0, 1e-4
    later(*pair)


@pytest.mark.parametrize("name", ["mifa", "stale", "fedvarp"])
def test_rules_with_a_memory_take_no_noise_with_an_adaptive_bound(name: str) -> None:
    adaptive = AdaptiveClip(count_noise=2.0)
    with pytest.raises(ValueError, match=rf"^clip_norm: expected a number .* for {name}, because"):
        make(name, {}, clip_norm=adaptive, noise_multiplier=1.0)
    agg = make(name, {}, clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"^clip_norm: expected a number"):
        agg.clip_norm = adaptive
    agg.step(torch.zeros(D), torch.ones(2, D), [0, 1])
    agg.forget([0, 1])  # no row is left that may be longer
    agg.clip_norm = 0.5
    agg.noise_multiplier = 0.0
    agg.clip_norm = adaptive


@every_rule
def test_other_rules_refuse(name: str, options: dict[str, Any]) -> None:
    known = {rule for rule, _ in NOISY}
    more: dict[str, Any] = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    if name in known and options.get("memory_dtype", "float32") == "float32":
        assert make(name, options, **more).noise_multiplier == 1.0
        return
    if name == "mifa-client":
        with pytest.raises(
            ValueError, match=r"^clip_norm: expected None for mifa-client, got 1\.0: "
        ):
            make(name, options, **more)
        return
    with pytest.raises(ValueError, match=f"^noise_multiplier: expected 0 for {name}, got 1: ") as e:
        make(name, options, **more)
    agg = make(name, options, clip_norm=1.0)
    assert agg.no_noise and agg.no_noise in str(e.value)
    with pytest.raises(ValueError, match=r"^noise_multiplier: expected 0"):
        agg.noise_multiplier = 0.5


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"clip_norm": None}, ValueError, "^clip_norm: expected a bound with noise_multiplier"),
        ({"max_norm": 5.0}, ValueError, "^max_norm: expected None with noise_multiplier"),
        ({"max_norm": "adaptive"}, ValueError, "^max_norm: expected None"),
        ({"clip_norm": "adaptive"}, ValueError, "^clip_norm: count_noise: expected more than"),
        ({"clip_norm": {"count_noise": 1.0}}, ValueError, "^clip_norm: count_noise"),
        ({"noise_multiplier": -1.0}, ValueError, "^noise_multiplier: "),
        ({"noise_multiplier": math.nan}, ValueError, "^noise_multiplier: "),
        ({"noise_multiplier": "1"}, TypeError, "^noise_multiplier: "),
    ],
)
def test_options_that_guarantee_nothing_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make("fedavg", {"clip_norm": 1.0, "noise_multiplier": 1.0} | options)
    agg = make("fedavg", {}, clip_norm=1.0, noise_multiplier=1.0)
    ((name, value),) = options.items()
    with pytest.raises(error, match=match):
        setattr(agg, name, value)
    assert (agg.clip_norm, agg.max_norm, agg.noise_multiplier) == (1.0, None, 1.0)


def test_weights_of_a_round_are_refused() -> None:
    agg, params = make("fedavg", {}, clip_norm=1.0, noise_multiplier=1.0), torch.zeros(D)
    with pytest.raises(ValueError, match=r"^weights: fedavg takes none: they come from the data"):
        agg.step(params, torch.ones(2, D), [0, 1], weights=[1, 2])
    assert not params.any()


def test_dropping_has_no_limit_of_norms() -> None:
    agg = make("fedavg", {}, clip_norm=1.0, noise_multiplier=1.0, nonfinite="drop")
    assert agg.max_norm is None
    rows = torch.ones(3, D)
    rows[1, 2] = math.nan
    report = agg.step(torch.zeros(D), rows, [0, 1, 2])
    assert report.rejected.tolist() == [1] and report.noise is not None
    assert report.noise.sensitivity == pytest.approx(ROUNDING / 2 + FLOAT32_SUM)


def test_the_count_of_an_adaptive_bound_has_its_part_of_the_noise() -> None:
    agg = make("fedavg", {}, clip_norm=AdaptiveClip(2.0, count_noise=2.0), noise_multiplier=1.0)
    report = agg.step(torch.zeros(D), torch.ones(4, D), [0, 1, 2, 3])
    assert report.noise is not None and report.noise.multiplier == 1.0
    share = report.noise.std / report.noise.sensitivity
    # two Gaussian releases are one: 1 / z^2 = 1 / share^2 + 1 / count_noise^2
    assert 1.0 / share**2 + 1.0 / 2.0**2 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("multiplier", "count_noise", "share"),
    [(3.0, 5.0, 3.75), (1e-200, 1.0, 1e-200), (0.1, 1e30, 0.1)],
)
def test_any_multiplier_below_the_noise_of_the_count(
    multiplier: float, count_noise: float, share: float
) -> None:
    clip = AdaptiveClip(2.0, count_noise=count_noise)
    agg = make("fedavg", {}, clip_norm=clip, noise_multiplier=multiplier)
    report = agg.step(torch.zeros(D), torch.ones(4, D), [0, 1, 2, 3])
    assert report.noise is not None
    assert report.noise.std == pytest.approx(share * report.noise.sensitivity, rel=1e-12)


def test_a_checkpoint_has_the_option(tmp_path: Path) -> None:
    make("fdms", {}, clip_norm=2.0, noise_multiplier=0.7).save(tmp_path / "agg")
    loaded = fastagg.load(tmp_path / "agg")
    assert (loaded.clip_norm, loaded.noise_multiplier, loaded.max_norm) == (2.0, 0.7, None)


def test_streams_and_buffers_get_noise() -> None:
    rows = torch.randn(3, D)
    buffer = fastagg.UpdateBuffer(K, D)
    for client in range(3):
        buffer.row(client).copy_(rows[client])
    stream = fastagg.ColumnBlocks(lambda: iter(rows.split(7, dim=1)), num_rows=3, num_params=D)
    results: list[Tensor] = []
    for updates in (rows, buffer, stream):
        agg, params = make("fdms", {}, clip_norm=1.0, noise_multiplier=1.0), torch.zeros(D)
        agg.random_bytes = keyed(b"same")
        agg.step(params, updates, range(3))
        results.append(params)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
