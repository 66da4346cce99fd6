# SPDX-License-Identifier: Apache-2.0
"""Stable ids for the clients of a framework, whatever their names are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastagg.integrations._ids import ClientIds


def settle(ids: ClientIds, reported: dict[str, object]) -> tuple[dict[str, int], dict[str, str]]:
    found, refused = ids.resolve(reported)
    ids.remember(found, reported)
    return found, refused


def test_reported_partitions_are_the_ids() -> None:
    ids = ClientIds(4)
    assert settle(ids, {"901": 3, "77": 0}) == ({"901": 3, "77": 0}, {})
    # A later run has other nodes and the same partitions.
    assert settle(ids, {"5": 3, "6": 1}) == ({"5": 3, "6": 1}, {})
    assert ids.known == {"5": 3, "77": 0, "6": 1}


def test_nodes_without_a_report_get_the_lowest_free_ids_in_order_of_their_numbers() -> None:
    ids = ClientIds(4)
    assert settle(ids, {"100": None, "20": None})[0] == {"20": 0, "100": 1}
    assert settle(ids, {"7": None, "100": None})[0] == {"7": 2, "100": 1}
    assert ids.given == {"20", "100", "7"}


def test_a_node_keeps_the_id_that_it_once_reported() -> None:
    ids = ClientIds(4)
    settle(ids, {"9": 2})
    assert settle(ids, {"9": None, "1": None})[0] == {"9": 2, "1": 0}


def test_no_id_is_left() -> None:
    ids = ClientIds(2)
    settle(ids, {"1": None, "2": 1})
    found, refused = settle(ids, {"3": None, "1": None})
    assert found == {"1": 0}
    assert "all 2 are taken" in refused["3"]


@pytest.mark.parametrize("partition", [-1, 4, 2.0, "1", True, [1], 10**30])
def test_reports_that_are_not_a_partition(partition: object) -> None:
    found, refused = ClientIds(4).resolve({"a": partition, "b": 1})
    assert found == {"b": 1}
    assert list(refused) == ["a"]


def test_an_id_claimed_twice_is_not_assigned() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": 0})
    found, refused = settle(ids, {"2": 0, "1": 0, "3": 2})
    assert found == {"3": 2}
    assert set(refused) == {"1", "2"}
    assert ids.known == {"1": 0, "3": 2}
    # A node that does not report but already has that id counts as a claim, too.
    assert settle(ids, {"2": 0, "1": None})[0] == {}


def test_an_assigned_id_is_not_reassigned() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": None})
    found, refused = settle(ids, {"2": 0, "3": 1})
    assert found == {"3": 1}
    assert "given to 1" in refused["2"]
    assert settle(ids, {"1": 2})[0] == {"1": 2}  # the node itself may report later
    assert settle(ids, {"2": 0})[0] == {"2": 0}


names = st.sampled_from([*map(str, range(6)), "x", "y"])
reports = st.dictionaries(names, st.none() | st.integers(-1, 4), max_size=8)


@given(st.lists(reports, max_size=4), st.randoms())
def test_the_order_of_answers_does_not_matter(rounds: list[dict[str, object]], rng) -> None:
    one, other = ClientIds(4), ClientIds(4)
    for reported in rounds:
        shuffled = list(reported.items())
        rng.shuffle(shuffled)
        found, refused = settle(one, reported)
        assert settle(other, dict(shuffled)) == (found, refused)
        assert one.to_json() == other.to_json()
        assert set(found) | set(refused) == set(reported)
        assert not set(found) & set(refused)
        assert len(set(found.values())) == len(found)
        assert all(0 <= client < 4 for client in found.values())
        assert len(set(one.known.values())) == len(one.known)
        other = ClientIds.from_json(4, other.to_json())  # and a restart changes nothing


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"known": [], "given": []},
        {"known": {"a": 4}, "given": []},
        {"known": {"a": "0"}, "given": []},
        {"known": {"a": 0}, "given": ["b"]},
    ],
)
def test_damaged_maps(content: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="ids"):
        ClientIds.from_json(4, content)
