# SPDX-License-Identifier: Apache-2.0
"""Build fastagg with its CUDA kernels in place of the CPU's, emulated on the CPU.

``build(folder)`` copies the package, translates the kernels (launches, a few lines of assembly),
registers the CUDA bindings for CPU tensors, and compiles all of it with the C++ compiler. What is
then called as ``fastagg.ops`` with tensors on the CPU runs the code of the CUDA kernels.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent


def without(source: str, start: str) -> str:
    """The source less the function whose text begins with ``start``."""
    begin = source.index(start)
    return source[:begin] + source[source.index("\n}\n", begin) + 3 :]


def translated_kernel(path: Path) -> str:
    """A kernel's source for the emulator."""
    s = path.read_text(encoding="utf-8")
    s = re.sub(r"#include <cuda_runtime(_api)?\.h>", '#include "cuda_on_cpu.h"', s)
    s = s.replace("__host__ __device__ __forceinline__", "inline")
    s = s.replace("extern __shared__ float4 shared[];", "float4* shared = emulated_shared();")
    if path.name == "gram_mma.cuh":
        s = without(s, "__device__ __forceinline__ uint32_t round_pair")
        s = without(s, "__device__ __forceinline__ uint32_t round_tf32")
        s = without(s, "__device__ __forceinline__ void mma_bf16(")
        s = without(s, "__device__ __forceinline__ void mma_tf32(")
    if path.name == "gram_few_cuda.cu":
        s = without(s, "template <int kBytes>\n__device__ __forceinline__ void copy_async")
        s = re.sub(r'asm volatile\("cp\.async\.(commit|wait)[^;]*;[^;]*\);', ";", s)
    launch = re.compile(r"([A-Za-z_][\w:]*(?:<[\w:, ]*>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
    return launch.sub(r"launch_on_cpu(\1, \2)(", s)


def translated_binding(path: Path) -> str:
    """A CUDA binding for tensors on the CPU."""
    s = path.read_text(encoding="utf-8")
    s = re.sub(r"#include <c10/cuda/.*\n", "", s)
    s = re.sub(r"TORCH_CHECK_VALUE\(device\.is_cuda\(\).*?;\n", "", s, count=1, flags=re.DOTALL)
    s = s.replace("c10::cuda::CUDAGuard guard_;", "").replace(", guard_(device)", "")
    s = re.sub(r"return c10::cuda::getCurrentCUDAStream.*?;", "return nullptr;", s)
    s = s.replace("cudaGetErrorString(error)", '"an error"')
    return s.replace("TORCH_LIBRARY_IMPL(fastagg, CUDA, m)", "TORCH_LIBRARY_IMPL(fastagg, CPU, m)")


def build(folder: Path) -> None:
    """Make ``folder`` a place from which ``import fastagg`` gets the emulated kernels."""
    kernels, bindings = folder / "csrc/kernels", folder / "csrc/bindings"
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "fastagg", folder / "fastagg", ignore=shutil.ignore_patterns("_C*.so"))
    for path in (*kernels.glob("*.cu"), *kernels.glob("*.cuh"), *kernels.glob("*.h")):
        if path.suffix == ".cu" or "cuda" in path.read_text(encoding="utf-8"):
            name = path.with_suffix(".cpp") if path.suffix == ".cu" else path
            name.write_text(translated_kernel(path), encoding="utf-8")
    for path in (bindings / "cuda_launch.h", binding := bindings / "ops_cuda.cpp"):
        path.write_text(translated_binding(path), encoding="utf-8")

    compiler = shlex.split(os.environ.get("CXX", "c++"))
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-O1", "-fPIC", "-std=c++17", "-fopenmp", "-w", f"-I{HERE}"]
    flags += [f"-isystem{path}" for path in includes]
    flags += ['-DFASTAGG_TORCH_VERSION="emulated"', '-DFASTAGG_CUDA_ARCHS=""']
    sources = [*kernels.glob("*_cuda.cpp"), kernels / "simd.cpp", HERE / "runtime.cpp", binding]
    sources += [bindings / f"{name}.cpp" for name in ("library", "module", "ops_policy")]
    objects = []
    for source in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    libraries = Path(torch.__file__).parent / "lib"
    target = folder / "fastagg" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    linked += ["-ltorch_python", "-fopenmp", "-o", str(target)]
    subprocess.run([*compiler, "-shared", *objects, *linked], check=True)
