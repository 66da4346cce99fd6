#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a Python environment of ARM64 (AArch64) in FOLDER, which runs in an emulator:
#
#   tests/arm/environment.sh FOLDER PYTHON
#
#   FOLDER/debian   Debian packages: Python with its headers, libraries
#   FOLDER/site     wheels: PyTorch for CPUs, and what the op tests import
#   FOLDER/python   the emulated Python. It starts other programs of this machine, such as compilers, natively.
#
# PYTHON, with pip, downloads the wheels. Needs qemu-user and an apt-get whose sources have arm64 (Debian's do). It
# needs no root and changes nothing outside FOLDER.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
python=$2
# A version of which the package index has an ARM64 wheel without CUDA, which is a quarter of the size.
torch=${TORCH_ARM:-torch==2.9.1}

for tool in apt-get dpkg-deb aarch64-linux-gnu-g++; do
  command -v $tool >/dev/null || { echo "tests/arm: $tool not found (Debian: apt-get install g++-aarch64-linux-gnu)" >&2; exit 1; }
done
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) ||
  { echo "tests/arm: no qemu-aarch64 (Debian: apt-get install qemu-user-static)" >&2; exit 1; }

# apt-get with lists, cache and installed packages of its own: all dependencies are downloaded.
apt=$folder/apt
mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
: >"$apt/state/status"
options=(-qq -o "APT::Architecture=arm64" -o "APT::Architectures=arm64" -o "Dir::State=$apt/state"
  -o "Dir::State::status=$apt/state/status" -o "Dir::Cache=$apt/cache" -o "Debug::NoLocking=1")
apt-get "${options[@]}" update
apt-get "${options[@]}" install --yes --no-install-recommends --download-only \
  python3-minimal libpython3-stdlib libpython3-dev libgomp1 libstdc++6
rm -rf "$folder/debian"
mkdir "$folder/debian"
for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/debian"; done
rm -rf "$apt"

cat >"$folder/debian/usr/bin/python-emulated" <<EOF
#!/bin/sh
exec "$qemu" -L "$folder/debian" -0 "$folder/debian/usr/bin/python-emulated" "$folder/debian/usr/bin/python3" "\$@"
EOF
chmod +x "$folder/debian/usr/bin/python-emulated"
ln -sf debian/usr/bin/python-emulated "$folder/python"
version=$("$folder/debian/usr/bin/python-emulated" -c 'import sys; print("%d%d" % sys.version_info[:2])')

# Without --no-deps, pip would read the markers of this machine: it takes the dependencies of x86-64.
platforms=(--platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64)
rm -rf "$folder/site"
"$python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$folder/site" --only-binary=:all: \
  "${platforms[@]}" --python-version "$version" --implementation cp --abi "cp$version" --abi abi3 --abi none \
  "$torch" numpy filelock typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec \
  setuptools packaging pytest pluggy iniconfig pygments pytest-xdist execnet hypothesis sortedcontainers attrs safetensors
