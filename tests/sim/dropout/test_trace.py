# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastagg_sim.dropout import DropoutProcess, make_dropout
from fastagg_sim.dropout.trace import write_trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("round,client\n0,2\n0,0\n3,1\n")
    return path


def trace(path: Path, **options: object) -> DropoutProcess:
    return make_dropout("trace", num_clients=4, seed=0, path=str(path), **options)


class TestTrace:
    def test_replays_the_file(self, path: Path) -> None:
        process = trace(path)
        sets = [process.active(t) for t in (3, 0, 1, 2)]
        assert [ids.tolist() for ids in sets] == [[1], [0, 2], [], []]
        assert {ids.dtype for ids in sets} == {torch.int64}
        sets[1][0] = 3  # the caller's own
        assert process.active(0).tolist() == [0, 2]
        path.unlink()
        assert process.active(3).tolist() == [1]  # read once

    def test_after_the_end(self, path: Path) -> None:
        with pytest.raises(IndexError, match="has rounds 0 to 3, got 4; after=repeat or"):
            trace(path).active(4)
        assert [trace(path, after="repeat").active(t).tolist() for t in (4, 7, 8)] == [
            *([0, 2], [1], [0, 2])
        ]
        repeat = trace(path, after="repeat", rounds=5)
        assert [repeat.active(t).tolist() for t in (4, 5)] == [[], [0, 2]]
        assert trace(path, after="empty").active(9).tolist() == []

    def test_rounds_may_be_far_apart(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_text("round,client\n5,1\n1000000000000,2\n")
        process = trace(path, after="repeat")
        rounds = (5, 6, 10**12, 10**12 + 6)
        assert [process.active(t).tolist() for t in rounds] == [[1], [], [2], [1]]

    def test_what_other_programs_write(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_bytes(b"\xef\xbb\xbfclient, round,reason\r\n3,1,wifi\r\n\r\n0,0,\r\n")
        process = trace(path)
        assert [process.active(t).tolist() for t in range(2)] == [[0], [3]]

    def test_round_trip_of_another_process(self, tmp_path: Path) -> None:
        process = make_dropout("markov", num_clients=4, seed=1)
        write_trace(tmp_path / "t.csv", [process.active(t) for t in range(40)])
        replay = trace(tmp_path / "t.csv", rounds=40)
        for t in range(40):
            assert torch.equal(replay.active(t), process.active(t))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", r"line 1: expected a header with round, client, got ''"),
            ("0,1\n", r"line 1: expected a header with round, client, got '0,1'"),
            ("round,client\n0,1\n\n1\n", r"line 4: expected 2 columns, got '1'"),
            (
                "round,client\n0,one\n",
                r"line 2: expected a whole number .* in column client, got 'one'",
            ),
            (
                "round,client\n-1,0\n",
                r"line 2: expected a whole number .* in column round, got '-1'",
            ),
            ("round,client\n0.5,0\n", r"column round, got '0.5'"),
            ("round,client\n0,4\n", r"round 0, client 4: expected clients from 0 to 3"),
            ("round,client\n2,1\n0,0\n2,1\n", r"round 2, client 1: expected each line once"),
            ("round,client\n", r"contains no round; set its length"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "bad.csv"
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            trace(path)
        assert str(caught.value).startswith("path: ") and "bad.csv" in str(caught.value)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"path: cannot read .*none.csv: No such file"):
            trace(tmp_path / "none.csv")
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="is not a UTF-8 text file"):
            trace(tmp_path / "binary")

    def test_bad_options(self, path: Path) -> None:
        with pytest.raises(ValueError, match="round 3, client 1: the trace has rounds = 3"):
            trace(path, rounds=3)
        with pytest.raises(ValueError, match="after: expected one of error, repeat, empty"):
            trace(path, after="stop")
        with pytest.raises(ValueError, match="rounds: expected a whole number >= 1, got 0"):
            trace(path, rounds=0)
        with pytest.raises(TypeError, match="'path'"):
            make_dropout("trace", num_clients=4, seed=0)
