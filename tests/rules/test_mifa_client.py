# SPDX-License-Identifier: Apache-2.0
"""MIFA with rows that clients keep: hand-worked numbers, ``mifa`` as the oracle, and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastagg
from fastagg import MIFA, MIFAClient, MIFADifferences

K, D = 6, 33
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0, 0.0]


def test_hand_worked() -> None:
    agg, params = MIFADifferences(num_clients=4, num_params=1), torch.zeros(1)
    clients = [MIFAClient(1) for _ in range(4)]
    sent = [clients[k].difference_(torch.tensor([u])) for k, u in ((1, 8.0), (0, 4.0))]
    agg.step(params, sent, [1, 0])
    assert params.tolist() == [3.0]  # 12 / 4
    assert (agg.total.tolist(), agg.answers.tolist()) == ([12.0], [1, 1, 0, 0])
    for client, answers in zip(clients, agg.answers.tolist(), strict=True):
        client.learn(answers)
    row = clients[1].difference_(torch.tensor([6.0]))
    assert row.tolist() == [-2.0]
    agg.step(params, [row], [1])
    assert params.tolist() == [5.5]  # (4 + 6) / 4
    agg.step(params, [], [])  # the same again
    assert params.tolist() == [8.0]
    assert [client.row.item() for client in clients] == [4.0, 8.0, 0.0, 0.0]
    clients[1].learn(2)
    assert clients[1].row.item() == 6.0


def rounds(seed: int, count: int, d: int = D) -> Iterator[tuple[Tensor, list[int]]]:
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = int(torch.randint(0, K + 1, (), generator=g))
        yield torch.randn(size, d, generator=g), torch.randperm(K, generator=g)[:size].tolist()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("empty", ["apply", "skip"])
def test_follows_mifa(weights: list[float] | None, empty: str) -> None:
    """Over 200 rounds, the models and the clients' rows are those of the rule with a memory."""
    options: dict[str, Any] = {"client_weights": weights, "empty_rounds": empty, "server_lr": 0.3}
    sums = MIFADifferences(num_clients=K, num_params=D, **options)
    server = MIFA(num_clients=K, num_params=D, **options)
    clients = [MIFAClient(D) for _ in range(K)]
    params, twin = torch.zeros(D), torch.zeros(D)
    for updates, active in rounds(0, 200):
        server.step(twin, updates, active)
        for k in active:
            clients[k].learn(int(sums.answers[k]))
        sent = [clients[k].difference_(u.clone()) for k, u in zip(active, updates, strict=True)]
        sums.step(params, sent, active)
        # A row is off by the rounding of its last difference, at most 2^-24 * 2 * 5, and the model
        # by that of the mean and its own rounding; both models start from the same one.
        assert (params - twin).abs().max() <= 2.0**-24 * (10 + twin.abs().max())
        params.copy_(twin)
    for k, client in enumerate(clients):
        client.learn(int(sums.answers[k]))
        assert (client.row - server.memory[k]).abs().max() <= 2.0**-24 * 10


def test_the_total_is_the_sum_of_the_clients_rows() -> None:
    agg, params = (
        MIFADifferences(num_clients=K, num_params=D, client_weights=WEIGHTS),
        torch.zeros(D),
    )
    clients = [MIFAClient(D) for _ in range(K)]
    for updates, active in rounds(1, 300):
        scale = 10.0 ** torch.randint(-3, 4, (len(active), 1))
        for k in active:
            clients[k].learn(int(agg.answers[k]))
        sent = [clients[k].difference_(u) for k, u in zip(active, scale * updates, strict=True)]
        agg.step(params, sent, active)
    for k, client in enumerate(clients):
        client.learn(int(agg.answers[k]))
    exact = sum(w * client.row for w, client in zip(WEIGHTS, clients, strict=True))
    # 300 rounds of float64 roundings of sums up to 14 * 5000: nothing of float32 accumulates.
    assert (agg.total - exact).abs().max() <= 300 * 2.0**-53 * 14 * 5000


