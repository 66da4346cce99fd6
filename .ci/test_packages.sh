#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Do what a user does with the packages, in empty environments and outside of the checkout:
#   1. `make wheel` works where there are only torch, setuptools and ninja;
#   2. uv accepts the source distribution without isolation, for the torch that is there;
#   3. an isolated build of it fails at once, and says what to do;
#   4. `pip install` of the wheel works, its metadata and an import name the torch, and tests of the ops and rules pass on it.
# usage: test_packages.sh VENV TORCH CXXFLAGS    # an environment with uv; the requirement of torch, such as torch==2.13.0
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD venv=$root/$1 torch=$2 cxxflags=$3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
unset PYTHONPATH
export UV_FIND_LINKS=${UV_FIND_LINKS-${PIP_FIND_LINKS-}} # uv does not read the settings of pip
export UV_CACHE_DIR=$tmp/cache UV_LINK_MODE=hardlink

# environment NAME PACKAGE...
environment() {
  "$venv/bin/uv" venv --quiet --python "$venv/bin/python" "$tmp/$1"
  VIRTUAL_ENV=$tmp/$1 "$venv/bin/uv" pip install --quiet "${@:2}"
}

echo "== make wheel"
environment source "$torch" 'setuptools>=77' ninja
make --no-print-directory wheel "VENV=$1" "TORCH=$torch" "WHEEL_PYTHON=$tmp/source/bin/python" "WHEEL_CXXFLAGS=$cxxflags"
sdist=$(ls "$root"/dist/fastagg-*.tar.gz)
wheel=$(ls "$root"/dist/fastagg-*.whl)

echo "== the source distribution by uv"
VIRTUAL_ENV=$tmp/source "$venv/bin/uv" pip install --dry-run --no-build-isolation "$sdist" 2>&1 | tee "$tmp/uv.log"
grep '^ + fastagg @ ' "$tmp/uv.log"

echo "== an isolated build"
environment isolated pip
if "$tmp/isolated/bin/python" -m pip --disable-pip-version-check install --no-deps "$sdist" >"$tmp/isolated.log" 2>&1; then
  echo "it did not fail" >&2
  exit 1
fi
grep -- "--no-build-isolation" "$tmp/isolated.log"

# MiB of the extension that a user gets: 8 at most. Nobody gets one of -O0, in which every unrolled and inlined loop takes three
# times the room or more; then the optimized extension of the checkout is measured, and the limit of the one in the wheel only finds
# what does not belong there, such as debug information.
limit=8
if [[ " $cxxflags " == *" -O0 "* ]]; then
  size=$(stat -c %s "$root"/fastagg/_C*.so)
  if [ "$size" -ge $((limit << 20)) ]; then
    echo "the optimized extension of the checkout has $size bytes; the limit is $limit MiB" >&2
    exit 1
  fi
  limit=32
fi

echo "== the wheel by pip"
environment wheel "$torch" pip pytest hypothesis
"$tmp/wheel/bin/python" -m pip --disable-pip-version-check install --quiet "$wheel"
mkdir "$tmp/empty"
cp -R "$root/tests" "$root/pyproject.toml" "$tmp/empty"
(
  cd "$tmp/empty"
  ../wheel/bin/python - "$limit" <<'PY'
import importlib.metadata, pathlib, subprocess, sys, torch, fastagg
root = pathlib.Path(sys.prefix)
assert root in pathlib.Path(fastagg.__file__).parents, fastagg.__file__
minor = ".".join(torch.__version__.split(".")[:2])
assert fastagg.__version__.endswith(f"+torch{minor}"), fastagg.__version__
assert f"torch=={minor}.*" in importlib.metadata.requires("fastagg")
other = "import torch; torch.__version__ = '1.0.0'; import fastagg"
error = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True).stderr
assert f"built for torch {torch.__version__}, and torch 1.0.0 is installed" in error, error
assert f"pip install 'torch=={minor}.*'" in error and "--no-build-isolation" in error, error
limit = int(sys.argv[1]) << 20
size = sum(file.stat().st_size for file in (root / "lib").rglob("fastagg/_C*.so"))
assert 0 < size < limit, f"the extension of the wheel has {size} bytes; the limit is {limit}"
package = pathlib.Path(fastagg.__file__).parent
assert (package / "py.typed").exists() and (package / "streaming.pyi").exists()
assert "FDMS" in (package / "making.pyi").read_text()
print(fastagg.__version__, f"{size / 1e6:.1f} MB")
PY
  HYPOTHESIS_PROFILE=quick ../wheel/bin/python -m pytest -q -m "not slow" -k "not portable" -p no:cacheprovider \
    tests/ops/test_gram.py tests/ops/test_rows.py tests/ops/test_policy.py tests/rules/test_fdms.py tests/rules/test_mimic.py
)
