#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build, check, test, measure and sanitize on a machine with a GPU, in one run.
#
#   benchmarks/gpu_session.sh FOLDER [SECONDS]
#
# Uses the installed torch, nvcc and Python (PYTHON=python3), offline; the tests need pytest,
# hypothesis and numpy. Builds in place for the GPU of this machine. Every stage has its own time
# limit; SECONDS (default 540) limits all stages together. FOLDER receives a log of each stage,
# cuda.csv, cuda.md and summary.txt. The exit status is 1 if a stage failed.
set -uo pipefail
[ $# -ge 1 ] || { sed -n 's/^# \{0,1\}//p' "$0" | sed -n '2,10p' >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
limit=${2:-540}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/python PYTHONUNBUFFERED=1 HYPOTHESIS_PROFILE=ci OMP_NUM_THREADS=4
failed=0
: >"$out/summary.txt"

say() { echo "$*" | tee -a "$out/summary.txt"; }

# stage NAME SECONDS LOG COMMAND...: run COMMAND with a time limit of SECONDS, or of the remaining
# total time if that is shorter.
stage() {
  local name=$1 most=$2 log=$out/$3 left=$((limit - SECONDS)) start=$SECONDS status
  shift 3
  [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 5 ]; then
    say "$name: NOT RUN, the total time limit is reached"
    failed=1
    return
  fi
  timeout --kill-after=5 "$most" "$@" >"$log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    say "$name: ok, $((SECONDS - start)) s"
  else
    say "$name: FAILED (status $status; 124 means timeout), $((SECONDS - start)) s"
    failed=1
    tail -n 15 "$log"
  fi
}

environment() {
  nvidia-smi
  nvcc --version
  "$python" --version
  "$python" - <<'PY'
import importlib.util
import torch

print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.get_device_name())
print(torch.cuda.get_device_properties(0))
for name in ("numpy", "pytest", "hypothesis", "ninja", "safetensors"):
    print(name, "installed" if importlib.util.find_spec(name) else "MISSING")
PY
}

build() {
  local arch
  environment
  arch=$("$python" -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') || return
  FASTAGG_CUDA=1 TORCH_CUDA_ARCH_LIST=$arch "$python" setup.py build_ext --inplace
}

# Small shapes of both Gram kernels, every op, TF32, and rows of 16-bit floats; all tools in parallel.
sanitize() {
  local tool status=0 pids=() tools=(memcheck racecheck initcheck synccheck)
  for tool in "${tools[@]}"; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -c '
import torch
from fastagg import ops
from fastagg.ops import selfcheck
for K, S, d in ((9, 5, 1003), (60, 50, 2048), (150, 135, 601)):
    checks = selfcheck.run(K, S, d, device="cuda")
    print([check.op for check in checks if not check.passed] or "all agree")
    rows = torch.ones(S, d, device="cuda")
    print("TF32", (ops.gram(rows, precision="tf32") == d).all().item())
    for short in (rows.bfloat16(), rows.half()):
        params, total = torch.zeros(d, device="cuda"), torch.zeros(d, device="cuda").double()
        memory, clients = torch.zeros(K, d, device="cuda"), torch.arange(S)
        ops.weighted_sum_(params, short, torch.ones(S))
        ops.mimic_(params, short, memory, clients, 1.0)
        ops.memory_update_(params, total, memory, short, clients, torch.ones(S), 1.0, 1.0)
        print(short.dtype, (memory[:S] == 1).all().item())
' >"$out/sanitizer.$tool" 2>&1 &
    pids+=($!)
  done
  for tool in "${!tools[@]}"; do
    wait "${pids[$tool]}" || status=1
    echo "=== ${tools[$tool]}"
    head -c 200000 "$out/sanitizer.${tools[$tool]}"
    rm -f "$out/sanitizer.${tools[$tool]}"
  done
  return $status
}

export -f environment build sanitize
export python out
stage "build" 240 build.log bash -c build
stage "self-check" 60 check.log "$python" -m fastagg
stage "tests" 170 tests.log "$python" -m pytest -q -p no:cacheprovider -k cuda \
  --ignore tests/cuda/test_emulated.py tests/cuda tests/ops tests/rules/test_devices.py
stage "simulation" 90 simulation.log "$python" -m pytest -q -p no:cacheprovider tests/sim/test_on_cuda.py
stage "benchmarks" 200 bench.log "$python" -m benchmarks.cuda --out "$out" --seconds 150
stage "sanitizers" 150 sanitizers.log bash -c sanitize
say "all: $SECONDS s"
exit $failed
