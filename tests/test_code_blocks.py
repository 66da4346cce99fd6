# SPDX-License-Identifier: Apache-2.0
"""Every fenced block of every page, and every command named in a sentence, is one that works.

Python blocks are run, by test_docs.py and test_flower_page.py; here is made sure that there are no
others. Commands are run where that is cheap (``fastagg-sim list``, ``python -m fastagg``), or taken
as far as the first thing that costs time: ``make`` prints what it would do; ``fastagg-sim`` parses,
builds every configuration, partition, model, rule and dropout process, and stops where the jobs
would begin; scripts and modules parse their options. What is not known here is an error, so that a
new kind of command comes with a check of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import ROOT, Shell, Wrong

GENERATED = ("results/", "benchmarks/results/")  # tables of runs; they have no blocks
RUN_BY_TESTS = {"README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
# What stands for something else in a command of a sentence.
PLACEHOLDERS = {"NAME": "fdms-fig1-mnist", "RATE": "0.05"}
HISTORY = {"CHANGELOG.md"}  # its sentences may name what was


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


def pages() -> list[Path]:
    skip = re.compile(r"^(\.|build$|dist$|runs$)")
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(path for path in found if not any(skip.search(part) for part in path.parts))


def fenced(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page, indented ones and unlabelled ones too."""
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
    """Commands in backticks that have at least one argument."""
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for match in re.finditer(r"`([^`]+)`", prose):
        command = " ".join(match[1].split())
        if re.match(r"(make|fastagg-sim|python|torchrun|pip|flwr) ", command):
            words = [PLACEHOLDERS.get(word, word) for word in command.split(" ")]
            yield Block(page, prose.count("\n", 0, match.start()) + 1, "sh", " ".join(words))


def in_docstring(page: str, text: str) -> Iterator[Block]:
    """The indented commands at the top of an example."""
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
    """A list of files, each with what it is: all that look like one are there."""
    folder = (ROOT / block.page).parent
    there = {path.name for path in folder.rglob("*")}
    for line in block.text.splitlines():
        if not (folder / line.split()[0]).is_file():
            raise Wrong(f"{block}: there is no file {line.split()[0]}")
        missing = set(re.findall(r"\b\w+\.(?:h|cpp|cuh?)\b", line)) - there
        if missing:
            raise Wrong(f"{block}: there is no file {missing}")


def check_blocks(blocks: Sequence[Block], shell: Shell) -> int:
    """All commands of a page, in their order; returns how many there are.

    What commands write is there for the next one of the same block.
    """
    count = 0
    for number, block in enumerate(blocks):
        if block.language == "python" and block.page in RUN_BY_TESTS:
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


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_the_blocks_of_a_page(
    page: str, shell: Callable[[str], Shell], capsys: pytest.CaptureFixture[str]
) -> None:
    check_blocks(BLOCKS[page], shell(page))


