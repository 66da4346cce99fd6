# SPDX-License-Identifier: Apache-2.0
"""Build the extension fastagg._C, and name what it was built for. Other settings: pyproject.toml.

An extension works with the torch that it was built against, up to the minor version. So it is
built in the environment that will use it (--no-build-isolation), and a build's version and
requirements name this torch: 0.1.0+torch2.13 requires torch==2.13.*. A source distribution has
neither, and needs no torch.

FASTAGG_CUDA=auto (default): build the CUDA kernels if torch and the machine have CUDA; 0: never
build them; 1: build them, or fail. The build needs a CUDA toolkit, not a GPU.

CXXFLAGS: more flags for the compiler, after ours: -O0 compiles in half of the time.

FASTAGG_SANITIZE=1: build with AddressSanitizer and UndefinedBehaviorSanitizer, for `make sanitize`.
"""

import os
import platform
import re
import runpy
import shlex
import sys
from pathlib import Path

from setuptools import setup

if sys.platform == "win32":
    raise SystemExit(
        "fastagg does not support Windows: its kernels use vector extensions of GCC and Clang that "
        "MSVC lacks; install it in WSL instead."
    )

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    torch, missing_torch = None, error

VERSION = "0.1.0"
OLDEST_TORCH = "2.6"
ROOT = Path(__file__).parent
REQUIRES = ["numpy>=1.26", "safetensors>=0.4.3"]
WITHOUT_EXTENSION = ("egg_info", "--version")  # commands that build nothing


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def description() -> dict[str, str]:
    """Return README.md with absolute links, which work on the page of a package index, too."""
    if not (ROOT / "pyproject.toml").exists():  # make gpu-check builds without it
        return {}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = re.search(r'^Repository = "(.+)"', project, re.MULTILINE)[1]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{address}/raw/main/", text)
    text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{address}/blob/main/", text)
    return {"long_description": text, "long_description_content_type": "text/markdown"}


def with_cuda() -> bool:
    wish = os.environ.get("FASTAGG_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"FASTAGG_CUDA: expected auto, 0 or 1, got {wish!r}")
    home = cpp_extension.CUDA_HOME
    missing = [
        what
        for what, there in [
            ("a torch built with CUDA", torch.version.cuda),
            ("a CUDA toolkit (set CUDA_HOME)", home),
            # Some packages install nvcc alone.
            (
                f"cuda_runtime.h in {home}/include",
                not home or Path(home, "include", "cuda_runtime.h").is_file(),
            ),
        ]
        if not there
    ]
    if wish == "1" and missing:
        raise SystemExit("FASTAGG_CUDA=1, but there is no: " + "; ".join(missing))
    return wish != "0" and not missing


def compile_flags() -> list[str]:
    flags = ["-g0", "-O3"]  # debug information would be nine tenths of the file
    flags.append("-fno-math-errno")  # otherwise GCC does not vectorize square roots
    if platform.machine() == "aarch64":
        # On this target, GCC moves loads ahead before it allocates registers, and then stores
        # sums of Gram tiles, which fill all registers, on the stack. Processors reorder loads
        # themselves.
        flags += ["-fno-schedule-insns", "-Wno-ignored-optimization-argument"]  # Clang has none
    if sanitize_flags():
        flags = ["-Og", "-g1", "-fno-omit-frame-pointer", *sanitize_flags()]
    # -Wno-unused-parameter: torch's headers. -Wno-psabi: see csrc/kernels/cpu/simd.h; GCC prints
    # its note about vectors in spite of the pragma there.
    flags += ["-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi"]
    return [*flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]  # torch passes on CFLAGS only


def sanitize_flags() -> list[str]:
    if os.environ.get("FASTAGG_SANITIZE") != "1":
        return []
    return [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        # These checks take more than half of the time of the build. AddressSanitizer finds accesses
        # through bad pointers; pointers that are only computed, and never used, are not found.
        # x86-64 and ARM64 read numbers at any address, so alignment is not checked, either.
        "-fno-sanitize=alignment,null,object-size,pointer-overflow,vptr",
        # Accesses are checked by calls, which compile in half of the time.
        "--param=asan-instrumentation-with-call-threshold=0",
    ]


def extension() -> dict[str, object]:
    """Return the arguments of setup() that describe the extension and the torch it is built for."""
    if torch is None:
        raise SystemExit(
            "fastagg is compiled against the torch that it will run with, and this build sees none "
            f"({missing_torch}). Install torch, setuptools and ninja first, then build without "
            "isolation:\n    pip install torch 'setuptools>=77' ninja\n"
            "    pip install --no-build-isolation <fastagg>"
        )
    cuda = with_cuda()
    archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0") if cuda else ""
    # Kernels first: some take the longest.
    cxx_sources = [*sources("csrc/kernels/**/*.cpp"), "csrc/bindings/bindings.cpp"]
    if cuda:
        cxx_sources.append("csrc/bindings/ops_cuda.cpp")
    minor = ".".join(torch.__version__.split(".")[:2])

    class BuildExtension(cpp_extension.BuildExtension):
        """Also write what is not committed: the torch of the extension, and types of the rules.

        fastagg reads fastagg/_built_for.py before it loads the extension.
        """

        def run(self) -> None:
            super().run()
            folder = (ROOT if self.inplace else Path(self.build_lib)) / "fastagg"
            lines = [
                "# SPDX-License-Identifier: Apache-2.0",
                '"""Written by setup.py: the torch that the extension beside it was built for."""',
                "",
                f"TORCH = {str(torch.__version__)!r}",
            ]
            (folder / "_built_for.py").write_text("\n".join(lines) + "\n")
            runpy.run_path(str(ROOT / "write_stub.py"))["write"](folder)

    kind = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    module = kind(
        "fastagg._C",
        cxx_sources + (sources("csrc/**/*.cu") if cuda else []),
        depends=[
            *sources("csrc/**/*.h"),
            *sources("csrc/**/*.cuh"),
            *sources("csrc/bindings/*.cpp"),  # bindings.cpp includes them
        ],
        define_macros=[
            ("FASTAGG_TORCH_VERSION", f'"{torch.__version__}"'),
            ("FASTAGG_CUDA_ARCHS", f'"{archs}"'),
        ],
        extra_compile_args={"cxx": compile_flags(), "nvcc": ["-O3", "-lineinfo"]},
        extra_link_args=["-pthread", *sanitize_flags()],
    )
    return {
        "version": f"{VERSION}+torch{minor}",
        "install_requires": [f"torch=={minor}.*", *REQUIRES],
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
    }


if "sdist" in sys.argv or (torch is None and set(WITHOUT_EXTENSION) & set(sys.argv)):
    built = {"version": VERSION, "install_requires": [f"torch>={OLDEST_TORCH}", *REQUIRES]}
else:
    built = extension()
setup(**description(), **built)
