# SPDX-License-Identifier: Apache-2.0
"""fastagg.Server: rounds with deadlines, answers from many threads, tensors and bytes."""

from __future__ import annotations

import inspect
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastagg
from fastagg import Server, tensor_file
from tests.integrations.server_rounds import (
    K,
    expire,
    flat,
    model,
    run_round,
    server,
    trained,
)


@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa", "mimic", "geometric-median"])
@pytest.mark.parametrize("answers", ["weights", "updates"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_same_bits_as_the_rule(rule: str, answers: str, as_bytes: bool) -> None:
    loop = server(rule, answers=answers)
    agg = fastagg.make(rule, num_clients=K, num_params=24, nonfinite="drop")
    params = flat(model())
    for number, clients in enumerate([[0, 1, 2, 3], [2, 0], [3, 1, 2]], start=1):
        task = loop.begin_round()
        assert task.round == number
        before, rows = loop.model(), []
        for client in clients:
            sent = trained(before, number, client)
            rows.append(flat(sent) - params)
            if answers == "updates":
                sent = {name: value - before[name] for name, value in sent.items()}
            if as_bytes:
                data = tensor_file.dump(sent, {"any": "thing"}, limit=1 << 20)
                assert loop.submit_bytes(client, data, task.key) is None
            else:
                assert loop.submit(client, sent, task.key) is None
        report = expire(loop)
        agg.step(params, rows, clients)
        assert report.active == tuple(sorted(clients))
        assert report.absent == {str(k): k for k in range(K) if k not in clients}
        assert torch.equal(flat(loop.model()), params)
    assert loop.rounds == 3 and loop.last_report is report
    assert loop.model()["n"] == 7
    assert not torch.equal(params, flat(model()))


def test_the_task_is_the_model_as_a_safetensors_file() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    loop = server()
    task = loop.begin_round()
    found = safetensors.load(task.model)
    assert found.keys() == model().keys()
    assert all(torch.equal(found[name], value) for name, value in model().items())
    assert loop.model_bytes() == task.model
    assert loop.submit_bytes(0, safetensors.save(found), task.key) is None
    assert loop.task(0) is None  # it has answered
    assert loop.task(1) is loop.task(1) is task


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    loop = Server("fedavg", model(dtype), num_clients=1)
    loop.begin_round()
    assert loop.submit(0, loop.model()) is None
    loop.finish_round()
    after = loop.model()
    assert {name: value.dtype for name, value in after.items()} == {
        "w": dtype,
        "n": torch.int64,
        "b": dtype,
    }
    assert torch.equal(after["w"], model(dtype)["w"].float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_clients_may_send_narrower_floats(dtype: torch.dtype, rule: str, as_bytes: bool) -> None:
    """Values are widened exactly: the round has the bits of one with widened answers."""
    safetensors = pytest.importorskip("safetensors.torch")
    ends = []
    for widen in (False, True):
        loop = Server(rule, model(), num_clients=3)
        loop.begin_round()
        for client in range(2):
            sent = {
                name: (value + client / 7).to(dtype) if value.is_floating_point() else value
                for name, value in loop.model().items()
            }
            if widen:
                sent = {n: v.float() if v.dtype == dtype else v for n, v in sent.items()}
            if as_bytes:
                assert loop.submit_bytes(client, safetensors.save(sent)) is None
            else:
                assert loop.submit(client, sent) is None
        assert expire(loop).active == (0, 1)
        ends.append(loop.model())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    assert not torch.equal(ends[0]["w"], model()["w"])


def test_a_float16_model_takes_no_wider_floats() -> None:
    loop = Server("fedavg", model(torch.float16), num_clients=1)
    loop.begin_round()
    wide = {n: v.float() if v.is_floating_point() else v for n, v in loop.model().items()}
    assert "expected dtype float16, got float32" in str(loop.submit(0, wide))


def test_a_model_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        Server("fedavg", model(torch.bfloat16), num_clients=1)
    with pytest.raises(ValueError, match="'w': expected a dense tensor"):
        Server("fedavg", {"w": torch.ones(2).to_sparse()}, num_clients=1)
    with pytest.raises(TypeError, match="model: expected a module or a state dict, got Tensor"):
        Server("fedavg", torch.ones(3), num_clients=1)  # type: ignore[arg-type]
    for options, error in [({"answers": "gradients"}, "answers"), ({"ids": "key"}, "ids")]:
        with pytest.raises(ValueError, match=f"{error}: expected one of"):
            server(**options)
    with pytest.raises(ValueError, match="round_seconds"):
        server(round_seconds=0.0)


def test_a_round_may_have_as_much_time_as_one_likes() -> None:
    loop = Server("fedavg", model(), num_clients=1, round_seconds=1e300)
    task = loop.begin_round()
    answer = trained(loop.model(), task.round, 0)
    later = threading.Timer(0.1, lambda: loop.submit(0, answer, task.key))
    later.start()
    assert loop.finish_round().active == (0,)
    later.join()


def bad_tensors() -> dict[str, tuple[Any, str]]:
    good = model()
    return {
        "shape": (good | {"w": torch.ones(5, 4)}, "expected shape [4, 5], got [5, 4]"),
        "dtype": (good | {"w": good["w"].double()}, "expected dtype float32, got float64"),
        "float8": (good | {"w": good["w"].to(torch.float8_e5m2)}, "got torch.float8_e5m2"),
        "missing": ({"w": good["w"]}, "missing ['b']"),
        "unknown": (good | {"c": torch.ones(1)}, "unknown ['c']"),
        "meta": (good | {"b": torch.ones(4, device="meta")}, "a dense tensor with values"),
        "no tensor": (good | {"b": [1.0] * 4}, "expected a tensor, got list"),
        "None": (None, "expected a dict from names to tensors, got NoneType"),
        "a list": ([good["w"], good["b"]], "expected a dict from names to tensors, got list"),
    }


def empty(dtype: str, shape: list[int]) -> bytes:
    """Return a safetensors file of an answer with an empty array."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
    text = json.dumps({"w": entry, "b": entry | {"shape": [0]}}).encode()
    return len(text).to_bytes(8, "little") + text


def bad_bytes() -> dict[str, tuple[bytes, str]]:
    good = tensor_file.dump(model(), {}, limit=1 << 20)
    length = int.from_bytes(good[:8], "little")
    return {
        "empty": (b"", "truncated"),
        "cut": (good[:-1], "truncated"),
        "longer": (good + b"\0", "expected"),
        "a pickle": (b"\x80\x04" + bytes(60), "truncated, or not a safetensors file"),
        "huge header": ((1 << 40).to_bytes(8, "little") + good[8:], "header of 1099511627776"),
        "huge shape": (good.replace(b"[4, 5]", b"[1 << 40]"[:6]), "JSON"),
        "other shape": (good.replace(b"[4, 5]", b"[5, 4]"), "expected shape [4, 5], got [5, 4]"),
        "no JSON": (good[:8] + b"x" * length + good[8 + length :], "JSON"),
        "too long": (bytes(1 << 20), "expected at most"),
        "strides": (empty("BF16", [0, 2**48, 2**48]), "expected a shape of at most"),
        "bytes": (empty("BF16", [2**40, 2**40, 0]), "expected a shape of at most"),
        "floats": (empty("F32", [0, 2**48, 2**48]), "expected a shape of at most"),
        "empty array": (empty("BF16", [2**48, 0]), "expected shape [4, 5], got"),
    }


BAD = {**bad_tensors(), **bad_bytes()}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_answer_has_no_effect(case: str) -> None:
    ends = []
    sent, why = BAD[case]
    for broken in (True, False):
        loop = server("mifa", max_norm=None)
        run_round(loop, range(K))
        task = loop.begin_round()
        state = loop.model()
        for client in (1, 2):
            assert loop.submit(client, trained(state, 2, client)) is None
        if broken:
            submit = loop.submit_bytes if isinstance(sent, bytes) else loop.submit
            reason = submit(0, sent, task.key)  # type: ignore[operator]
            assert reason is not None and why in reason
            again = loop.submit(0, trained(state, 2, 0), task.key)
            assert again == "has answered in round 2 already"
        report = expire(loop)
        assert report.active == (1, 2)
        assert report.rejected == ({"0": reason} if broken else {})
        assert report.absent == ({"3": 3} if broken else {"0": 0, "3": 3})
        run_round(loop, range(K))
        ends.append(loop.model_bytes())
    assert ends[0] == ends[1]


def test_any_object_with_bytes_is_an_answer() -> None:
    loop = server()
    task = loop.begin_round()
    file = tensor_file.dump(trained(model(), 1, 1), {}, limit=1 << 20)
    kinds: list[Any] = [file, bytearray(file), memoryview(file), memoryview(file)[::2]]
    reasons = [loop.submit_bytes(k, sent, task.key) for k, sent in enumerate(kinds)]
    assert reasons == [None] * 3 + ["expected contiguous bytes, got a strided memoryview"]
    assert expire(loop).active == (0, 1, 2)
    torch.testing.assert_close(loop.model(), trained(model(), 1, 1))
    task = loop.begin_round()
    empty: Any = np.zeros((0, 3))
    assert loop.submit_bytes(0, empty, task.key) == "the file is truncated: it has 0 bytes"
    assert loop.submit_bytes(1, "text", task.key) == "expected bytes, got str"  # type: ignore[arg-type]


def test_values_are_checked_when_the_round_ends() -> None:
    loop = server("mifa")
    loop.begin_round()
    for client in range(3):
        assert loop.submit(client, trained(model(), 1, client)) is None
    assert loop.submit(3, model() | {"w": torch.full((4, 5), torch.nan)}) is None
    report = loop.finish_round()
    assert report.active == (0, 1, 2) and "NaN or Inf" in report.rejected["3"]
    assert all(bool(torch.isfinite(value).all()) for value in loop.model().values())


def test_answers_that_belong_to_no_open_round_are_ignored_with_the_reason() -> None:
    loop = server()
    first = loop.begin_round([0, 1])
    assert loop.submit(2, model()) == "was not asked in round 1"
    assert loop.submit(99, model()) == "was not asked in round 1"
    assert loop.submit(0, trained(model(), 1, 0)) is None
    assert loop.submit(0, model()) == "has answered in round 1 already"
    report = expire(loop)
    assert report.active == (0,)
    assert report.ignored.keys() == {"0", "2", "99"}
    assert report.rejected == {}
    before = loop.model_bytes()
    assert loop.submit(1, model(), first.key) == "late: no round is open"
    second = loop.begin_round([0, 1])
    late = loop.submit(1, model(), first.key)
    assert late == f"expected an answer for the model {second.key}, got one for {first.key!r}"
    report = expire(loop)
    assert report.ignored == {"1": late} and report.active == ()
    assert "ignored 1: expected an answer" in "\n".join(report.lines())
    assert loop.model_bytes() == before


def test_a_client_that_is_no_client_is_an_error() -> None:
    loop = server()
    for wrong in ("0", True, None, 1.0):
        with pytest.raises(TypeError, match="client: expected int"):
            loop.submit(wrong, model())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected ids in \[0, 4\), got 4"):
        loop.begin_round([4])
    with pytest.raises(ValueError, match="different ones"):
        loop.begin_round([1, 1])
    named = server(ids="name")
    with pytest.raises(TypeError, match="client: expected str"):
        named.submit(0, model())
    with pytest.raises(ValueError, match="expected names"):
        named.begin_round()


@pytest.mark.parametrize("name", ["selection", "returns_updates", "release_after", "num_params"])
def test_an_option_that_is_none_of_the_rule_is_refused(name: str) -> None:
    aggregator = fastagg.FedAvg(num_clients=K, num_params=24, nonfinite="drop")
    for rule in ("mifa", aggregator):
        with pytest.raises(TypeError, match=name):
            Server(rule, model(), num_clients=K, **{name: 3})


def test_a_misspelt_option_of_the_server_gets_a_hint() -> None:
    with pytest.raises(TypeError, match=r"Did you mean round_seconds= for round_second=\?"):
        Server("mifa", model(), num_clients=K, round_second=3)


def test_the_name_of_a_rule_needs_a_number_of_clients() -> None:
    with pytest.raises(TypeError, match=r"^num_clients: required with the name of a rule"):
        Server("mifa", model())


def test_a_checkpoint_with_too_large_a_header_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.safetensors"
    loop = server(ids="name", checkpoint_path=path)
    monkeypatch.setattr(fastagg.checkpoint, "LISTS_LIMIT", 1 << 11)
    for number, limit in enumerate((1 << 11, 1 << 26), 1):
        monkeypatch.setattr(fastagg.checkpoint, "LISTS_LIMIT", limit)
        name = "long" * 1000
        loop.begin_round([name])
        assert loop.submit(name, trained(loop.model(), number, 1)) is None
        report = loop.finish_round()
        assert report.moved and report == loop.last_report
        assert ("header" in str(report.checkpoint_error)) == (number == 1)
    again = server(ids="name")
    again.resume(path)
    assert again.rounds == 2


def test_a_checkpoint_for_which_there_is_no_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = server(checkpoint_path=tmp_path / "run.safetensors")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(fastagg.checkpoint, "write", fail)
        report = run_round(loop, range(K))
    assert report.checkpoint_error == "MemoryError" and report.moved  # the step is not lost
    assert report == loop.last_report
    assert run_round(loop, range(K)).checkpoint_error is None
    again = server()
    again.resume(tmp_path / "run.safetensors")
    assert again.rounds == 2


def test_a_checkpoint_that_is_not_written_is_in_the_lines(tmp_path: Path) -> None:
    loop = server("mifa", checkpoint_path=tmp_path / "run")
    (tmp_path / "run").mkdir()
    *_, last = run_round(loop, range(K)).lines()
    assert last.startswith("the checkpoint was not written, the next round tries again: [Errno 21]")
    (tmp_path / "run").rmdir()
    assert not any("checkpoint" in line for line in run_round(loop, range(K)).lines())


def test_names_keep_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    loop = server(ids="name", checkpoint_path=path)
    for names in (["ann", "bob"], ["cat", "ann"]):
        loop.begin_round(names)
        for name in names:
            assert loop.submit(name, trained(loop.model(), 1, len(name))) is None
        report = loop.finish_round()
    assert report.ids == {"ann": 0, "cat": 2}
    again = server(ids="name", checkpoint_path=path)
    again.resume(path)
    again.begin_round(["dan", "eve", "bob"])
    for name in ("dan", "eve", "bob"):
        assert again.submit(name, trained(again.model(), 2, 1)) is None
    report = again.finish_round()
    assert report.ids == {"bob": 1, "dan": 3}
    assert "all 4 are taken" in report.rejected["eve"]


def test_a_round_ends_with_the_last_answer_or_at_the_deadline() -> None:
    loop = server()
    loop.begin_round([0])
    waiting = ThreadPoolExecutor(1).submit(loop.finish_round)
    assert loop.submit(0, model()) is None
    assert waiting.result(timeout=60).active == (0,)
    loop = server(round_seconds=0.2, min_answers=2)
    before, begun = loop.model_bytes(), time.monotonic()
    loop.begin_round()
    assert loop.submit(0, trained(model(), 1, 0)) is None
    report = loop.finish_round()
    assert time.monotonic() - begun >= 0.2
    assert report.error is not None and "min_answers" in report.error
    assert loop.model_bytes() == before and loop.rounds == 1
    loop.begin_round()
    time.sleep(0.25)  # the deadline counts, also if nobody has waited for it
    assert loop.submit(0, model()) == "late: round 2 has ended"
    assert loop.task(0) is None


def test_empty_rounds_end_the_run() -> None:
    loop = server(round_seconds=0.01, max_empty_rounds=2)
    loop.run_round()
    with pytest.raises(RuntimeError, match="2 rounds in a row had no active client"):
        loop.run_round()
    assert loop.last_report is not None and loop.last_report.round == 2
    assert loop.last_report.absent == {str(client): client for client in range(K)}
    assert loop.begin_round().round == 3  # the server can still be used


def test_rounds_do_not_overlap() -> None:
    loop = server()
    with pytest.raises(RuntimeError, match="no round is open"):
        loop.finish_round()
    loop.begin_round()
    with pytest.raises(RuntimeError, match="round 1 is open"):
        loop.begin_round()
    with pytest.raises(RuntimeError, match="round 1 is open"):
        loop.resume("anything")


@pytest.mark.parametrize("end", ["abort_round", "close"])
def test_an_aborted_round_has_no_effect(end: str) -> None:
    loop = server()
    run_round(loop, range(K))
    before = loop.model_bytes()
    task = loop.begin_round()
    assert loop.submit(0, trained(model(), 9, 0)) is None
    waiting = ThreadPoolExecutor(1).submit(loop.finish_round)
    time.sleep(0.05)
    getattr(loop, end)()
    with pytest.raises(RuntimeError, match=r"round 2 was aborted|no round is open"):
        waiting.result(timeout=60)
    assert loop.model_bytes() == before and loop.rounds == 1
    if end == "close":
        assert loop.closed
        assert loop.submit(1, model()) == "the server is closed"
        with pytest.raises(RuntimeError, match="the server is closed"):
            loop.begin_round()
    else:
        assert loop.begin_round() == task
        assert loop.submit(0, model(), task.key) is None


def test_an_error_leaves_the_server_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = server("mifa")
    run_round(loop, range(K))
    before, step = loop.model_bytes(), fastagg.Aggregator.step

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(fastagg.Aggregator, "step", fail)
    with pytest.raises(MemoryError):
        run_round(loop, range(3))
    monkeypatch.setattr(fastagg.Aggregator, "step", step)
    assert loop.model_bytes() == before and loop.rounds == 1
    report = run_round(loop, range(3))
    twin = server("mifa")
    run_round(twin, range(K))
    run_round(twin, range(3))
    assert report.round == 2 and loop.model_bytes() == twin.model_bytes()


@pytest.mark.parametrize("name", ["SIGINT", "SIGALRM"])
def test_a_handler_runs_after_the_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may raise an exception, such as that of a time limit, between any two lines of a round."""
    loop, number = server("mifa"), getattr(signal, name)
    run_round(loop, range(K))
    step = fastagg.Aggregator.step

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        signal.raise_signal(number)
        return result

    def limit(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(number, limit)
    monkeypatch.setattr(fastagg.Aggregator, "step", interrupted)
    try:
        with pytest.raises(TimeoutError):
            run_round(loop, range(3))
    finally:
        signal.signal(number, before)
        monkeypatch.setattr(fastagg.Aggregator, "step", step)
    twin = server("mifa")
    run_round(twin, range(K))
    report = run_round(twin, range(3))
    assert loop.rounds == 2 and loop.model_bytes() == twin.model_bytes()
    assert loop.last_report is not None and loop.last_report.lines() == report.lines()
    assert run_round(loop, [1]).absent == run_round(twin, [1]).absent


def test_a_signal_waits_for_the_end_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.safetensors"
    loop = server("mifa", checkpoint_path=path, checkpoint_every=10)
    step = fastagg.Aggregator.step

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(fastagg.Aggregator, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_round(loop, range(K))
    monkeypatch.setattr(fastagg.Aggregator, "step", step)
    assert loop.rounds == 1
    again = server("mifa")
    again.resume(path)
    assert again.rounds == 1 and again.model_bytes() == loop.model_bytes()
    assert run_round(loop, range(3)).active == (0, 1, 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("rule", ["fdms", "mifa", "mimic"])
def test_a_resumed_run_ends_with_the_same_bits(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    cohorts = [range(K), [0, 2], [3], [1, 2, 3], [0, 1]]
    whole = server(rule)
    for clients in cohorts:
        run_round(whole, clients)
    loop = server(rule, checkpoint_path=path)
    for clients in cohorts[:3]:
        run_round(loop, clients)
    left = loop.begin_round()  # never finished
    loop = server(rule, checkpoint_path=path)
    assert loop.resume(path) == []
    assert loop.rounds == 3
    for clients in cohorts[3:]:
        run_round(loop, clients)
    assert loop.model_bytes() == whole.model_bytes()
    assert left.round == 4


def test_an_answer_for_a_model_of_before_a_restart_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    loop = server(checkpoint_path=path, checkpoint_every=2)
    for clients in (range(4), range(4), range(3)):
        run_round(loop, clients)
    old = loop.begin_round()
    loop = server(checkpoint_path=path, checkpoint_every=2)
    loop.resume(path)
    run_round(loop, range(2))  # other clients than in round 3 of before
    new = loop.begin_round()
    assert old.round == new.round == 4 and old.key != new.key
    reason = loop.submit(0, model(), old.key)
    assert reason is not None and reason.startswith("expected an answer for the model 4-")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    loop = server(checkpoint_path=path)
    run_round(loop, range(K))
    other = model()
    other["v"] = other.pop("w")
    twin = Server("fdms", other, num_clients=K)
    before = twin.model_bytes()
    with pytest.raises(fastagg.CheckpointError, match="layout: expected the arrays"):
        twin.resume(path)
    assert twin.model_bytes() == before and twin.rounds == 0


def test_statistics_of_a_module_are_found_by_the_types_of_layers() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    loop = Server("mifa", net, num_clients=2, roles={"0.bias": "local"})
    loop.begin_round()
    state = loop.model()
    assert "0.bias" not in state
    for client in range(2):
        sent = state | {"1.running_var": torch.full((2,), 2.0 + client)}
        assert loop.submit(client, sent) is None
    loop.finish_round()
    assert loop.model()["1.running_var"].tolist() == [2.5, 2.5]
    net.load_state_dict(loop.model(), strict=False)
    loop.begin_round()
    sent["1.running_var"] = torch.tensor([-1.0, 1.0])
    assert loop.submit(0, sent) is None
    assert loop.submit(1, state) is None
    assert "variances >= 0" in loop.finish_round().rejected["0"]


def concurrently(count: int, work: Callable[[int], int]) -> list[int]:
    """Run ``work`` in threads; raise what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_eight_threads_submit_while_rounds_open_and_close() -> None:
    """Every answer that is taken counts once, in its round, and no other answer does.

    Each of eight clients is a thread that answers as fast as it can, also when it has answered, and
    for old rounds. The update of a client in round r is r at its own column. So the model shows
    which answers counted, and how often.
    """
    rounds, threads = 40, 8
    loop = Server(
        "fedavg",
        {"w": torch.zeros(threads, dtype=torch.float32)},
        num_clients=threads,
        answers="updates",
        max_empty_rounds=rounds,
        max_norm=None,
    )
    taken: list[dict[str, int]] = [{} for _ in range(threads)]  # key -> how often
    begun = threading.Barrier(threads + 1)

    def answer(client: int) -> int:
        try:
            return answer_until_the_end(client)
        finally:
            loop.close()  # after an error, nobody must wait for this client

    def answer_until_the_end(client: int) -> int:
        column, old, refused = torch.zeros(threads, dtype=torch.float32), "", 0
        column[client] = 1.0
        begun.wait()
        while not loop.closed:
            task = loop.task(client)
            key = old if task is None else task.key
            if not key:
                continue
            number = int(key.partition("-")[0])
            if loop.submit(client, {"w": number * column}, key) is None:
                taken[client][key] = taken[client].get(key, 0) + 1
            else:
                refused += 1
            old = key
        return refused

    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(concurrently, threads, answer)
        begun.wait()
        expected = torch.zeros(threads)
        reports = {}
        try:
            for number in range(1, rounds + 1):
                # Every third round ends while answers arrive; client 0 is asked in every second.
                loop.round_seconds = 0.003 if number % 3 == 0 else 600.0
                task = loop.begin_round(range(number % 2, threads))
                report = reports[task.key] = loop.finish_round()
                assert report.round == number
                for client in report.active:
                    expected[client] += number / len(report.active)
        finally:
            loop.close()
        total = sum(refused.result(timeout=60))
    assert total > 0
    for key, report in reports.items():
        answered = {client for client in range(threads) if key in taken[client]}
        assert report.active == tuple(sorted(answered))
        assert report.rejected == {}
    assert all(count == 1 for counts in taken for count in counts.values())
    assert sum(map(len, taken)) == sum(len(report.active) for report in reports.values()) > rounds
    # Sums of up to 40 float32 numbers, each rounded to 6e-8 of at most 1000.
    torch.testing.assert_close(loop.model()["w"], expected, rtol=0, atol=40 * 6e-8 * 1000)


def test_one_client_in_eight_threads_answers_once() -> None:
    for _ in range(20):
        loop = server()
        loop.begin_round([0])
        ready = threading.Barrier(8)

        def submit(thread: int, loop: Server = loop, ready: threading.Barrier = ready) -> int:
            ready.wait()
            return int(loop.submit(0, trained(model(), 1, thread)) is None)

        assert sum(concurrently(8, submit)) == 1
        assert loop.finish_round().active == (0,)


def test_reports_bound_what_strangers_send() -> None:
    loop = server(ids="name")
    loop.begin_round(["ann"])
    for number in range(1500):
        assert loop.submit(f"stranger {number}", {}) is not None
    assert len(expire(loop).ignored) == 1000


def test_the_report_can_be_written_as_json() -> None:
    report = run_round(server(), range(2))
    text = json.dumps({"active": report.active, "absent": report.absent})
    assert json.loads(text) == {"active": [0, 1], "absent": {"2": 2, "3": 3}}


@pytest.mark.parametrize("rule", ["fedavg", "fdms", "mifa", "mimic", "geometric-median", "median"])
@pytest.mark.parametrize("clip_norm", [3.0, {"initial": 4.0}])
def test_clipped_updates_have_the_bits_of_the_rule(rule: str, clip_norm: Any) -> None:
    loop = server(rule, clip_norm=clip_norm)
    agg = fastagg.make(rule, num_clients=K, num_params=24, nonfinite="drop", clip_norm=clip_norm)
    params = flat(model())
    for number, clients in enumerate([[0, 1, 2, 3], [2, 0], [3, 1, 2]], start=1):
        before = loop.model()
        rows = [flat(trained(before, number, client)) - params for client in clients]
        report = run_round(loop, clients)
        expected = agg.step(params, rows, clients)
        assert torch.equal(flat(loop.model()), params)
        assert expected.clipped is not None and expected.clipped.numel()
        said = f"scaled down to norm {expected.clip_norm:.6g}: {expected.clipped.tolist()[0]}"
        assert any(line.startswith(said) for line in report.lines())


def test_an_adaptive_bound_goes_on_after_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip_norm": {"initial": 4.0}}
    whole, path = server("fedavg", **options), tmp_path / "run"
    first = server("fedavg", checkpoint_path=path, **options)
    for loop in (whole, first):
        run_round(loop, range(K))
    again = server("fedavg", **options)
    assert again.resume(path) == []
    for loop in (whole, again):
        run_round(loop, [0, 2])
    assert torch.equal(flat(whole.model()), flat(again.model()))
    with pytest.raises(ValueError, match="clip_norm was"):
        server("fedavg", clip_norm=4.0).resume(path)


def test_a_tensor_that_repeats_one_number_is_not_copied() -> None:
    """A file of 2 KB, read with torch.load(weights_only=True), can make one of any shape."""
    server = fastagg.Server("fedavg", {"w": torch.zeros(4)}, num_clients=2)
    task = server.begin_round()
    large = torch.zeros(1).expand(1 << 45)
    assert "expected at most" in str(server.submit(0, {"w": large}, task.key))
    assert server.submit(1, {"w": torch.ones(4)}, task.key) is None
    server.close()


def test_an_interrupted_round_can_be_begun_again() -> None:
    """Whichever line of finish_round a signal handler raises an exception from, but the two of its
    ``finally``, which no code can protect."""
    code = fastagg.Server.finish_round.__code__
    source, first = inspect.getsourcelines(fastagg.Server.finish_round)
    closing = {first + at for at, text in enumerate(source) if "ending is not None" in text}
    closing |= {first + at for at, text in enumerate(source) if "_close(ending)" in text}
    assert len(closing) == 2
    lines = sorted({line for _, _, line in code.co_lines() if line} - {first} - closing)
    reached = 0
    for at in lines:
        server = fastagg.Server("fedavg", {"w": torch.zeros(2)}, num_clients=1)
        task = server.begin_round()
        assert server.submit(0, {"w": torch.ones(2)}, task.key) is None

        def trace(frame: Any, event: str, argument: object, at: int = at) -> Any:
            if frame.f_code is code and event == "line" and frame.f_lineno == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            server.finish_round()
        except KeyboardInterrupt:
            reached += 1
        finally:
            sys.settrace(before)
        server.abort_round()
        assert server.begin_round().round == server.rounds + 1
        server.close()
    assert reached > 8