def test_the_blocks_are_found() -> None:
    fences = {
        name: sum(
            line.lstrip().startswith(("```", "~~~"))
            for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        )
        for name in (path.as_posix() for path in pages())
    }
    found = {name: 0 for name in fences} | {
        name: 2 * len(list(fenced(name, (ROOT / name).read_text(encoding="utf-8"))))
        for name in BLOCKS
        if name.endswith(".md")
    }
    assert found == fences
    assert sum(block.language == "sh" for block in BLOCKS["README.md"]) > 10
    assert len(BLOCKS["examples/sharded/server.py"]) == len(BLOCKS["examples/flower/run.py"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("make everything", "'everything' is no target"),
        ("make sanitized", "'sanitized' is no target"),
        ("make test AGRS=-x", "no variable AGRS"),
        ('make bench ARGS="--treads 4"', "refused with status 2"),
        ('make test ARGS="--frobnicate"', r"no options \['--frobnicate'\]"),
        ("make lint   # then  make fromat  rewrites", "'fromat' is no target"),
        ("make gpu-check", "gpu-check needs OUT"),
        ("fastagg-sim demonstrate", "refused with status 2"),
        ("fastagg-sim run --alpha", "refused with status 2"),
        ("fastagg-sim run --rules fdmss", "refused with status 2"),
        ("fastagg-sim run --rules fdms:similarity=angle", "refused with status 2"),
        ("fastagg-sim run --dropout round-robin:tau=50", "refused with status 2"),
        ("fastagg-sim run --dropout 'bernoulli:p=[0.1,0.5]'", "refused with status 2"),
        ("fastagg-sim run --dataset mnist --data-options normalize=no", "refused with status 2"),
        ("fastagg-sim run --partition-options alpha=0.3", "refused with status 2"),
        ("fastagg-sim run\nfastagg-sim run --lr 0.2", "refused with status 2"),  # the same folder
        ("fastagg-sim experiment fdms-fig99", "refused with status 2"),
        ("fastagg-sim experiment mimic-table3 --fast", "refused with status 2"),
        ("fastagg-sim data imagenet", "there is no 'imagenet'"),
        ("fastagg-sim plot results/nothing", "no results in results/nothing"),
        ("fastagg-sim timings result", "no results in result"),
        ("python -m benchmarks all", "refused with status 2"),
        ("python -m benchmarks sharded --ranks two", "refused with status 2"),
        ("python -m fastag", "no check for python -m fastag"),
        ("python examples/flower/runs.py", "no script"),
        ("python run.py --api message", "no script"),  # without the cd
        ("cd examples/flower\npython run.py --api grpc", "refused with status 2"),
        ('cd examples/flower\npython run.py --faults "2.0=tired"', "ROUND.CLIENT"),
        ("cd examples/flower && python simulate.py --rounds two", "refused with status 2"),
        ("cd examples/federation", "no folder"),
        ("python docs/choosing_figure.py --large", "takes no arguments"),
        ("torchrun --nproc-per-node 2 examples/sharded/servers.py out", "no script"),
        ("torchrun --nproc-per-node 2 examples/sharded/server.py", "refused with status 2"),
        ("torchrun --ranks 2 examples/sharded/server.py out", "refused with status 2"),
        ("pip install 'fastagg[flowers]'", "no such extra"),
        ("pip install 'flwr[simulations]'", "no such extra"),
        ("pip uninstall fastagg", "no such extra"),
        (".venv/bin/pre-commit run", "no check for pre-commit run"),
        ("git push", "no check for the command 'git'"),
        ("make test | tee log", "no check for '|'"),
        ("make test > log", "no check for '>'"),
        ("make 'test", "No closing quotation"),
        ("# nothing", "there is no command"),
    ],
)
def test_a_command_that_would_not_work(
    text: str, message: str, shell: Callable[[str], Shell]
) -> None:
    with pytest.raises(Wrong, match=message.replace("|", r"\|")):
        check_blocks([Block("README.md", 1, "sh", text)], shell("README.md"))


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("README.md", "```\nmake test\n```", "no check for a block of no language"),
        ("README.md", "```toml\na = 1\n```", "no check for a block of toml"),
        ("README.md", "1. one\n\n   ~~~ bash\n   make\n   ~~~", "no check for a block of bash"),
        ("CONTRIBUTING.md", "```python\nimport fastagg\n```", "no check for a block of python"),
        ("csrc/README.md", "```text\nkernels/none.h what\n```", "no file kernels/none.h"),
        ("csrc/README.md", "```text\nkernels/gram.h and none.cu\n```", "no file {'none.cu'}"),
        ("README.md", "```sh\nmake test\n", "the block does not end"),
        ("README.md", "Do `make tests`, or\n`make\ntest`.", "'tests' is no target"),
    ],
)
def test_a_page_with_a_wrong_block(
    page: str, text: str, message: str, shell: Callable[[str], Shell]
) -> None:
    with pytest.raises(Wrong, match=message):
        check_blocks([*fenced(page, text), *in_sentences(page, text)], shell(page))
