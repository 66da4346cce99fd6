# SPDX-License-Identifier: Apache-2.0
"""Aggregators after a fork, in threads with small stacks, and when they are collected."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fastagg
from tests.rules.conftest import CONFIGURATIONS
from tests.scripts import HANG

START = """
import copy, os, signal, threading, time
import torch
import fastagg
from fastagg.ops._dispatch import TABLE
from fastagg.ops._examples import ExampleData

torch.set_num_threads(4)
d = 200_000
updates, clients = torch.randn(3, d), [0, 2, 1]


def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # ends the process if it hangs
        try:
            work()
        except BaseException as error:
            os.write(1, f"{type(error).__name__}: {error}\\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] in (0, 256)
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_forked_process_is_told_what_to_do_and_then_works() -> None:
    said = run(
        """
        aggs = [fastagg.make(n, num_clients=4, num_params=d) for n in ("fdms", "mifa", "krum")]
        plain = [torch.zeros(d) for _ in aggs]
        for agg, params in zip(aggs, plain):
            agg.step(params, updates, clients)
        expected = [params.clone() for params in plain]
        for agg, params in zip(aggs, expected):
            in_child(lambda: agg.step(params, updates, clients))
            in_child(agg.state_dict)

        def work():
            torch.set_num_threads(1)
            for agg, params in zip(aggs, plain):
                agg.step(params, updates, clients)
            sums.copy_(torch.stack([params.double().sum() for params in plain]))
            new = fastagg.make("fedavg", num_clients=4, num_params=d)
            new.step(torch.zeros(d), updates, clients)

        sums = torch.zeros(3, dtype=torch.float64).share_memory_()
        in_child(work)
        torch.set_num_threads(1)
        for agg, params in zip(aggs, expected):
            agg.step(params, updates, clients)
        assert torch.equal(sums, torch.stack([p.double().sum() for p in expected]))
        """
    )
    lines = said.splitlines()
    assert len(lines) == 6
    for call, line in zip(["step", "state_dict"] * 3, lines, strict=True):
        assert line.startswith(f"RuntimeError: {call}: this process was forked after an aggregator")
        assert "torch.set_num_threads(1)" in line


@pytest.mark.slow
def test_a_fork_during_a_step_of_another_thread_is_noticed() -> None:
    said = run(
        """
        torch.set_num_threads(1)
        entered, leave = threading.Event(), threading.Event()
        agg, params = fastagg.make("mifa", num_clients=4, num_params=d), torch.zeros(d)
        real = agg._commit

        def slow(*arguments):
            entered.set()
            leave.wait()
            real(*arguments)

        agg._commit = slow
        thread = threading.Thread(target=agg.step, args=(params, updates, clients))
        thread.start()
        entered.wait()
        in_child(agg.state_dict)
        leave.set()
        thread.join()
        assert agg.committed == 1
        in_child(agg.state_dict)
        """
    )
    assert said.count("\n") == 1
    assert "forked while another thread was in a call of this aggregator" in said


@pytest.mark.slow
def test_a_forked_process_cannot_use_memory_rows_in_a_file(tmp_path: Path) -> None:
    said = run(
        f"""
        torch.set_num_threads(1)
        folder, params = {str(tmp_path)!r}, torch.zeros(d)
        rules = [
            ("mifa", {{}}),
            ("mifa", {{"memory_dtype": "int8"}}),
            ("mimic", {{}}),
            ("krum", {{"reuse": True}}),
        ]

        def make(name, options):
            return fastagg.make(name, num_clients=4, num_params=d, memory_folder=folder, **options)

        def steps(agg, rounds=3):
            for value in range(rounds):
                agg.step(torch.zeros(d), torch.full((3, d), 77.0 + value), clients)

        def work():
            calls = [
                lambda: steps(agg),
                lambda: agg.forget([0]),
                lambda: agg.grow(5),
                lambda: agg.load_state_dict(state),
                lambda: agg.state_dict(),
                lambda: agg.save(folder + "/saved"),
            ]
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    assert "this process was forked from process" in str(error)
                else:
                    raise AssertionError("not refused")
            steps(copy.deepcopy(agg))
            steps(make(name, options))

        for name, options in rules:
            agg = make(name, options)
            for _ in range(2):
                agg.step(params, updates, clients)
            state, copied = agg.state_dict(), copy.deepcopy(agg)
            in_child(work)
            assert all(torch.equal(value, state[key]) for key, value in agg.state_dict().items())
            for some in (agg, copied):
                steps(some)
                some.grow(5)
        """
    )
    assert said == ""


@pytest.mark.slow
def test_all_ops_and_a_step_work_with_a_stack_of_64_kib() -> None:
    run(
        """
        x = ExampleData.random(40, 20, 40_000)
        done = []

        def work():
            for op in TABLE.values():
                op.example(op.wrapper, x)
            for name in ("fedavg", "fdms", "mimic", "mifa", "krum"):
                agg = fastagg.make(name, num_clients=4, num_params=d)
                agg.step(torch.zeros(d), updates, clients)
            done.append(True)

        for threads in (1, 3):
            torch.set_num_threads(threads)
            threading.stack_size(64 << 10)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert len(done) == 2
        """
    )


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_no_python_code_runs_when_an_aggregator_is_collected(
    name: str, options: dict[str, Any]
) -> None:
    """If a handler of a signal raised an exception there, Python would ignore it."""
    agg = fastagg.make(name, num_clients=6, num_params=50, **options)
    agg.step(torch.zeros(50), torch.randn(3, 50), [0, 2, 5])
    alive, calls = weakref.ref(agg), list[str]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    del agg
    sys.setprofile(before)
    assert alive() is None
    assert calls == []
