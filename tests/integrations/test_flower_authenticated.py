# SPDX-License-Identifier: Apache-2.0
"""A Flower federation whose SuperNodes prove who they are: real processes, keys and TLS."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (make test-flower installs it)")

pytestmark = [pytest.mark.flower, pytest.mark.slow]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower"


@pytest.mark.long
def test_an_id_belongs_to_a_key(tmp_path: Path) -> None:
    """Client 2 leaves in round 2, and client 1 claims to be client 2; then client 2 returns.

    The claim is rejected, though nobody else has that id in this round, and what the rule remembers
    of client 2 stands in for it. In round 3 client 2 has the node id and the client id of before.
    """
    done = subprocess.run(
        [
            *(sys.executable, "run.py", "--authenticate", "--rule=mifa", "--rounds=3"),
            *("--clients=3", "--timeout=300", "--deadline=600"),
            "--faults=2.2=leave 2.1=claim",
            f"--folder={tmp_path}",
        ],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the simulation's bits") == 3 and "NOT" not in done.stdout
    text = (tmp_path / "rounds.jsonl").read_text(encoding="utf-8")
    first, second, third = map(json.loads, text.splitlines())
    nodes = {client: node for node, client in first["nodes"].items()}
    assert sorted(nodes) == first["active"] == [0, 1, 2]
    assert second["active"] == [0]
    assert second["absent"] == {nodes[2]: 2}
    (claim,) = second["rejected"].items()
    assert claim[0] == nodes[1] and "is client 1, and claims to be client 2" in claim[1]
    assert third["nodes"] == first["nodes"]  # the keys say so, not the reports
    assert third["rejected"] == {}


@pytest.mark.parametrize("arguments", [["--authenticate", "--api=legacy"]])
def test_keys_need_the_message_api(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "run.py", *arguments], cwd=EXAMPLE, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--authenticate: expected --api message" in done.stderr
