# SPDX-License-Identifier: Apache-2.0
"""Schedules whose rounds take answers of their own model only: hand-worked cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.schedules.made_latency import plans, reloaded, schedule, works

EACH = [3.0, 1.0, 7.0, 2.0]


class TestSynchronous:
    def test_a_round_takes_as_long_as_its_slowest_client(self) -> None:
        made = schedule("synchronous", EACH, exceptions={(1, 2): 10.0})
        found = plans(made, [[0, 1, 3], [0, 1, 2, 3], [1, 2], []])
        assert [plan.time for plan in found] == [3.0, 10.0, 20.0, 20.0]
        assert [plan.late for plan in found] == [0, 0, 0, 0]
        assert found[2].starts == (1, 2)
        assert found[2].answers == works((1, 2), (2, 2))
        assert found[2].ages(2) == [0, 0]
        assert found[3].starts == found[3].answers == ()
        assert made.waiting() == []


class TestDeadline:
    def test_late_work_is_lost(self) -> None:
        made = schedule("deadline", EACH, seconds=3.0)
        found = plans(made, [[0, 1, 2], [1, 3], [2], []])
        # At the deadline is in time; a round ends earlier if all have answered.
        assert [plan.time for plan in found] == [3.0, 5.0, 8.0, 11.0]
        assert [plan.late for plan in found] == [1, 0, 1, 0]
        assert [plan.starts for plan in found] == [(0, 1), (1, 3), (), ()]
        assert found[0].answers == works((0, 0), (1, 0))
        assert made.waiting() == [] and not made.late_answers

    def test_late_work_is_kept(self) -> None:
        made = schedule("deadline", EACH, seconds=3.0, late="kept")
        every = [[0, 1, 2, 3]] * 4
        found = plans(made, every)
        # Client 2 works from 0 to 7, through rounds 0 and 1, and answers in round 2 (6 to 9). It
        # starts again in round 3 (9 to 12) and answers at 16.
        assert [plan.time for plan in found] == [3.0, 6.0, 9.0, 12.0]
        assert [plan.starts for plan in found] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 3), (0, 1, 2, 3)]
        assert found[2].answers == works((0, 2), (1, 2), (2, 0), (3, 2))
        assert found[2].ages(2) == [0, 0, 2, 0]
        assert [plan.late for plan in found] == [1, 1, 0, 1]
        assert made.late_answers and made.waiting() == list(works((2, 3)))

    def test_a_round_in_which_all_are_at_work(self) -> None:
        made = schedule("deadline", [5.0], seconds=2.0, late="kept")
        found = plans(made, [[0], [0], [0], [0]])
        assert [plan.time for plan in found] == [2.0, 4.0, 6.0, 8.0]
        assert [plan.answers for plan in found] == [(), (), works((0, 0)), ()]
        assert [plan.late for plan in found] == [1, 1, 0, 1]

    def test_an_absent_client_goes_on_with_its_work(self) -> None:
        made = schedule("deadline", [1.0, 3.0], seconds=2.0, late="kept")
        found = plans(made, [[0, 1], [0]])
        assert found[1].time == 3.0  # when client 0 has answered; so has client 1
        assert found[1].answers == works((0, 1), (1, 0))
        assert [plan.late for plan in found] == [1, 0]

    def test_those_late_are_all_at_work(self) -> None:
        # Rounds end at 2.5, 4.5 (clients 1 and 3 have answered), 7 and 9.5. Client 0 works from 0
        # to 3 and from 4.5 to 7.5, client 2 from 0 to 7 and from 7 to 14.
        made = schedule("deadline", EACH, seconds=2.5, late="kept")
        for t, late in enumerate([[0, 2], [2], [0], [2]]):
            plan = made.next(t, [0, 1, 2, 3])
            assert [work.client for work in made.waiting()] == late
            assert plan.late == len(late)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seconds": 0}, "seconds: expected a number between 1e-09 and 1e[+]09, got 0"),
            ({"seconds": 1, "late": "later"}, "late: expected one of lost, kept, got 'later'"),
        ],
    )
    def test_bad_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            schedule("deadline", EACH, **options)
        with pytest.raises(TypeError, match=r"schedule 'deadline'.*'seconds'; options: seconds, l"):
            schedule("deadline", EACH)
        with pytest.raises(TypeError, match=r"argument 'secs'; .*Did you mean 'seconds'[?]"):
            schedule("deadline", EACH, secs=2.0)


class TestOverSelection:
    def test_the_first_answers_count(self) -> None:
        made = schedule("over-selection", EACH, take=2, extra=2)
        (plan,) = plans(made, [[0, 1, 2, 3]])
        assert (plan.starts, plan.time, plan.late) == ((1, 3), 2.0, 2)
        assert plan.answers == works((1, 0), (3, 0))

    def test_ties_go_to_the_lower_id(self) -> None:
        made = schedule("over-selection", [2.0] * 4, take=2, extra=2)
        assert plans(made, [[0, 1, 2, 3]])[0].starts == (0, 1)

    def test_few_active_clients(self) -> None:
        made = schedule("over-selection", EACH, take=3, extra=1)
        found = plans(made, [[2], [], [0, 2]])
        assert [plan.time for plan in found] == [7.0, 7.0, 14.0]
        assert [plan.late for plan in found] == [0, 0, 0]

    def test_the_clients_that_are_asked_are_a_uniform_sample(self) -> None:
        """Client 0 is the fastest: it answers in the rounds in which it is asked, 5 of 20 clients.
        The share is within five standard errors."""
        rounds, p = 2000, 5 / 20
        made = schedule("over-selection", [1.0] + [2.0] * 19, take=2, extra=3)
        found = plans(made, [range(20)] * rounds)
        count = sum(0 in plan.starts for plan in found)
        assert abs(count - rounds * p) < 5 * (rounds * p * (1 - p)) ** 0.5
        assert {(len(plan.starts), plan.late) for plan in found} == {(2, 3)}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"take": 0, "extra": 1}, "take: expected a whole number >= 1, got 0"),
            ({"take": 1, "extra": -1}, "extra: expected a whole number >= 0, got -1"),
            ({"take": 1.5, "extra": 0}, "take: expected a whole number >= 1, got 1.5"),
        ],
    )
    def test_bad_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            schedule("over-selection", EACH, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synchronous", {}),
        ("deadline", {"seconds": 3.0}),
        ("over-selection", {"take": 2, "extra": 1}),
    ],
)
def test_the_time_goes_on_after_a_restart(name: str, options: dict[str, Any]) -> None:
    made = schedule(name, EACH, **options)
    plans(made, [[0, 1], [1, 2]])
    again = reloaded(made, schedule(name, EACH, **options), 2)
    assert again.next(2, [0, 3]) == made.next(2, [0, 3])


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'asynchronous'; there are: buffered, d"):
        schedule("asynchronous", EACH)