@given(data=st.data(), seed=st.integers(0, 2**31))
def test_no_fault_separates_clients_and_server(data: st.DataObject, seed: int) -> None:
    """Differences are lost, rejected, or late for the acknowledgement; the server is restarted."""
    g = torch.Generator().manual_seed(seed)
    agg = MIFADifferences(num_clients=3, num_params=5, nonfinite="drop", max_norm=None)
    clients, params = [MIFAClient(5) for _ in range(3)], torch.zeros(5)
    counted = [torch.zeros(5) for _ in range(3)]  # the last update that the server has
    for _ in range(data.draw(st.integers(1, 8), "rounds")):
        sent: dict[int, Tensor] = {}
        for k in data.draw(st.sets(st.integers(0, 2)), "asked"):
            fault = data.draw(st.sampled_from(["none", "lost", "rejected", "unaware"]), "fault")
            if fault == "unaware" and clients[k].pending is None:
                continue  # the model did not reach the client
            clients[k].learn(int(agg.answers[k]))
            update = torch.randn(5, generator=g)
            row = clients[k].difference_(update.clone())
            if fault == "lost":
                continue
            if fault == "rejected":
                row = row.clone()
                row[2] = torch.nan  # broken on its way
            else:
                counted[k] = update
            sent[k] = row
        agg.step(params, list(sent.values()), list(sent))
        if data.draw(st.booleans(), "restart"):
            again = MIFADifferences(num_clients=3, num_params=5, nonfinite="drop", max_norm=None)
            again.load_state_dict(agg.state_dict())
            agg = again
    for k, client in enumerate(clients):
        client.learn(int(agg.answers[k]))
        # one rounding of a difference of numbers below 6
        assert (client.row - counted[k]).abs().max() <= 2.0**-24 * 12
    exact = sum(client.row for client in clients)
    assert (agg.total - exact).abs().max() <= 8 * 3 * 2.0**-53 * 12  # float64 roundings


def test_a_client_sends_nothing_while_it_does_not_know() -> None:
    client = MIFAClient(2)
    client.difference_(torch.ones(2))
    with pytest.raises(RuntimeError, match="call learn first"):
        client.difference_(torch.ones(2))
    client.learn(0)  # it was lost
    assert client.difference_(torch.ones(2)).tolist() == [1.0, 1.0]


def test_counts_that_do_not_fit_are_refused() -> None:
    client = MIFAClient(1)
    client.difference_(torch.ones(1))
    client.learn(1)
    client.difference_(torch.ones(1))
    for answers, expected in ((3, "expected 1 or 2, got 3"), (4, "got 4")):
        with pytest.raises(ValueError, match=expected):
            client.learn(answers)
    assert client.pending is not None
    assert (client.answers, client.row.item()) == (1, 1.0)
    client.learn(2)
    with pytest.raises(ValueError, match="expected 2, got 3"):  # another client answered
        client.learn(3)
    client.learn(0)  # the server began again
    assert (client.answers, client.row.item()) == (0, 0.0)


