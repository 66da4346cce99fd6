# SPDX-License-Identifier: Apache-2.0
"""The gate itself: pinned files, examples, and differences that are expected."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.peers import files
from tests.peers.examples import compare, read_examples, run_examples
from tests.peers.files import NotAvailable, Repository, WrongContent, have_files, unpack

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "co/owner/name").mkdir(parents=True)
    (tmp_path / "co/owner/name/a.py").write_bytes(b"x = 1\n")
    right = hashlib.sha256(b"x = 1\n").hexdigest()
    root = have_files(
        Repository("owner/name", "0" * 40, {"a.py": right}), tmp_path / "kept", tmp_path / "co"
    )
    assert (root / "a.py").read_bytes() == b"x = 1\n"
    wrong = Repository("owner/name", "0" * 40, {"a.py": "1" * 64})
    with pytest.raises(WrongContent, match=r"a\.py: expected the SHA-256 1"):
        have_files(wrong, tmp_path / "other", tmp_path / "co")
    assert not list((tmp_path / "other").rglob("*"))
    (root / "a.py").write_bytes(b"x = 2\n")  # a kept file is checked again
    with pytest.raises(WrongContent, match=right):
        have_files(Repository("owner/name", "0" * 40, {"a.py": right}), tmp_path / "kept", None)


def test_a_file_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository("owner/name", "0" * 40, {"a.py": "1" * 64})
    with pytest.raises(NotAvailable, match=r"a\.py"):
        have_files(repository, tmp_path, tmp_path / "co")

    def refuse(url: str, timeout: float) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(files.urllib.request, "urlopen", refuse)
    with pytest.raises(NotAvailable, match=r"https://.*/owner/name/0+/a\.py: no answer"):
        have_files(repository, tmp_path, None)


@pytest.mark.parametrize("name", ["../a.py", "/a.py", "a/../../b.py", "C:/a.py", "a\\..\\b.py"])
def test_an_archive_cannot_write_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("first.py", "")
        archive.writestr(name, "")
    with pytest.raises(WrongContent, match="leads out of the folder"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


TEXT = """
    >>> import byzfl
    >>> agg = byzfl.Twice()
    >>> x = np.array([1.,   # continued
    >>>               2.])
    >>> agg(x)
    array([2. 4.])

    Using torch tensors

    >>> x = torch.tensor([[1., 2.], [3., 4.]])
    >>> agg(x)
    tensor([[2., 4.],
            [6., 8.]])
"""


def test_examples_are_read_up_to_their_results() -> None:
    first, second = read_examples(TEXT)
    assert len(first[0]) == 4 and first[1] == "array([2. 4.])"
    assert second == (
        ["x = torch.tensor([[1., 2.], [3., 4.]])", "agg(x)"],
        "tensor([[2., 4.], [6., 8.]])",
    )
    with pytest.raises(ValueError, match="without a result"):
        list(read_examples(">>> x = 1"))


@pytest.mark.parametrize(
    ("found", "printed", "equal"),
    [
        (np.array([2.0, 4.0]), "array([2. 4.])", True),
        (np.array([0.53452248]), "array([0.53452248])", True),
        (np.array([0.53452249]), "array([0.53452248])", False),
        (torch.tensor([[1.00514, 2.0]]), "tensor([[1.0051, 2.0000]])", True),
        (torch.tensor([[1.0052, 2.0]]), "tensor([[1.0051, 2.0000]])", False),
        (torch.tensor([1.0, 2.0]), "tensor([[1., 2.]])", False),  # another shape
        (torch.tensor([2.0, 4.0]), "array([2. 4.])", False),  # another kind
        (np.array([np.nan, 4.0]), "array([2. 4.])", False),
    ],
)
def test_results_are_compared_to_the_printed_digits(found: Any, printed: str, equal: bool) -> None:
    assert (compare(found, printed) is None) == equal


def test_an_expected_difference_must_occur(tmp_path: Path) -> None:
    source = tmp_path / "twice.py"
    imports = "    >>> import numpy as np, torch"
    source.write_text(f'class Twice:\n    """Double.\n{imports}{TEXT}"""\n')
    double = types.SimpleNamespace(Twice=lambda: lambda x: 2 * x)
    triple = types.SimpleNamespace(Twice=lambda: lambda x: 3 * x)
    assert run_examples([source], double, {}) == (2, [])
    equal, problems = run_examples([source], triple, {"Twice 1": "a reason", "Twice 2": "another"})
    assert (equal, problems) == (0, [])
    equal, problems = run_examples([source], double, {"Twice 1": "a reason"})
    assert problems == ["Twice 1: expected another result (a reason)"]
    _, problems = run_examples([source], double, {"Thrice 1": "a reason"})
    assert problems == ["Thrice 1 is no example"]


RUN = """
import sys
from pathlib import Path
from tests.peers.runs import run
for passing, differences, left_out in (
    (1, ["test_bad"], ["test_c"]),
    (1, [], ["test_c"]),
    (0, ["test_good"], []),
    (2, ["test_bad"], ["test_d"]),
):
    differences, left_out = (
        {f"test_a.py::{name}": "a reason" for name in names} for names in (differences, left_out)
    )
    found = run(
        Path(sys.argv[1]),
        ["test_a.py"],
        passing=passing,
        differences=differences,
        left_out=left_out,
    )
    print("found", found)
"""


def test_a_run_counts_what_is_not_as_expected(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_good(): pass\ndef test_bad(): assert False\ndef test_c(): raise OSError\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    found = [eval(line[6:]) for line in done.stdout.splitlines() if line.startswith("found")]
    assert len(found) == 4, done.stdout + done.stderr
    assert found[0] == []
    assert [text.split(";")[0] for text in found[1]] == ["1 tests failed"]
    # A difference that does not occur is a failure; so are the two tests that fail.
    assert [text.split(";")[0] for text in found[2]] == ["3 tests failed"]
    assert found[3][0] == "test_a.py::test_d is no test"
    assert found[3][1] == "expected 2 tests that pass, got 1"
