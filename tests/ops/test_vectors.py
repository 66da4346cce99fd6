# SPDX-License-Identifier: Apache-2.0
"""The kernels in the machine code: functions for an instruction set use its vectors, full width.

The compiler may ignore an attribute that it does not know, or not vectorize a loop. The results are
then right, but late, and only the disassembly shows why.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastagg import _C

ROOT = Path(__file__).resolve().parents[2]
ARM64 = platform.machine() in ("aarch64", "arm64")
# A multiply-add of floats, or where there is none a product: of whole registers, and of one number.
PACKED = {
    "avx512": r"vfn?m(add|sub)\d+p[sd]\b.*%zmm",
    "avx2": r"vfn?m(add|sub)\d+p[sd]\b.*%ymm",
    "portable": r"mulp[sd]\b.*%xmm",
    "neon": r"fml[as]\s+v\d+\.(4s|2d), v\d+\.(4s|2d), v\d+\.(4s|2d|s\[|d\[)",
}
SCALAR = {
    "avx512": r"v(fn?m(add|sub)\d+|mul|add)s[sd]\b",
    "avx2": r"v(fn?m(add|sub)\d+|mul|add)s[sd]\b",
    "portable": r"(mul|add)s[sd]\b",
    "neon": r"f(n?m(add|sub)|mul|add)\s+[sd]\d+",
}
# A conversion of one float to double.
WIDENING = r"v?cvtss2sd\b|fcvt\s+d\d+, s\d+"
# Stores of vectors on the stack, and copies between memory.
SPILL = r"v?mov([au]p[sd]|dq[au]\d*)\s+%[xyz]mm\d+,.*\(%r[bs]p|st[rp]\s+q\d+.*\[(sp|x29)"
# The rows of the largest tile of ``gram``: of a strip, and of what it is multiplied with.
SHAPE = {"avx512": (5, 5), "avx2": (4, 3), "portable": (3, 3), "neon": (5, 5)}
# The multiply-adds of one vector in the largest tile of ``gram_rows``.
ROWS_TILE = {"avx512": 25, "avx2": 12, "portable": 9, "neon": 25}
# The same for products of int8 numbers, which GCC's builds multiply as whole numbers on x86-64.
INT8_PRODUCTS = PACKED | {"avx512": r"vpdpbusd\b.*%zmm", "avx2": r"vpmaddwd\b.*%ymm"}
SIMILAR_TILE = {"avx512": 24, "avx2": 12, "portable": 12, "neon": 24}
# Kernels of passes over rows, those of the largest groups of rows.
STREAMS = (
    *("SumGroups<8", "MoveGroups<8", "Remember<4", "AddRows<8", "AddCorrections<8"),
    *("RememberRounded<4", "QuantizedTotal", "ScaffoldMean"),
)
# A function with fewer instructions passes its arguments on to another one.
WHOLE = 32


@dataclass(frozen=True)
class Function:
    """A dispatched function: its instructions, as text, by address."""

    name: str
    code: dict[int, str]

    def loops(self) -> list[list[str]]:
        """Return the innermost loops: what is between a backward jump and its target."""
        found = []
        for address, text in self.code.items():
            jump = re.match(r"(j\w+|b\.?\w*|cb\w+|tb\w+)\s+(?:.*, )?([0-9a-f]+) <", text)
            if jump and (target := int(jump[2], 16)) <= address and target in self.code:
                found.append((target, address))
        inner = [
            (begin, end)
            for begin, end in found
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in found)
        ]
        return [[t for a, t in self.code.items() if begin <= a <= end] for begin, end in inner]


def objdump(*arguments: str) -> str:
    names = ["aarch64-linux-gnu-objdump"] * ARM64 + ["objdump"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no objdump (binutils)")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=True).stdout


def functions(binary: Path, isa: str, kernel: str) -> list[Function]:
    """Return the functions that run ``kernel`` with the instruction set."""
    symbols = objdump("-t", "-C", str(binary))
    # address flags section size name
    row = re.compile(
        rf"^([0-9a-f]+) .* (\S+)\t([0-9a-f]+)\s.*(run_{isa}<fastagg::cpu::"
        rf"(?:\(anonymous namespace\)::)?{kernel}\b.*)$",
        re.MULTILINE,
    )
    found = []
    for begin, section, size, name in row.findall(symbols):
        first = int(begin, 16)
        part = [f"--start-address={first}", f"--stop-address={first + int(size, 16)}"]
        text = objdump("-d", "--no-show-raw-insn", "-j", section, *part, str(binary))
        lines = re.findall(r"^\s*([0-9a-f]+):\t(.*)$", text, re.MULTILINE)
        if len(lines) >= WHOLE:
            found.append(Function(name, {int(a, 16): line for a, line in lines}))
    return found


def count(pattern: str, code: list[str]) -> int:
    return sum(re.match(pattern, line) is not None for line in code)


def check_tiles(binary: Path, isa: str, least: dict[str, int]) -> None:
    """Tiles compute with whole registers only and keep their sums in them.

    ``least`` are the multiply-adds of one vector in a tile of each kernel.
    """
    for kernel, products in least.items():
        found = functions(binary, isa, kernel)
        assert found, kernel
        for function in found:
            assert count(SCALAR[isa], list(function.code.values())) == 0, function.name
            tiles = [loop for loop in function.loops() if count(PACKED[isa], loop) >= products]
            assert tiles, f"{function.name}: no loop with the multiply-adds of a whole tile"
            # SSE2 has no multiply-add: products need registers, and GCC spills where it packs rows.
            for loop in tiles if isa != "portable" else ():
                assert count(SPILL, loop) == 0, "\n".join((function.name, *loop))


def check_streams(
    binary: Path, isa: str, kernels: tuple[str, ...] = STREAMS, least: int = 7
) -> None:
    """The steps of a pass over rows of float have ``least`` multiply-adds of whole registers.

    The sum of eight rows has seven; the first product is none.
    """
    for kernel in kernels:
        found = [f for f in functions(binary, isa, kernel) if "Half" not in f.name]
        assert found, kernel
        for function in found:
            # What is left of a step at the end of the columns is computed one number at a time.
            code = list(function.code.values())
            packed = count(PACKED[isa], code)
            assert packed >= least, f"{function.name}: {packed} multiply-adds of whole registers"
            # So is the widening of these numbers: of a row and a memory row for each multiply-add.
            single, widened = count(SCALAR[isa], code), count(WIDENING, code)
            assert widened <= 2 * single, f"{function.name}: {widened} conversions of one number"


def extension() -> Path:
    path = Path(_C.__file__)
    if path.read_bytes()[:4] != b"\x7fELF":  # macOS
        pytest.skip("the machine code is read from ELF files")
    return path


def built() -> list[str]:
    """The instruction sets of this build, whichever the processor has."""
    return ["neon"] if ARM64 else ["portable", "avx2", "avx512"]


@pytest.mark.parametrize("isa", built())
def test_tiles_use_whole_registers(isa: str) -> None:
    rows, others = SHAPE[isa]
    least = {
        f"DiagonalTile<{rows}": rows * (rows + 1) // 2,
        f"PackingTile<{rows}": rows * (rows + 1) // 2,
        f"PackedTile<{rows}, {others}": rows * others,
        f"TileInPlace<{rows}, {others}": rows * others,
        "RowsKernel": ROWS_TILE[isa],
    }
    check_tiles(extension(), isa, least)


@pytest.mark.parametrize("isa", built())
def test_passes_over_rows_use_whole_registers(isa: str) -> None:
    check_streams(extension(), isa)
    # Each loop squares 16 float64 in a step, which are two registers of AVX-512.
    check_streams(extension(), isa, ("SketchRows", "SketchGroup"), least=6)
    if isa != "portable":  # which calls a function for each multiply-add
        check_streams(extension(), isa, ("AddMomentum", "AddAdaptive"))


@pytest.mark.parametrize("isa", built())
def test_products_of_int8_use_whole_registers(isa: str) -> None:
    (function,) = functions(extension(), isa, "MostSimilar")
    by_gcc = str(_C.build_info()["compiler"]).startswith("gcc")
    product = (INT8_PRODUCTS if by_gcc else PACKED)[isa]
    tiles = [f for f in function.loops() if count(product, f) >= SIMILAR_TILE[isa]]
    assert tiles, f"{function.name}: no loop with the products of a whole tile"
    for loop in tiles if isa != "portable" else ():
        assert count(SPILL, loop) == 0, "\n".join((function.name, *loop))


def test_a_function_without_its_vectors_is_found() -> None:
    """The checks can fail: the AVX2 code does not pass for AVX-512, nor NEON for a larger tile."""
    function = Function(
        "f", {0: "vfmadd231ps %ymm0,%ymm1,%ymm2", 4: "vfmadd231ss %xmm0,%xmm1,%xmm2"}
    )
    code = list(function.code.values())
    assert count(PACKED["avx512"], code) == 0 and count(PACKED["avx2"], code) == 1
    assert count(SCALAR["avx512"], code) == 1
    assert count(SPILL, ["vmovdqa64 %zmm3,0x40(%rsp)", "vmovaps %ymm1,-0x20(%rbp)"]) == 2
    assert count(SPILL, ["vmovdqu64 %zmm3,0x40(%rax)"]) == 0
    arm = [
        "fmla\tv0.4s, v1.4s, v2.4s",
        "fmadd\ts0, s1, s2, s3",
        "fmul\ts0, s1, s2",
        "str\tq3, [sp, #16]",
    ]
    assert [count(p["neon"], arm) for p in (PACKED, SCALAR)] == [1, 2] and count(SPILL, arm) == 1


@pytest.fixture(name="clang")
def _clang() -> list[str]:
    names = ["clang++", *(f"clang++-{version}" for version in range(25, 13, -1))]
    clang = next((path for name in names if (path := shutil.which(name))), None)
    if clang is None:
        pytest.skip("no clang++")
    return [clang, "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror"]


@pytest.mark.slow
def test_clang_accepts_every_kernel(clang: list[str]) -> None:
    sources = sorted(str(path) for path in (ROOT / "csrc/kernels/cpu").glob("*.cpp"))
    assert sources
    subprocess.run([*clang, "-fsyntax-only", *sources], check=True)


@pytest.mark.slow
@pytest.mark.skipif(ARM64, reason="only x86-64 has targets to choose from")
def test_clang_compiles_for_every_instruction_set(clang: list[str], tmp_path: Path) -> None:
    """Clang ignores a target with a word that it does not know, all of it, and only warns."""
    for name in ("gram_rows", "weighted_sum"):
        source, target = ROOT / f"csrc/kernels/cpu/{name}.cpp", tmp_path / f"{name}.o"
        subprocess.run([*clang, "-O3", "-c", str(source), "-o", str(target)], check=True)
    for isa in ("avx2", "avx512"):
        check_tiles(tmp_path / "gram_rows.o", isa, {"RowsKernel": ROWS_TILE[isa]})
        check_streams(tmp_path / "weighted_sum.o", isa, ("SumGroups<8", "MoveGroups<8"))