class TestLeaving:
    """What ``forget`` can do, and ``withdraw``."""

    def trained(self) -> tuple[MIFADifferences, list[MIFAClient]]:
        agg = MIFADifferences(num_clients=K, num_params=D, client_weights=WEIGHTS)
        clients, params = [MIFAClient(D) for _ in range(K)], torch.zeros(D)
        for updates, active in rounds(2, 20):
            for k in active:
                clients[k].learn(int(agg.answers[k]))
            sent = [clients[k].difference_(u) for k, u in zip(active, updates, strict=True)]
            agg.step(params, sent, active)
        for k, client in enumerate(clients):
            client.learn(int(agg.answers[k]))
        return agg, clients

    def test_withdrawn_rows_leave_the_total(self) -> None:
        agg, clients = self.trained()
        agg.withdraw(torch.stack([clients[k].row for k in (4, 1)]), [4, 1])
        assert agg.answers[[1, 4]].tolist() == [0, 0]
        exact = sum(WEIGHTS[k] * clients[k].row for k in (0, 2, 3, 5))
        assert (agg.total - exact).abs().max() <= 40 * 2.0**-53 * 100  # float64 roundings
        clients[4].learn(int(agg.answers[4]))  # begins anew
        assert not clients[4].row.any()
        agg.forget([1, 4])  # nothing is left to forget

    def test_forgetting_one_client_needs_its_row(self, same_state: Callable[..., None]) -> None:
        agg, _ = self.trained()
        twin, _ = self.trained()
        with pytest.raises(ValueError, match=r"cannot forget \[2\].*call withdraw"):
            agg.forget([2])
        same_state(agg, twin)

    def test_all_clients_can_be_forgotten(self) -> None:
        agg, clients = self.trained()
        agg.forget(range(K))
        assert not agg.total.any()
        for client, answers in zip(clients, agg.answers.tolist(), strict=True):
            client.learn(answers)
            assert not client.row.any()

    @pytest.mark.parametrize(
        ("rows", "ids", "error", "message"),
        [
            (torch.ones(1, D - 1), [1], ValueError, rf"rows: expected \[1, {D}\] float64"),
            (torch.ones(2, D), [1], ValueError, "rows: expected"),
            (torch.ones(1, D).half(), [1], ValueError, "rows: expected"),
            ([[1.0] * D], [1], ValueError, "rows: .*got list"),
            (torch.full((1, D), torch.inf), [1], ValueError, "rows: expected finite"),
            (torch.ones(1, D), [K], IndexError, "clients"),
            (torch.ones(2, D), [1, 1], ValueError, "clients"),
        ],
    )
    def test_bad_arguments_change_nothing(
        self, same_state: Callable[..., None], rows: Any, ids: list[int], error: Any, message: str
    ) -> None:
        agg, _ = self.trained()
        twin, _ = self.trained()
        with pytest.raises(error, match=message):
            agg.withdraw(rows, ids)
        same_state(agg, twin)

    @pytest.mark.parametrize("most", [1.7e308, 1e300, 1e40])
    def test_rows_that_are_too_large_for_the_total_change_nothing(
        self, same_state: Callable[..., None], tmp_path: Path, most: float
    ) -> None:
        agg, _ = self.trained()
        twin, _ = self.trained()
        rows = torch.full((2, D), most, dtype=torch.float64)
        with pytest.raises(ValueError, match="rows: expected rows without which the total"):
            agg.withdraw(rows, [1, 2])
        with pytest.raises(ValueError, match="rows: expected rows without which the total"):
            agg.withdraw(torch.stack([rows[0], -rows[0]]), [1, 2])
        same_state(agg, twin)
        agg.save(tmp_path / "agg")
        same_state(fastagg.load(tmp_path / "agg"), twin)

    def test_a_client_withdraws_only_what_the_total_holds(
        self, same_state: Callable[..., None]
    ) -> None:
        agg, twin = (MIFADifferences(num_clients=3, num_params=2) for _ in range(2))
        for rule in (agg, twin):
            rule.step(torch.zeros(2), torch.ones(1, 2), [0])
        rows = torch.tensor([[1.0, 1.0], [0.0, 50.0]])
        with pytest.raises(ValueError, match=r"rows: expected zeros .* got others for \[2\]"):
            agg.withdraw(rows, [0, 2])  # client 2 has never answered
        same_state(agg, twin)
        agg.withdraw(torch.zeros(1, 2), [2])
        same_state(agg, twin)
        agg.withdraw(rows[:1], [0])
        assert not agg.total.any()
        with pytest.raises(ValueError, match=r"got others for \[0\]"):
            agg.withdraw(rows[:1], [0])  # a second time


def test_the_sum_is_enough() -> None:
    """Under secure aggregation: the sum as one client's row, zeros as those of the others."""
    one, other = (MIFADifferences(num_clients=4, num_params=3) for _ in range(2))
    params, twin = torch.zeros(3), torch.zeros(3)
    for _ in range(5):
        rows = torch.randint(-99, 99, (3, 3)).float()  # whole numbers: sums are exact
        clients = torch.randperm(4)[:3].tolist()
        one.step(params, rows, clients)
        zeros = torch.zeros(3)
        other.step(twin, [rows.sum(dim=0), zeros, zeros], clients)
        assert torch.equal(params, twin)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_checkpoint_does_not_depend_on_how_equal_weights_were_given(
    tmp_path: Path, same_bits: Callable[..., None]
) -> None:
    agg = MIFADifferences(num_clients=3, num_params=2)
    agg.step(torch.zeros(2), torch.ones(2, 2), [0, 2])
    agg.save(tmp_path / "agg")
    again = fastagg.load(tmp_path / "agg")
    params, twin = torch.zeros(2), torch.zeros(2)
    agg.step(params, torch.ones(1, 2), [1])
    again.step(twin, torch.ones(1, 2), [1])
    same_bits(params, twin)
    assert params.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("staleness", ["constant", "polynomial", "hinge"])
