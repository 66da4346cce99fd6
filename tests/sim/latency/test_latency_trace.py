# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastagg_sim import number_files
from fastagg_sim.latency import LatencyProcess, make_latency


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("round,client,seconds\n1,0,2.5\n0,0,1e-3\n0,2,70\n")
    return path


def trace(path: Path, **options: Any) -> LatencyProcess:
    return make_latency("trace", num_clients=4, seed=0, path=str(path), **options)


class TestTrace:
    def test_replays_the_file(self, path: Path) -> None:
        process = trace(path)
        path.unlink()  # read once
        assert [process.seconds(*draw) for draw in ((0, 1), (0, 0), (2, 0))] == [2.5, 0.001, 70.0]
        with pytest.raises(ValueError, match="expected a latency of client 2 in round 1, found no"):
            process.seconds(2, 1)

    def test_after_the_end(self, path: Path) -> None:
        with pytest.raises(IndexError, match="has rounds 0 to 1, got 2; after=repeat starts again"):
            trace(path).seconds(0, 2)
        assert [trace(path, after="repeat").seconds(0, t) for t in (2, 5)] == [0.001, 2.5]

    def test_what_other_programs_write(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_bytes(b"\xef\xbb\xbfclient, seconds,round,why\r\n3,1.5,0,wifi\r\n\r\n")
        assert trace(path).seconds(3, 0) == 1.5

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("round,client\n0,1\n", "line 1: expected a header with round, client, seconds, got"),
            ("round,client,seconds\n", "expected at least one latency, got none"),
            ("round,client,seconds\n0,1\n", "line 2: expected 3 columns, got '0,1'"),
            ("round,client,seconds\n0,4,1\n", "round 0, client 4: expected clients from 0 to 3"),
            ("round,client,seconds\n0,1,1\n0,1,1\n", "expected each line once, got it twice"),
            ("round,client,seconds\n0,1,2e9\n", "seconds: expected a number between 1e-09 and"),
            *(
                (f"round,client,seconds\n0,1,{bad}\n", "expected a finite number > 0 in column sec")
                for bad in ("0", "-1", "nan", "inf", "1e999", "soon", "", "1_0", "٣")
            ),
            (
                "round,client,seconds\n0.5,1,1\n",
                "expected a whole number >= 0 in column round, got '0.5'",
            ),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "bad.csv"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message) as caught:
            trace(path)
        assert str(caught.value).startswith("path: ") and "bad.csv" in str(caught.value)

    def test_files_that_cannot_be_read(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ValueError, match=r"path: cannot read .*none.csv: No such file"):
            trace(tmp_path / "none.csv")
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="is not a UTF-8 text file"):
            trace(tmp_path / "binary")
        size = path.stat().st_size
        monkeypatch.setattr(number_files, "MOST_BYTES", size - 1)
        with pytest.raises(ValueError, match=f"a file of at most {size - 1} bytes, got {size}"):
            trace(path)

    def test_bad_options(self, path: Path) -> None:
        with pytest.raises(ValueError, match="after: expected one of error, repeat, got 'stop'"):
            trace(path, after="stop")
        with pytest.raises(TypeError, match="'path'"):
            make_latency("trace", num_clients=4, seed=0)
