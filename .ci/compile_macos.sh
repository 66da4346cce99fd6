#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compile all C++ sources of the extension for macOS on ARM64, with warnings as errors. Nothing is linked or run.
#
#   .ci/compile_macos.sh ZIG PYTHON
#
#   ZIG      a Python with the package ziglang, which has Clang, libc++ and the headers of macOS
#   PYTHON   a Python with PyTorch. Their headers are those of this machine; macOS has the same, apart from sizes that
#            Python's configuration found, and these are the same on 64-bit Linux.
set -euo pipefail
cd "$(dirname "$0")/.."
zig=$1 python=$2
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# The oldest macOS with ARM64. -O1 runs the passes that find errors in vector code and loops. Zig's own sanitizer is off.
compile=("$zig" -m ziglang c++ -target aarch64-macos.11.0 -c -o "$out/object.o" -g0 -fPIC -fno-sanitize=undefined
  -Wall -Wextra -Wno-unused-parameter -Werror)
for file in csrc/kernels/cpu/*.cpp; do
  echo "$file"
  "${compile[@]}" -std=c++17 -O1 "$file"
done

# Templates of PyTorch: -O0 takes half of the time.
mapfile -t include < <("$python" -c '
import sysconfig, torch.utils.cpp_extension as e
print(*e.include_paths(), sysconfig.get_path("include"), sep="\n")')
echo csrc/bindings/bindings.cpp
"${compile[@]}" -std=c++20 -O0 "${include[@]/#/-isystem}" -DTORCH_EXTENSION_NAME=_C \
  '-DFASTAGG_TORCH_VERSION=""' '-DFASTAGG_CUDA_ARCHS=""' csrc/bindings/bindings.cpp
