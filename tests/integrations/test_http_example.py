# SPDX-License-Identifier: Apache-2.0
"""examples/http: a real server and real clients on loopback, absent, killed and restarted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from torch import Tensor

import fastagg
from fastagg import tensor_file
from fastagg.updates.statistics import mean_
from tests.scripts import HANG

pytest.importorskip("aiohttp", reason="aiohttp is not installed (it is in the extra dev)")
pytest.importorskip("safetensors", reason="safetensors is not installed")

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "http"
SECONDS = 12  # that a round lasts at most


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a script of the example; its output is appended to a file named like the process."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *command: str) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        with (tmp_path / f"{name}.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=EXAMPLE,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()


def wait_for(what: Callable[[], bool], seconds: float = HANG) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def start_clients(
    start: Callable[..., subprocess.Popen[bytes]],
    folder: Path,
    port: int,
    options: Mapping[int, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start four clients, some with an option, and wait until they have imported torch."""
    found = []
    for k in range(4):
        own = [f"--client={k}", *([options[k]] if options and k in options else [])]
        found.append(start(f"client{k}", "client.py", f"http://127.0.0.1:{port}", *own))
    for k in range(4):
        wait_for(lambda k=k: "asks" in (folder / f"client{k}.txt").read_text())
    return found


def free_port() -> int:
    """Return a port that the system has chosen; the server gets it again after a restart."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def by_hand(rounds: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Return the model after rounds with these active clients, without a server."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import training  # type: ignore[import-not-found]

    net = training.model()
    layout = fastagg.FlatLayout.from_module(net, roles="auto")
    state = net.state_dict()
    params, statistics = layout.flatten(state).clone(), layout.flatten_statistics(state)
    agg = fastagg.make("fdms", num_clients=4, num_params=layout.num_params, nonfinite="drop")
    for number, active in enumerate(rounds, start=1):
        state = layout.state_dict(params, state) | layout.unflatten_statistics(statistics)
        state = {name: value.clone() for name, value in state.items()}
        trained = [training.train(state, client, number) for client in active]
        agg.step(params, [layout.flatten(one) - params for one in trained], active)
        rows = [layout.flatten_statistics(one) for one in trained]
        mean_(statistics, rows, active, None)
    return layout.state_dict(params, state) | layout.unflatten_statistics(statistics)


def test_the_shortest_server(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    port = free_port()
    clients = start_clients(start, tmp_path, port)
    server = start("server", "minimal.py", str(port))
    assert server.wait(HANG) == 0, (tmp_path / "server.txt").read_text()
    assert all(client.wait(HANG) == 0 for client in clients)
    output = (tmp_path / "server.txt").read_text().splitlines()
    assert len(output) == 20
    assert sum("4 active: 0, 1, 2, 3" in line for line in output) >= 10, output


def test_the_shortest_server_says_that_it_needs_a_port(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    assert start("alone", "minimal.py").wait(HANG) == 2
    assert "required: port" in (tmp_path / "alone.txt").read_text().splitlines()[-1]


def test_absent_and_killed_clients_and_a_killed_server(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model at the end has the bits of rounds by hand with the same active clients.

    Client 2 is absent in rounds 2 and 4. In round 4, which therefore lasts until the deadline,
    client 3 and the server are killed; the server starts again, with the same port.
    """
    folder = tmp_path / "run"  # the server makes it
    port, log = free_port(), folder / "rounds.jsonl"
    clients = start_clients(start, tmp_path, port, {2: "--absent=2,4"})
    serve = ["server.py", "--rounds=5", f"--seconds={SECONDS}", f"--port={port}"]
    server = start("server", *serve, f"--folder={folder}")
    wait_for(lambda: len(lines(log)) == 3 or server.poll() is not None)
    clients[3].send_signal(signal.SIGKILL)
    server.send_signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert len(lines(log)) == 3

    server = start("server", *serve, f"--folder={folder}")
    assert server.wait(HANG) == 0, (tmp_path / "server.txt").read_text()
    for k in range(3):
        assert clients[k].wait(HANG) == 0, (tmp_path / f"client{k}.txt").read_text()

    assert [line["round"] for line in lines(log)] == [1, 2, 3, 4, 5]
    active = [line["active"] for line in lines(log)]
    there = [{0, 1, 2, 3}, {0, 1, 3}, {0, 1, 2, 3}, {0, 1}, {0, 1, 2}]
    # On a machine that stalls for SECONDS, more clients are late.
    assert all(set(some) <= most for some, most in zip(active, there, strict=True))
    assert sum(map(len, active)) >= 10
    found = tensor_file.load(folder / "model.safetensors", limit=1 << 20)
    expected = by_hand(active, monkeypatch)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["0.weight"], by_hand([], monkeypatch)["0.weight"])


def test_a_late_answer_after_a_restart(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A client trains from round 1 on, the server gets SIGKILL, and the answer counts with age 1.

    Client 1 answers in time in all rounds, so that round 1 has a step. This test is both clients.
    """
    address, log = f"http://127.0.0.1:{free_port()}", tmp_path / "rounds.jsonl"
    serve = ["server.py", "--clients=2", "--rounds=2", "--rule=fedavg", "--late=2"]
    serve += [f"--port={address.rpartition(':')[2]}", f"--folder={tmp_path}"]
    serve += [f"--seconds={SECONDS}"]

    def task(client: int) -> tuple[str, bytes]:
        with urlopen(f"{address}/{client}", timeout=HANG) as reply:
            return reply.headers["Key"] or "", reply.read()

    def is_open(number: int) -> bool:
        try:
            return task(0)[0].startswith(f"{number}-")
        except OSError:  # it has not started yet
            return False

    def answer(client: int, key: str, model: bytes) -> None:
        with urlopen(f"{address}/{client}/{key}", model, timeout=HANG) as reply:
            assert reply.status == 200

    server = start("server", *serve)
    wait_for(lambda: is_open(1) or server.poll() is not None)
    key, model = task(0)
    answer(1, key, model)
    wait_for(lambda: len(lines(log)) == 1)
    server.send_signal(signal.SIGKILL)
    server.wait()
    server = start("server", *serve)
    wait_for(lambda: is_open(2) or server.poll() is not None)
    answer(0, key, model)
    answer(1, *task(1))
    assert server.wait(HANG) == 0, (tmp_path / "server.txt").read_text()
    first, second = lines(log)
    assert first["active"] == [1] and not first["late"]
    assert second["active"] == [0, 1] and second["late"] == {"0": 1}
