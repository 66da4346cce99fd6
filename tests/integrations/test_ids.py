# SPDX-License-Identifier: Apache-2.0
"""Stable ids for the clients of a framework, whatever their names are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastagg.integrations._ids import ClientIds


def settle(
    ids: ClientIds, reported: dict[str, object], connected: list[str] | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    ids.open_round(ids.to_json()["round"] + 1, connected)
    found = ids.resolve(reported)
    ids.remember(found, reported)
    return found.ids, found.refused


def test_reported_partitions_are_the_ids() -> None:
    ids = ClientIds(4)
    assert settle(ids, {"901": 3, "77": 0}) == ({"901": 3, "77": 0}, {})
    # A later run has other nodes and the same partitions.
    assert settle(ids, {"5": 3, "6": 1}, ["5", "6"]) == ({"5": 3, "6": 1}, {})
    assert ids.known == {"5": 3, "77": 0, "6": 1}


def test_nodes_without_a_report_get_the_lowest_free_ids_in_order_of_their_numbers() -> None:
    ids = ClientIds(4)
    assert settle(ids, {"100": None, "20": None})[0] == {"20": 0, "100": 1}
    assert settle(ids, {"7": None, "100": None})[0] == {"7": 2, "100": 1}
    assert ids.given == {"20", "100", "7"}


def test_names_of_more_than_20_digits_are_no_numbers() -> None:
    """Python refuses to read numbers of more than 4300 digits."""
    names = ["9" * 5000, "9" * 21, "9" * 20, "0" * 20 + "1", "٣", "7", "07"]
    expected = ["07", "7", "9" * 20, "0" * 20 + "1", "9" * 21, "9" * 5000, "٣"]
    for order in (names, names[::-1]):
        found, refused = settle(ClientIds(7), dict.fromkeys(order))
        assert sorted(found, key=found.__getitem__) == expected and refused == {}
    ids = ClientIds(7)
    assert len(settle(ids, dict.fromkeys(names, 3))[1]) == 7  # their names are in the reasons


def test_a_report_of_any_length_is_refused() -> None:
    for partition in (10**5000, [10**5000], "x" * 10**6):
        found = ClientIds(4).resolve({"a": partition, "b": 1})
        assert found.ids == {"b": 1}
        assert list(found.refused) == ["a"] and len(found.refused["a"]) < 300


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
    found = ClientIds(4).resolve({"a": partition, "b": 1})
    assert found.ids == {"b": 1}
    assert list(found.refused) == ["a"]


def test_an_id_claimed_twice_is_not_assigned() -> None:
    ids = ClientIds(4)
    found, refused = settle(ids, {"2": 0, "1": 0, "3": 2})
    assert found == {"3": 2}
    assert refused == dict.fromkeys(["1", "2"], "id: 1, 2 claim to be client 0")
    assert ids.known == {"3": 2}


def test_an_owner_keeps_its_id() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": 0})
    found, refused = settle(ids, {"2": 0, "1": 0, "3": 2})
    assert found == {"1": 0, "3": 2}
    assert refused == {"2": "partition id: 2 claims to be client 0, who is 1"}
    # Also an owner that reports nothing, or is connected and was not asked.
    assert settle(ids, {"2": 0, "1": None})[0] == {"1": 0}
    assert settle(ids, {"2": 0}, ["1", "2", "3"]) == ({}, refused)
    assert settle(ids, {"2": 0}) == ({}, refused)  # nobody says who is connected


def test_a_node_has_one_id() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": 1, "3": 3})
    found, refused = settle(ids, {"1": 3}, ["1"])  # the owner has left
    assert found == {}
    assert refused == {"1": "partition id: 1 is client 1, and claims to be client 3"}
    assert settle(ids, {"3": 3, "1": 1}, ["1", "3"])[0] == {"3": 3, "1": 1}


def test_an_id_goes_to_another_node_when_its_owner_has_left() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": 0, "2": 1}, ["1", "2"])
    ids.open_round(2, ["2", "9"])
    found = ids.resolve({"9": 0, "2": 1})
    assert found.ids == {"9": 0, "2": 1}
    assert found.reassigned == {0: ("1", "9")}
    assert found.fresh == set()  # the same partition: what is remembered of it stays
    ids.remember(found, {"9": 0, "2": 1})
    assert ids.known == {"9": 0, "2": 1}
    assert settle(ids, {"1": 0}, ["1", "2", "9"])[0] == {}  # it has come back too late


@pytest.mark.parametrize(("release_after", "first"), [(0, 2), (1, 3), (3, 5), (None, 99)])
def test_how_long_an_owner_may_be_away(release_after: int | None, first: int) -> None:
    ids = ClientIds(4, release_after=release_after)
    settle(ids, {"1": 0}, ["1"])
    for number in range(2, 8):
        ids.open_round(number, ["2"])
        found = ids.resolve({"2": 0})
        assert ("2" in found.ids) == (number >= first), number
        assert found.refused == ({} if number >= first else found.refused)


def test_a_round_that_is_begun_again_after_a_restart() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": 0, "2": 1}, ["1", "2"])
    ids.open_round(2, ["1", "2"])  # the server is stopped in this round
    again = ClientIds(4)
    again.load_json(ids.to_json())
    again.open_round(2, ["8", "9"])
    assert again.resolve({"8": 0, "9": 1}).ids == {"8": 0, "9": 1}


def test_an_assigned_id_is_not_reassigned() -> None:
    ids = ClientIds(4)
    settle(ids, {"1": None})
    found, refused = settle(ids, {"2": 0, "3": 1})
    assert found == {"3": 1}
    assert "2 claims to be client 0, who is 1, which reported none" in refused["2"]
    assert settle(ids, {"1": 2})[0] == {"1": 2}  # the node itself may report later
    assert settle(ids, {"2": 0})[0] == {"2": 0}


def test_nodes_that_come_back_under_other_names_do_not_use_up_ids() -> None:
    ids = ClientIds(3)
    settle(ids, {"1": None, "2": None, "3": None}, ["1", "2", "3"])
    for number in range(10, 30):
        present = ["2", "3", str(number)]
        ids.open_round(number, present)
        found = ids.resolve(dict.fromkeys(present))
        assert found.ids == {"2": 1, "3": 2, str(number): 0}
        assert found.fresh == {0}  # nobody knows whether it is the same client
        ids.remember(found, dict.fromkeys(present))
    assert ids.known == {"2": 1, "3": 2, "29": 0}


def test_the_id_of_who_left_first_is_released_first() -> None:
    ids = ClientIds(3)
    settle(ids, {"1": None, "2": None, "3": None}, ["1", "2", "3"])
    settle(ids, {"1": None}, ["1", "3"])
    ids.open_round(3, ["1", "8", "9"])
    found = ids.resolve({"1": None, "8": None, "9": None})
    assert found.ids == {"1": 0, "8": 1, "9": 2}
    assert found.reassigned == {1: ("2", "8"), 2: ("3", "9")}


def test_an_id_that_was_used_is_fresh_for_another_node() -> None:
    ids = ClientIds(3)
    settle(ids, {"1": None})
    settle(ids, {"1": 2})  # it has reported its partition, so 0 is free again
    ids.open_round(3, None)
    found = ids.resolve({"5": None, "6": None})
    assert found.ids == {"5": 1, "6": 0}  # an id that nobody had comes first
    assert found.fresh == {0}
    found = ids.resolve({"1": 2, "5": 0, "6": 1})  # also if the other one reports it
    assert found.ids == {"1": 2, "5": 0, "6": 1} and found.fresh == {0}


def test_ids_by_node_ignore_reports() -> None:
    ids = ClientIds(3, source="node")
    assert settle(ids, {"7": 2, "5": 2, "6": "x"})[0] == {"5": 0, "6": 1, "7": 2}
    assert settle(ids, {"7": 0})[0] == {"7": 2}


def test_ids_of_a_function_are_trusted() -> None:
    ids = ClientIds(3, source="trusted")
    settle(ids, {"7": 2, "5": 1})
    assert settle(ids, {"8": 2, "5": 0}) == ({"8": 2, "5": 0}, {})
    assert settle(ids, {"8": 1, "5": 1})[1].keys() == {"5", "8"}  # but one node is one client


def test_rules_without_memory_need_no_ids() -> None:
    ids = ClientIds(3, lasting=False)
    for number in range(20):
        present = [str(3 * number + k) for k in range(3)]
        ids.open_round(number, [str(k) for k in range(100)])  # nobody leaves
        found = ids.resolve(dict.fromkeys(present))
        assert sorted(found.ids.values()) == [0, 1, 2]
        assert found.refused == found.reassigned == {}
        ids.remember(found, dict.fromkeys(present))
    ids.open_round(20, None)
    assert "all 3 are taken" in ids.resolve(dict.fromkeys("abcd")).refused["d"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"source": "key"}, "source: expected one of"),
        ({"release_after": -1}, "release_after: expected at least 0"),
        ({"release_after": 1.5}, "release_after: expected an int"),
    ],
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        ClientIds(3, **options)


names = st.sampled_from([*map(str, range(6)), "x", "y"])
reports = st.dictionaries(names, st.none() | st.integers(-1, 4), max_size=8)


@given(
    st.lists(st.tuples(reports, st.none() | st.sets(names)), max_size=4),
    st.randoms(),
    st.sampled_from(["partition", "node", "trusted"]),
    st.booleans(),
)
def test_the_order_of_answers_does_not_matter(
    rounds: list[tuple[dict[str, object], set[str] | None]], rng: Any, source: str, lasting: bool
) -> None:
    options: dict[str, Any] = {"source": source, "lasting": lasting}
    one, other = ClientIds(4, **options), ClientIds(4, **options)
    for reported, present in rounds:
        connected = None if present is None else sorted(present)
        shuffled = list(reported.items())
        rng.shuffle(shuffled)
        found, refused = settle(one, reported, connected)
        assert settle(other, dict(shuffled), connected) == (found, refused)
        assert one.to_json() == other.to_json()
        assert set(found) | set(refused) == set(reported)
        assert not set(found) & set(refused)
        assert len(set(found.values())) == len(found)
        assert all(0 <= client < 4 for client in found.values())
        assert len(set(one.known.values())) == len(one.known)
        assert one.seen.keys() == one.known.keys() >= one.given
        content = other.to_json()
        other = ClientIds(4, **options)  # and a restart changes nothing
        other.load_json(content)


def test_an_older_map_can_be_loaded() -> None:
    ids = ClientIds(4)
    ids.load_json({"known": {"a": 1, "b": 3}, "given": ["b"]})
    assert ids.seen == {"a": 0, "b": 0}
    assert ids.used == {1, 3}
    assert settle(ids, {"c": 1}, ["c"])[0] == {"c": 1}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"known": [], "given": []},
        {"known": {"a": 4}, "given": []},
        {"known": {"a": "0"}, "given": []},
        {"known": {"a": 0}, "given": ["b"]},
        {"known": {"a": 0}, "given": [["a"]]},
        {"known": {"a": 0, "b": 0}, "given": []},
        {"known": {"a": 0}, "given": [], "used": [7]},
        {"known": {"a": 0}, "given": [], "seen": {"b": 1}},
        {"known": {"a": 0}, "given": [], "seen": {"a": -1}},
        {"known": {"a": 0}, "given": [], "round": "1"},
        {"known": {"a": 0}, "given": [], "used": None},
    ],
)
def test_damaged_maps(content: dict[str, object]) -> None:
    ids = ClientIds(4)
    settle(ids, {"x": 2})
    before = ids.to_json()
    with pytest.raises(ValueError, match="ids"):
        ids.load_json(content)
    assert ids.to_json() == before
