# SPDX-License-Identifier: Apache-2.0
"""Every fenced block of every page and every command named in a sentence works.

test_docs.py and the tests of the frameworks' pages (test_flower_page.py, test_flgo_page.py,
test_nvflare_page.py, test_pfl_page.py) run Python blocks; this module checks that there are no
others.
Cheap commands are run (``fastagg-sim list``, ``python -m fastagg``). Others stop before their first
expensive step: ``make`` prints what it would do; ``fastagg-sim`` parses, builds every
configuration, partition, model, rule and dropout process, and stops before the jobs; scripts and
modules parse their options. An unknown command is an error, so that each new kind gets a check.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pages.commands import ROOT, Shell, Wrong, pages

GENERATED = ("results/", "benchmarks/results/")  # tables of runs; they have no blocks
RUN_BY_TESTS = {"README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
# Placeholders in a command of a sentence.
PLACEHOLDERS = {"NAME": "fdms-fig1-mnist", "RATE": "0.05"}
EXECUTED = {"docs/flower_start.md"}  # from the first line to the last, by a gate of .ci/run
HISTORY = {"CHANGELOG.md"}  # its sentences may name removed commands


# --- what there is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, or one command of a sentence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fenced(page: str, text: str) -> Iterator[Block]:
    """Return the blocks of a page, including indented and unlabelled ones."""
    fence, first, language, lines = "", 0, "", list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r" *(?:[-*] +|\d+\. +)?(`{3,}|~{3,})(.*)", line)
        if mark and not fence:
            fence, first, language, lines = mark[1], number, mark[2].strip(), []
        elif mark and mark[1].startswith(fence) and not mark[2].strip():
            yield Block(page, first, language, "\n".join(lines))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        raise Wrong(f"{page}:{first}: the block does not end")


def in_sentences(page: str, text: str) -> Iterator[Block]:
    """Return the commands in backticks that have at least one argument."""
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for match in re.finditer(r"`([^`]+)`", prose):
        command = " ".join(match[1].split())
        if re.match(r"(make|fastagg-sim|python|torchrun|pip|flwr) ", command):
            words = [PLACEHOLDERS.get(word, word) for word in command.split(" ")]
            yield Block(page, prose.count("\n", 0, match.start()) + 1, "sh", " ".join(words))


def in_docstring(page: str, text: str) -> Iterator[Block]:
    """Return the indented commands at the top of an example."""
    for line in (ast.get_docstring(ast.parse(text)) or "").splitlines():
        if re.match(r"    (python|torchrun) ", line):
            yield Block(page, 1, "sh", line.strip())


BLOCKS: dict[str, list[Block]] = {}
for _path in pages():
    if not _path.as_posix().startswith(GENERATED) or _path.as_posix() == "results/README.md":
        _text = (ROOT / _path).read_text(encoding="utf-8")
        _name = _path.as_posix()
        _named = [] if _name in HISTORY else in_sentences(_name, _text)
        BLOCKS[_name] = [*fenced(_name, _text), *_named]
for _path in (ROOT / "examples").glob("*/*.py"):
    _name = _path.relative_to(ROOT).as_posix()
    BLOCKS[_name] = list(in_docstring(_name, _path.read_text(encoding="utf-8")))

# The page's column of text holds lines of this length; see docs/check_site.py.
WIDTH = runpy.run_path(str(ROOT / "docs" / "check_site.py"))["WIDTH"]


# --- the tests --------------------------------------------------------------------------------


@pytest.fixture(name="shell")
def _shell(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, tmp_path: Path
) -> Callable[[str], Shell]:
    def make(page: str) -> Shell:
        start = (ROOT / page).parent if page.startswith("examples/flower") else ROOT
        return Shell(start, monkeypatch, pytestconfig._parser, tmp_path / "none")

    return make


def check_files(block: Block) -> None:
    """Check that every file named in a list of files exists."""
    folder = (ROOT / block.page).parent
    there = {path.name for path in folder.rglob("*")}
    for line in block.text.splitlines():
        if not (folder / line.split()[0]).is_file():
            raise Wrong(f"{block}: there is no file {line.split()[0]}")
        missing = set(re.findall(r"\b\w+\.(?:h|cpp|cuh?)\b", line)) - there
        if missing:
            raise Wrong(f"{block}: there is no file {missing}")


def check_blocks(blocks: Sequence[Block], shell: Shell) -> int:
    """Check all commands of a page in order and return their number.

    The files that a command writes stay for the following commands of the same block.
    """
    count = 0
    for number, block in enumerate(blocks):
        if block.page in EXECUTED or (block.language == "python" and block.page in RUN_BY_TESTS):
            continue
        if block.language == "text":
            check_files(block)
            continue
        shell.scratch = shell.scratch.parent / f"block {number}"
        shell.scratch.mkdir(parents=True)
        if block.language != "sh":
            raise Wrong(f"{block}: no check for a block of {block.language or 'no language'}")
        try:
            commands = shell.check(block.text)
        except (Wrong, ValueError) as error:
            raise Wrong(f"{block}: {error}") from error
        if not commands:
            raise Wrong(f"{block}: there is no command")
        count += commands
    return count


def test_executed_pages_are_executed() -> None:
    assert "{ make test-start ||" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f".ci/run_page.py {page} " in text for page in EXECUTED)


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_the_blocks_of_a_page(
    page: str, shell: Callable[[str], Shell], capsys: pytest.CaptureFixture[str]
) -> None:
    check_blocks(BLOCKS[page], shell(page))


@pytest.mark.parametrize("page", [page for page in BLOCKS if page.endswith(".md")])
def test_the_lines_of_code_fit(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in fenced(page, text) for line in block.text.splitlines()]
    # Blocks that are indented instead of fenced, each paragraph.
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?<=\n\n)(?: {4}.*\n)+", prose):
        lines += [line[4:] for line in block.splitlines()]
    long = [line for line in lines if len(line) > WIDTH]
    assert not long, "\n".join([f"{page}: longer than {WIDTH} characters:", *long])
