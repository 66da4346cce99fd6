# SPDX-License-Identifier: Apache-2.0
"""Build the extension fastagg._C. All other settings are in pyproject.toml.

FASTAGG_CUDA=auto (default): build the CUDA kernels if torch and the machine have CUDA; 0: never
build them; 1: build them, or fail. The build needs a CUDA toolkit, not a GPU.

FASTAGG_SANITIZE=1: build with AddressSanitizer and UndefinedBehaviorSanitizer, for `make sanitize`.
"""

import os
import platform
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def with_cuda() -> bool:
    wish = os.environ.get("FASTAGG_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"FASTAGG_CUDA: expected auto, 0 or 1, got {wish!r}")
    missing = [
        what
        for what, there in [
            ("a torch built with CUDA", torch.version.cuda),
            ("a CUDA toolkit (set CUDA_HOME)", cpp_extension.CUDA_HOME),
        ]
        if not there
    ]
    if wish == "1" and missing:
        raise SystemExit("FASTAGG_CUDA=1, but there is no: " + "; ".join(missing))
    return wish != "0" and not missing


cuda = with_cuda()
archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0") if cuda else ""
cxx_sources = [s for s in sources("csrc/**/*.cpp") if cuda or not s.endswith("_cuda.cpp")]
cxx_sources.sort(key=lambda s: "bindings" in s)  # kernels first: some take most of the build's time
extension = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
optimize, sanitize = ["-O3"], []
if platform.machine() == "aarch64":
    # On this target, GCC moves loads ahead before it allocates registers, and then stores sums of
    # Gram tiles, which fill all registers, on the stack. Processors reorder loads themselves.
    optimize.append("-fno-schedule-insns")
if os.environ.get("FASTAGG_SANITIZE") == "1":
    optimize = ["-O1", "-g1", "-fno-omit-frame-pointer"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    # These checks take a third of the time of the build. AddressSanitizer finds accesses through
    # bad pointers; pointers that are only computed, and never used, are not found.
    sanitize.append("-fno-sanitize=null,object-size,pointer-overflow,vptr")
    if os.environ.get("FASTAGG_WITHOUT_AVX512") == "1":  # the tests run on this machine only
        optimize.append("-DFASTAGG_WITHOUT_AVX512")

setup(
    ext_modules=[
        extension(
            "fastagg._C",
            cxx_sources + (sources("csrc/**/*.cu") if cuda else []),
            depends=sources("csrc/**/*.h") + sources("csrc/**/*.cuh"),
            define_macros=[
                ("FASTAGG_TORCH_VERSION", f'"{torch.__version__}"'),
                ("FASTAGG_CUDA_ARCHS", f'"{archs}"'),
            ],
            extra_compile_args={
                "cxx": [
                    *optimize,
                    *sanitize,
                    "-pthread",
                    "-Wall",
                    "-Wextra",
                    "-Wno-unused-parameter",  # torch's headers
                ],
                "nvcc": ["-O3", "-lineinfo"],
            },
            extra_link_args=["-pthread", *sanitize],
        )
    ],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
)
