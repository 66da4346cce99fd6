# SPDX-License-Identifier: Apache-2.0
"""The buffered schedule: hand-worked cases, and properties of random ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastagg_sim.schedules import Plan, Work
from tests.sim.schedules.made_latency import plans, reloaded, schedule, works


def test_three_clients_and_steps_of_two() -> None:
    """Latencies 2, 3 and 7.

    time  event
    0     0, 1 and 2 start from model 0
    2     0 answers; it has started from model 0, and waits
    3     1 answers: step 0 takes 0 and 1. Both start from model 1
    5     0 answers (model 1), and waits
    6     1 answers: step 1 takes 0 and 1. Both start from model 2
    7     2 answers (model 0); it starts from model 2
    8     0 answers: step 2 takes 0 (model 2) and 2 (model 0). 0 starts from model 3
    9     1 answers (model 2); it starts from model 3
    10    0 answers: step 3 takes 0 (model 3) and 1 (model 2)
    """
    found = plans(schedule("buffered", [2.0, 3.0, 7.0], size=2), [[0, 1, 2]] * 4)
    assert [plan.time for plan in found] == [3.0, 6.0, 8.0, 10.0]
    assert [plan.starts for plan in found] == [(0, 1, 2), (0, 1), (0, 1, 2), (0, 1)]
    assert [plan.answers for plan in found] == [
        works((0, 0), (1, 0)),
        works((0, 1), (1, 1)),
        works((0, 2), (2, 0)),
        works((0, 3), (1, 2)),
    ]
    assert [plan.ages(t) for t, plan in enumerate(found)] == [[0, 0], [0, 0], [0, 2], [0, 1]]
    assert [plan.late for plan in found] == [1, 1, 2, 2]


def test_a_client_twice_in_a_step_only_if_the_rule_takes_it() -> None:
    """Client 0 needs 5 seconds for model 0 and 1 second for others; steps are of three answers.

    At 4, clients 1 to 3 have answered: step 0. At 5, client 0 answers (model 0) and can start
    again, from model 1: it answers at 6. Clients 1 to 3 answer at 8."""
    each = [1.0, 4.0, 4.0, 4.0]
    active = [[0, 1, 2, 3]] * 2
    made = schedule("buffered", each, size=3, exceptions={(0, 0): 5.0})
    found = plans(made, active)
    assert found[1].answers == works((0, 0), (0, 1), (1, 1))
    assert found[1].starts == (0, 1, 2, 3) and found[1].ages(1) == [1, 0, 0]
    made = schedule("buffered", each, size=3, exceptions={(0, 0): 5.0})
    made.repeats = False
    found = plans(made, active)
    assert found[1].answers == works((0, 0), (1, 1), (2, 1))
    assert found[1].starts == (1, 2, 3)


def test_with_steps_of_one_answer_ages_count_the_others_steps() -> None:
    """FedAsync: a client that takes n times as long as another has the age n or n - 1."""
    found = plans(schedule("buffered", [1.0, 3.5], size=1), [[0, 1]] * 9)
    assert [plan.time for plan in found] == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 7.0]
    slow = [plan.ages(t) for t, plan in enumerate(found) if plan.answers[0].client == 1]
    # At 7, both answer: client 0 first.
    assert slow == [[3], [4]] and found[7].answers == works((0, 7))


def test_absent_clients_do_not_start_and_their_work_is_completed() -> None:
    made = schedule("buffered", [1.0, 2.0, 4.0], size=1)
    found = plans(made, [[0, 2], [1], [], [], [0]])
    assert [plan.starts for plan in found] == [(0, 2), (1,), (), (), (0,)]
    assert [plan.time for plan in found] == [1.0, 3.0, 4.0, 4.0, 5.0]
    assert [plan.answers for plan in found[2:4]] == [works((2, 0)), ()]


def test_a_step_takes_what_there_is_if_nobody_is_at_work() -> None:
    made = schedule("buffered", [1.0, 2.0], size=5)
    (plan,) = plans(made, [[0, 1]])
    assert (plan.answers, plan.time) == (works((0, 0), (1, 0)), 2.0)


def test_concurrency_limits_the_clients_at_work() -> None:
    made = schedule("buffered", [1.0] * 6, size=2, concurrency=3)
    found = plans(made, [range(6)] * 50)
    # In round 0 three start at time 0, and one at time 1 when the first of them has answered. The
    # second answer completes the step. Round 1: one start for it, and one after the third answer.
    assert [len(plan.starts) for plan in found[:2]] == [4, 2]
    assert all(len(plan.answers) == 2 for plan in found)
    assert {client for plan in found for client in plan.starts} == set(range(6))


def test_which_client_starts_is_drawn_uniformly() -> None:
    """One of ten clients at work: each has a tenth of the starts, within five standard errors."""
    made = schedule("buffered", [1.0] * 10, size=1, concurrency=1)
    rounds, p = 3000, 0.1
    found = plans(made, [range(10)] * rounds)
    for client in range(10):
        count = sum(client in plan.starts for plan in found)
        assert abs(count - rounds * p) < 5 * (rounds * p * (1 - p)) ** 0.5


@given(st.data())
def test_properties(data: st.DataObject) -> None:
    """Nobody is lost or counted twice, times do not decrease, ages fit, and a restart between any
    two rounds changes nothing."""
    num_clients = data.draw(st.integers(1, 8))
    size = data.draw(st.integers(1, 6))
    options: dict[str, Any] = {"size": size}
    if data.draw(st.booleans()):
        options["concurrency"] = data.draw(st.integers(1, 8))
    # Few values: ties are common.
    each = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=8, max_size=8))
    each = each[:num_clients]
    repeats = data.draw(st.booleans())
    rng = random.Random(data.draw(st.integers(0, 1000)))
    made = schedule("buffered", each, **options)
    made.repeats = repeats
    at_work: set[Work] = set()
    last = 0.0
    for t in range(12):
        active = sorted(rng.sample(range(num_clients), rng.randint(0, num_clients)))
        copy = reloaded(made, schedule("buffered", each, **options), t)
        copy.repeats = repeats
        busy = {work.client for work in at_work}
        plan: Plan = made.next(t, active)
        assert copy.next(t, active) == plan
        assert set(plan.starts) <= set(active) and len(set(plan.starts)) == len(plan.starts)
        at_work |= {Work(client, t) for client in plan.starts}
        assert set(plan.answers) <= at_work and len(set(plan.answers)) == len(plan.answers)
        at_work -= set(plan.answers)
        assert made.waiting() == sorted(at_work) and plan.late == len(at_work)
        assert len({work.client for work in at_work}) == len(at_work)
        assert len(at_work) <= options.get("concurrency", num_clients)
        assert len(plan.answers) == size or not at_work
        assert all(0 <= age <= t for age in plan.ages(t))
        if not repeats:
            assert len({work.client for work in plan.answers}) == len(plan.answers)
        if "concurrency" not in options:
            assert {*active} - busy <= set(plan.starts)
        assert plan.time >= last
        last = plan.time


STATE = {"time": 3.0, "arrivals": [[5.0, 1, 2], [4.0, 0, 0]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": -1.0}, "schedule: time: expected a number between 0 and"),
        ({"time": "now"}, "schedule: time: expected a number .* got 'now'"),
        ({"time": float("nan")}, "schedule: time: expected a number .* got nan"),
        ({"more": 1}, r"schedule: expected the entries \['arrivals', 'time'\], got"),
        ({"arrivals": {}}, "schedule: arrivals: expected a list, got {}"),
        ({"arrivals": [[5.0, 1]]}, r"arrivals: expected \[time, client, round\], got \[5.0, 1\]"),
        ({"arrivals": [[2.0, 1, 0]]}, "arrivals: expected a number between 3 and .* got 2.0"),
        ({"arrivals": [[5.0, 3, 0]]}, "a client below 3 and a round below 3, got"),
        ({"arrivals": [[5.0, 0, 3]]}, "a client below 3 and a round below 3, got"),
        ({"arrivals": [[5.0, 0, True]]}, "a client below 3 and a round below 3, got"),
        ({"arrivals": [[5.0, 0, 1], [6.0, 0, 2]]}, "arrivals: expected each client once"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    changes: dict[str, Any], message: str
) -> None:
    made = schedule("buffered", [1.0, 2.0, 3.0], size=2)
    made.load(STATE, 3)
    before = made.state()
    assert before == {"time": 3.0, "arrivals": [[4.0, 0, 0], [5.0, 1, 2]]}
    with pytest.raises(ValueError, match=message):
        made.load({**STATE, **changes}, 3)
    assert made.state() == before
    with pytest.raises(ValueError, match="expected the entries"):
        made.load(None, 3)
    kept = schedule("deadline", [1.0, 2.0, 3.0], seconds=1.0)
    with pytest.raises(ValueError, match="expected no arrivals, since late answers are lost"):
        kept.load(STATE, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size: expected a whole number >= 1, got 0"),
        ({"size": 1, "concurrency": 0}, "concurrency: expected a whole number >= 1, got 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule("buffered", [1.0], **options)
