# SPDX-License-Identifier: Apache-2.0
"""Build fastagg with emulated CUDA kernels in place of the CPU kernels.

``build(folder)`` copies the package, translates the kernels (launches, shared arrays, a few lines
of assembly), registers the CUDA bindings for CPU tensors, and compiles all of it with the C++
compiler. The kernels are compiled so that each of their memory accesses is checked
(memory_check.h). ``fastagg.ops`` then runs the code of the CUDA kernels for tensors on the CPU.

``build_faults(folder)`` builds a program of kernels with the faults that the checks must find.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent

COMMON = ["-O2", "-g1", "-fPIC", "-std=c++17", "-w", f"-I{HERE}"]
# Neither sanitizer library is linked: memory_check.cpp defines the functions of the first, and the
# second stops the program by a trap.
CHECKED = ["-fsanitize=thread,undefined", "-fsanitize-undefined-trap-on-error"]
# A GPU receives a copy of such arrays, so the emulator must not share Python's memory, either.
COPIES = """
from fastagg import _C

rows_of = lambda *args: [row.clone() for row in _C.rows(*args)]
tensor_of = lambda buffer: _C.tensor(buffer).clone()
"""
# Besides ops_cuda:
BINDINGS = ["library", "module", "ops_policy", "python_memory", "small_tensors", "step_arguments"]
RUNTIME = ["runtime.cpp", "memory_check.cpp", "tensor_core.cpp"]


def without(source: str, start: str) -> str:
    """Return the source without the function whose text begins with ``start``."""
    begin = source.index(start)
    return source[:begin] + source[source.index("\n}\n", begin) + 3 :]


def translated_kernel(path: Path) -> str:
    """Return the source of a kernel, translated for the emulator."""
    s = path.read_text(encoding="utf-8")
    s = re.sub(r"#include <cuda_runtime(_api)?\.h>", '#include "cuda_on_cpu.h"', s)
    s = s.replace("__host__ __device__ __forceinline__", "inline")
    s = s.replace("extern __shared__ float4 shared[];", "float4* shared = emulated_shared();")
    s = re.sub(
        r"__shared__ (\w+ )(\w+)((?:\[[^\]]+\])+);",
        r"static \1\2\3; declare_shared(\2, sizeof \2);",
        s,
    )
    if path.name == "gram_layout.h":  # fewer segments at a time, so that tests have several windows
        limit = "kSegmentBytes = int64_t{128} << 20;"
        assert limit in s
        s = s.replace(limit, "kSegmentBytes = int64_t{256} << 10;")
    if path.name == "gram_mma.cuh":
        s = without(s, "__device__ __forceinline__ uint32_t round_pair")
        s = without(s, "__device__ __forceinline__ uint32_t round_tf32")
        s = without(s, "__device__ __forceinline__ void mma_bf16(")
        s = without(s, "__device__ __forceinline__ void mma_tf32(")
    if path.name == "gram_copy.cuh":
        s = without(s, "template <int kBytes>\n__device__ __forceinline__ void copy_async")
    if path.name == "gram_few.cu":
        s = without(s, "__device__ __forceinline__ void announce(")
        s = without(s, "__device__ __forceinline__ void wait_for_other(")
    s = s.replace('asm volatile("cp.async.commit_group;" ::: "memory");', "copy_async_commit();")
    s = re.sub(
        r'asm volatile\("cp\.async\.wait_group %0;" ::"n"\((.*?)\) : "memory"\);',
        r"copy_async_wait(\1);",
        s,
    )
    assert "asm" not in s and "__shared__" not in s, f"{path.name}: untranslated CUDA syntax"
    launch = re.compile(r"([A-Za-z_][\w:]*(?:<[\w:, ]*>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
    return launch.sub(rf'launch_on_cpu("{path.stem}, \1", \1, \2)(', s)


def translated_binding(path: Path) -> str:
    """Return the source of a CUDA binding, translated for tensors on the CPU."""
    s = path.read_text(encoding="utf-8")
    s = re.sub(r"#include <c10/cuda/.*\n", "", s)
    s = re.sub(r"TORCH_CHECK_VALUE\(device\.is_cuda\(\).*?;\n", "", s, count=1, flags=re.DOTALL)
    s = s.replace("c10::cuda::CUDAGuard guard_;", "").replace(", guard_(device)", "")
    s = re.sub(r"return c10::cuda::getCurrentCUDAStream.*?;", "return nullptr;", s)
    s = s.replace("cudaGetErrorString(error)", '"an error"')
    s = s.replace("if (when && clients.is_cuda())", "if (when)")  # ids that kernels check
    return s.replace("TORCH_LIBRARY_IMPL(fastagg, CUDA, m)", "TORCH_LIBRARY_IMPL(fastagg, CPU, m)")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _compile(
    folder: Path, sources: Iterable[Path], flags: Callable[[Path], list[str]]
) -> list[str]:
    """Compile all sources, one per core at a time, and return the object files."""

    def one(source: Path) -> str:
        target = str(folder / f"{source.parent.name}-{source.stem}.o")
        subprocess.run([*_compiler(), *flags(source), "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, sources))


def build(folder: Path) -> None:
    """Build a package in ``folder`` whose ``import fastagg`` uses the emulated kernels."""
    import torch
    from torch.utils import cpp_extension

    kernels, bindings = folder / "csrc/kernels/cuda", folder / "csrc/bindings"
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "fastagg", folder / "fastagg", ignore=shutil.ignore_patterns("_C*.so"))
    with (folder / "fastagg/ops/memory.py").open("a", encoding="utf-8") as file:
        file.write(COPIES)
    for path in (*kernels.iterdir(), kernels.parent / "host_device.h"):
        name = path.with_suffix(".cpp") if path.suffix == ".cu" else path
        name.write_text(translated_kernel(path), encoding="utf-8")
    for path in (bindings / "cuda_launch.h", bindings / "ops_cuda.cpp"):
        path.write_text(translated_binding(path), encoding="utf-8")

    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    with_torch = [f"-isystem{path}" for path in includes]
    with_torch += [
        "-O1",  # bindings: little runs there, and -O2 takes twice as long to compile
        '-DFASTAGG_TORCH_VERSION="emulated"',
        '-DFASTAGG_CUDA_ARCHS=""',
        "-pthread",
    ]
    checked = sorted(kernels.glob("*.cpp"))
    # The largest source first: it takes longest to compile.
    others = ("ops_cuda", *BINDINGS)
    (bindings / "bindings.cpp").write_text("".join(f'#include "{name}.cpp"\n' for name in others))
    sources = [bindings / "bindings.cpp", HERE / "tensors.cpp", *checked]
    # module.cpp and ops_policy.cpp call them.
    of_the_host = ("cache.cpp", "simd.cpp", "scratch.cpp", "gram_memory.cpp", "nearest_rows.cpp")
    sources += [kernels.parent / "cpu" / name for name in of_the_host]
    sources += [HERE / name for name in RUNTIME]
    objects = _compile(
        folder, sources, lambda path: COMMON + (CHECKED if path in checked else with_torch)
    )
    libraries = Path(torch.__file__).parent / "lib"
    target = folder / "fastagg" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    target.with_name("_built_for.py").write_text(f"TORCH = {str(torch.__version__)!r}\n")
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    linked += ["-ltorch_python", "-pthread", "-o", str(target)]
    subprocess.run([*_compiler(), "-shared", *objects, *linked], check=True)


def build_faults(folder: Path) -> Path:
    """Build the program that takes the name of a fault and must be stopped by the checks."""
    faults = HERE / "faults.cpp"
    sources = [faults, *(HERE / name for name in RUNTIME)]
    objects = _compile(folder, sources, lambda path: COMMON + (CHECKED if path == faults else []))
    program = folder / "faults"
    subprocess.run([*_compiler(), *objects, "-o", str(program)], check=True)
    return program


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    build(target)