def test_late_differences_are_refused(staleness: str) -> None:
    """The client would have another row: it was asked again, and discarded the late difference."""
    with pytest.raises(ValueError, match=r"staleness: expected None, got .*has discarded"):
        fastagg.make("mifa-client", num_clients=1, num_params=1, staleness=staleness)


def test_differences_are_not_clipped() -> None:
    """The client adds the whole difference to its row, so the total must, too."""
    message = "clip_norm: expected None for mifa-client, got 1.0: its clients add the whole"
    with pytest.raises(ValueError, match=message):
        fastagg.make("mifa-client", num_clients=1, num_params=1, clip_norm=1.0)
    agg = fastagg.make("mifa-client", num_clients=1, num_params=1, max_norm=9.0)
    with pytest.raises(ValueError, match=message):
        agg.clip_norm = 1.0
    client, params = fastagg.MIFAClient(1), torch.zeros(1)
    for update in (8.0, 30.0, 7.0):  # the difference to 30 is rejected
        client.learn(int(agg.answers[0]))
        agg.step(params, client.difference_(torch.tensor([update])).view(1, 1), [0])
        client.learn(int(agg.answers[0]))
        assert client.row.tolist() == agg.total.tolist() == [7.0 if update == 7.0 else 8.0]


def test_a_client_made_in_inference_mode_goes_on() -> None:
    with torch.inference_mode():
        client = fastagg.MIFAClient(2)
        client.difference_(torch.ones(2))
    client.learn(1)
    assert client.row.tolist() == [1.0, 1.0] and client.answers == 1 and client.pending is None


def test_steps_that_leave_the_range_are_refused(same_state: Callable[..., None]) -> None:
    agg, params = MIFADifferences(num_clients=1, num_params=1), torch.zeros(1)
    agg.step(params, torch.tensor([[2e38]]), [0])
    before = agg.state_dict()
    with pytest.raises(ValueError, match="range of float32"):
        agg.step(params, torch.tensor([[2e38]]), [0])
    assert params.item() == pytest.approx(2e38)
    assert all(map(torch.equal, before.values(), agg.state_dict().values()))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match='empty_rounds: expected "apply" or "skip"'):
        MIFADifferences(num_clients=2, num_params=1, empty_rounds="maybe")


def test_a_count_of_another_type_is_refused_and_a_tensor_is_not_kept() -> None:
    client, answers = fastagg.MIFAClient(2), torch.tensor([1, 0])
    client.difference_(torch.ones(2))
    for wrong in ("1", 1.0, True, None, torch.tensor([1, 2]), torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"^answers: expected ints, got "):
            client.learn(wrong)  # type: ignore[arg-type]
    assert client.pending is not None and client.answers == 0
    client.learn(answers[0])  # type: ignore[arg-type]
    answers.zero_()  # as load_state_dict changes the rule's counts
    assert client.answers == 1 and type(client.answers) is int
    assert client.row.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("update", "error"),
    [
        (torch.ones(3), ValueError),
        (torch.ones(2, dtype=torch.float64), TypeError),
        ([1.0, 1.0], TypeError),
    ],
)
def test_an_update_of_another_form_is_refused_by_the_client(
    update: Any, error: type[Exception]
) -> None:
    client = fastagg.MIFAClient(2)
    with pytest.raises(error, match=r"^update: expected "):
        client.difference_(update)
    assert client.pending is None
    with pytest.raises(TypeError, match=r"^num_params: expected an int"):
        fastagg.MIFAClient("2")  # type: ignore[arg-type]
