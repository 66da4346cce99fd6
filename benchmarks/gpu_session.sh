#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build, check, test, measure and sanitize on a machine with a GPU, in one run.
#
#   benchmarks/gpu_session.sh FOLDER [SECONDS]
#
# Uses the installed torch, nvcc and Python (PYTHON=python3), offline and without make, and the
# packages in PYTHONPATH. The tests need pytest and numpy, some also hypothesis. Builds in place for
# the GPU of this machine. Every stage has its own time limit; SECONDS (default 540) limits all
# stages together.
# FOLDER receives seven files, written as results come: summary.txt, build.log, tests.log,
# bench.log, cuda.csv, cuda.md and sanitizers.log. The exit status is 1 if a stage did not pass.
#
# STAGES=REGEX runs only stages whose names match, after the first two, and is for work on kernels.
#
# REHEARSAL=1 runs the commands of all stages on the CPU, with the extension that is already built,
# as far as they go there. It tests this script, not the kernels.
# shellcheck disable=SC2329 # functions are called by bash -c
set -uo pipefail
[ $# -ge 1 ] || { sed -n '3,/^# shellcheck/{/^# shellcheck/d; s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
limit=${2:-540}

# Print a path as an absolute one: stages run in other folders than the caller.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }

python=${PYTHON:-python3}
case $python in */*) python=$(absolute "$python") ;; esac
carried=
IFS=: read -r -a folders <<<"${PYTHONPATH:-}"
for folder in "${folders[@]}"; do
  [ -z "$folder" ] || carried+=:$(absolute "$folder")
done
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
rehearsal=${REHEARSAL:-}
only=${STAGES:-}
cores=$(nproc) # before OMP_NUM_THREADS, which nproc heeds
device=cuda
[ -n "$rehearsal" ] && device=cpu
export PYTHONPATH=$PWD:$PWD/python$carried PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export HYPOTHESIS_PROFILE=ci PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo # process groups on a host without a network
failed=0
rm -f "$out"/{summary.txt,build.log,tests.log,bench.log,sanitizers.log,cuda.csv,cuda.md}
: >"$out/summary.txt"

say() { echo "$*" | tee -a "$out/summary.txt"; }

# stage NAME SECONDS LOG COMMAND...: run COMMAND with a time limit of SECONDS, or of the remaining
# total time if that is shorter; add its output to LOG. SECONDS may be "rest": the remaining time.
# Interrupts the command at the limit, so that Python can say where it was, then kills it.
stage() {
  local name=$1 most=$2 log=$out/$3 left=$((limit - SECONDS)) start=$SECONDS status size
  if [ -n "$rehearsal" ] && [ "$most" != rest ]; then most=$((3 * most)); fi  # other tests run beside it
  shift 3
  if [ -n "$only" ] && [[ ! $name =~ ^(GPU|build)$|$only ]]; then
    say "$name: not asked for"
    return
  fi
  [ "$most" != rest ] && [ "$most" -le "$left" ] || most=$left
  if [ "$most" -lt 5 ]; then
    say "$name: NOT RUN, the total time limit is reached"
    failed=1
    return 1
  fi
  touch "$log"
  size=$(wc -c <"$log")
  echo "=== $name, at $start s, at most $most s" | tee -a "$log"
  timeout --signal=INT --kill-after=5 "$most" "$@" >>"$log" 2>&1
  status=$?
  case $status in
    0) say "$name: ok, $((SECONDS - start)) s"; return ;;
    77) say "$name: NOT RUN: $(tail -n 1 "$log")" ;;
    124 | 137) say "$name: FAILED, ended after $((SECONDS - start)) s" ;;
    *) say "$name: FAILED (status $status), $((SECONDS - start)) s" ;;
  esac
  failed=1
  tail -c "+$((size + 1))" "$log" | tail -n 25
  return 1
}

# at_least SECONDS LATER MOST: print SECONDS or, if more is left, what the later stages do not need of it,
# at most MOST.
at_least() {
  local most=$((limit - SECONDS - $2))
  [ "$most" -le "$3" ] || most=$3
  [ "$most" -ge "$1" ] || most=$1
  echo "$most"
}

environment() {
  echo "shell $BASH_VERSION, $cores cores, PYTHONPATH $PYTHONPATH"
  nvidia-smi || echo "no nvidia-smi"
  echo "CUDA_HOME ${CUDA_HOME:-not found}, nvcc $(command -v nvcc || echo 'not on PATH')"
  [ -z "${CUDA_HOME:-}" ] || "$CUDA_HOME/bin/nvcc" --version
  "$python" - <<'PY'
import importlib.metadata
import sys

print("Python", sys.version, sys.executable)
for name in ("torch", "setuptools", "ninja", "numpy", "pytest", "hypothesis", "safetensors"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "MISSING")
PY
}

# Print the folder that has torch, where pip puts CUDA.
site_packages() {
  "$python" -c 'import importlib.util as u, pathlib as p
print(p.Path(u.find_spec("torch").origin).parent.parent)'
}

# Print the toolkit's folder. torch takes the folder above `which nvcc`, which is wrong if that is a
# wrapper in another folder; nvcc itself knows.
toolkit() {
  local nvcc top packages
  if [ -n "${CUDA_HOME:-}" ]; then
    echo "$CUDA_HOME"
    return
  fi
  packages=$(site_packages)
  for nvcc in "$(command -v nvcc)" /usr/local/cuda/bin/nvcc "$packages"/nvidia/cu*/bin/nvcc; do
    [ -x "$nvcc" ] || continue
    top=$("$nvcc" --dryrun -E -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
    [ -n "$top" ] && [ -x "$top/bin/nvcc" ] || continue
    (cd "$top" && pwd -P)
    return
  done
}

# Print the folders in which the linker is to look for libcudart.so: a toolkit from pip has it only
# with a version, for which this makes a link.
runtime_folders() {
  local folder found packages
  packages=$(site_packages)
  for folder in "${CUDA_HOME:-}"/{lib64,lib,targets/x86_64-linux/lib} "$packages"/nvidia/{cu*,cuda_runtime}/lib; do
    [ -e "$folder/libcudart.so" ] && { echo "$folder"; return; }
  done
  for found in "${CUDA_HOME:-}"/{lib64,lib,targets/x86_64-linux/lib}/libcudart.so.* \
    "$packages"/nvidia/{cu*,cuda_runtime}/lib/libcudart.so.*; do
    [ -e "$found" ] || continue
    mkdir -p build/gpu-libraries
    ln -sf "$found" build/gpu-libraries/libcudart.so
    echo "$PWD/build/gpu-libraries"
    return
  done
}

# Check that torch has CUDA and sees a GPU. Status 77: it does not.
find_gpu() {
  environment
  [ -n "$rehearsal" ] && return
  "$python" - <<'PY'
import sys

import torch

if not torch.version.cuda or not torch.cuda.is_available():
    what = "no GPU is available" if torch.version.cuda else "it has no CUDA"
    print(f"torch {torch.__version__}: {what}")
    sys.exit(77)
print("torch", torch.__version__, "for CUDA", torch.version.cuda)
print(torch.cuda.get_device_properties(0))
PY
}

# Build in a copy without pyproject.toml: setuptools before 77 rejects its license, and setup.py has
# all that this build needs. An earlier build in this copy is continued: files that are the same keep
# their times.
build() {
  local tree=build/gpu arch file folder library ninja
  mkdir -p "$tree"
  cp -R setup.py write_stub.py "$tree"/
  shopt -s globstar nullglob
  for file in "$tree"/{csrc,fastagg}/**/*.*; do
    [ -e "${file#"$tree"/}" ] || rm -f "$file"
  done
  for file in {csrc,fastagg}/**/*.{cpp,h,cu,cuh,py,pyi,typed}; do
    [ -e "$tree/$file" ] && [ "$(<"$file")" = "$(<"$tree/$file")" ] && continue
    mkdir -p "$tree/${file%/*}"
    cp "$file" "$tree/$file"
  done
  shopt -u globstar nullglob
  rm -f "$tree"/fastagg/_C*.so "$tree"/fastagg/_built_for.py
  if [ -n "$rehearsal" ]; then
    (cd "$tree" && FASTAGG_CUDA=0 "$python" setup.py --version) # reads all settings; builds nothing
    return
  fi
  ninja=$("$python" -c 'import ninja; print(ninja.BIN_DIR)' 2>/dev/null) && PATH=$ninja:$PATH
  command -v ninja || echo "no ninja: files are compiled one by one, which takes minutes"
  folder=$(runtime_folders)
  echo "libcudart in ${folder:-no known folder}"
  [ -z "$folder" ] || export LIBRARY_PATH=$folder${LIBRARY_PATH:+:$LIBRARY_PATH}
  # A compiler without a shared libstdc++ would put a second one into the extension, and a number in
  # the text of an error would then end the process.
  if [ "$("${CXX:-g++}" -print-file-name=libstdc++.so)" = libstdc++.so ]; then
    library=$(ldconfig -p | sed -n 's/.*libstdc++\.so\.6 .*=> //p' | head -n 1)
    echo "libstdc++ of the system: ${library:-not found}"
    [ -z "$library" ] || export LDFLAGS="${LDFLAGS:-} -Wl,--no-as-needed $library"
  fi
  arch=$("$python" -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') || return
  (cd "$tree" && FASTAGG_CUDA=1 TORCH_CUDA_ARCH_LIST=$arch MAX_JOBS=${MAX_JOBS:-$cores} \
    "$python" setup.py build_ext --inplace) || return
  cp -p "$tree"/fastagg/_C*.so "$tree"/fastagg/_built_for.py fastagg/
  "$python" -c 'from fastagg import ops; assert "cuda" in ops.devices(), "no CUDA kernels"'
}

# run_tests PATH...: with no plugins and no settings that depend on the versions of pytest and torch.
# Status 77: pytest is missing.
run_tests() {
  local status conftest=()
  "$python" -c 'import pytest, numpy' || { echo "pytest or numpy is missing"; return 77; }
  "$python" -c 'import hypothesis' 2>/dev/null || {
    echo "hypothesis is missing: without tests/conftest.py"
    conftest=(--noconftest)
  }
  "$python" -m pytest -v --tb=short --maxfail=10 -p no:cacheprovider -p benchmarks.report_at_once \
    -o "addopts=-ra --import-mode=importlib" -o minversion=0 -o filterwarnings=default "${conftest[@]}" "$@"
  status=$?
  if [ -n "$rehearsal" ] && [ "$status" -eq 5 ]; then
    return 0 # no tests: they need a GPU
  fi
  return "$status"
}

# sanitize TOOL: run every op under compute-sanitizer. Status 77: it is missing.
sanitize() {
  local folder program=(compute-sanitizer)
  for folder in "${CUDA_HOME:-}"/bin "${CUDA_HOME:-}"/compute-sanitizer; do
    command -v compute-sanitizer >/dev/null && break
    PATH=$PATH:$folder
  done
  program=(compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 50)
  if [ -n "$rehearsal" ]; then
    program=()
  elif ! command -v compute-sanitizer; then
    echo "there is no compute-sanitizer"
    return 77
  fi
  # torch's pool of memory would hide most accesses out of bounds.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${program[@]}" "$python" -m benchmarks.gpu_sanitized "$device"
}

CUDA_HOME=$(toolkit)
if [ -n "$CUDA_HOME" ]; then export CUDA_HOME; else unset CUDA_HOME; fi
export -f environment find_gpu build site_packages runtime_folders run_tests sanitize
export python out rehearsal device cores
bench=(--out "$out")
[ -n "$rehearsal" ] && bench+=(--dry-run)

[ -z "$rehearsal" ] || say "REHEARSAL on the CPU: nothing here is a result"
# The limits add up to 535 s. Benchmarks and sanitizers also get time that the stages before have left.
# The last stage gets the rest.
if stage "GPU" 60 build.log bash -c find_gpu && stage "build" 150 build.log bash -c build; then
  stage "self-check" 30 tests.log "$python" -m fastagg
  stage "Gram entries" 25 tests.log bash -c 'run_tests "$@"' - tests/cuda/test_gram_entries.py
  stage "GPU tests" 90 tests.log bash -c 'run_tests "$@"' - tests/cuda/test_gpu.py
  seconds=$(at_least 85 120 200) # the benchmarks begin nothing in the last 15
  stage "benchmarks" "$(at_least 85 120 200)" bench.log "$python" -m benchmarks.cuda "${bench[@]}" --seconds $((seconds - 15))
  rm -f "$out"/.cuda.{csv,md} # what was being written when the benchmarks were ended
  "$python" -m benchmarks.cuda_verdict "$out" >>"$out/summary.txt"
  stage "memcheck" "$(at_least 35 60 120)" sanitizers.log bash -c 'sanitize memcheck'
  stage "racecheck" "$(at_least 35 25 120)" sanitizers.log bash -c 'sanitize racecheck'
  stage "NCCL" 25 tests.log bash -c 'run_tests "$@"' - tests/cuda/test_nccl.py
  others=(tests/sim/test_on_cuda.py)
  if "$python" -c 'import hypothesis' 2>/dev/null; then
    others+=(tests/rules/test_devices.py tests/ops)
  else
    say "tests/rules, tests/ops: NOT RUN: hypothesis is missing"
    [ -n "$rehearsal" ] || failed=1
  fi
  stage "other tests" rest tests.log bash -c 'run_tests "$@"' - -k cuda "${others[@]}"
else
  say "stopped: the other stages need this"
fi
say "all: $SECONDS s"
echo
cat "$out/summary.txt"
exit $failed
