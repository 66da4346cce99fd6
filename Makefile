# SPDX-License-Identifier: Apache-2.0
# Needs Python >= 3.10 (with venv), make, and a compiler for the C++ standard of PyTorch's extensions
# (C++20 for PyTorch 2.13). Everything else goes into $(VENV).
# Set-up steps leave stamp files there: a step runs again only when its inputs have changed.
# The Python, PyTorch and VENV_ARGS of an existing $(VENV) are kept; `make distclean` starts afresh.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# e.g. VENV_ARGS=--system-site-packages TORCH=torch to build against a PyTorch of the system
VENV_ARGS ?=
# auto, 0 or 1: whether to build the CUDA kernels
FASTAGG_CUDA ?= auto
# the commit that bench-regress compares this tree with
BASE ?= HEAD
# more arguments for pytest, fastagg-sim or the benchmarks: make test ARGS="-k fdms"
ARGS ?=

export FASTAGG_CUDA
# An active venv and its settings must not affect $(VENV). Without cached bytecode, each of the many
# processes that the tests start compiles the tests again, which takes seconds.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(foreach ext,h cpp cuh cu,$(wildcard csrc/*/*.$(ext) csrc/*/*/*.$(ext)))
# the types of fastagg.make
STUB := fastagg/making.pyi
CXX_SOURCES := $(filter csrc/%,$(SOURCES)) $(wildcard benchmarks/*.cpp tests/*/*.cpp tests/*/*/*.cpp tests/*/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-long test-benchmarks test-pages test-emulator test-flower test-peers flower-environment build build-dev sanitize valgrind lint format clean distclean FORCE
.PHONY: test-faults fuzz fuzz-files fuzz-threads fuzz-signals fuzz-long fuzz-disks fuzz-memory test-arm arm-environment
.PHONY: bench bench-accuracy bench-scaling bench-simulation bench-regress bench-ops bench-peers gpu-check docs emulate
.PHONY: sanitize-build wheel test-packages test-start matrix compile-macos macos-environment

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: build  ## set up, then compare five rules under client dropout on digits (< 3 minutes)
	$(VENV)/bin/fastagg-sim demo $(ARGS)

# One process per core; ARGS="-n 0" runs the tests in one process, as --pdb requires.
PARALLEL := -n auto --maxprocesses=8 --dist worksteal
PAGES := tests/pages
EMULATOR := tests/cuda/test_emulated.py
BENCHMARKS := $(wildcard tests/test_benchmark*.py) tests/cuda/test_gpu_benchmark.py
FAULTS := tests/fuzz tests/sim/test_killed_runs.py tests/integrations/test_http_example.py
test: build-dev  ## set up, then run all tests but those of pages, benchmarks, the emulator and faults (5 to 12 minutes on two cores)
	$(PY) -m pytest -q $(PARALLEL) $(patsubst %,--ignore=%,$(PAGES) $(EMULATOR) $(BENCHMARKS) $(FAULTS)) $(ARGS)

# Tests of the library, with the best instruction set only, and of the simulation's options, in one process.
QUICK := tests/ops tests/rules $(filter-out $(BENCHMARKS),$(wildcard tests/test_*.py)) \
  tests/sim/test_config.py
test-quick: build-dev  ## the tests to run before each commit: the library's, without slow ones (45 s)
	HYPOTHESIS_PROFILE=quick $(PY) -m pytest -q $(PARALLEL) -m "not slow" -k "not portable" $(QUICK) $(ARGS)

test-pages: build-dev  ## run the code, and check the commands, links and tables, of all pages
	$(PY) -m pytest -q $(PARALLEL) $(PAGES) $(ARGS)

test-benchmarks: build-dev  ## run the tests of the benchmark suite
	$(PY) -m pytest -q $(PARALLEL) $(BENCHMARKS) $(ARGS)

test-emulator: build-dev  ## run the CUDA kernels on the CPU and check their memory accesses (minutes)
	$(PY) -m pytest -q $(PARALLEL) $(EMULATOR) $(ARGS)

# Each call is made once, in one of many processes that may die; ARGS="--calls 20000" makes fewer.
test-faults: build-dev  ## short runs of all fuzzers, and simulations and servers that are killed and resumed
	$(PY) -m pytest -q $(PARALLEL) $(FAULTS) $(ARGS)

fuzz: build-dev  ## call every op and rule with hostile arguments, 10^6 times
	$(PY) -m tests.fuzz.ops $(ARGS)

fuzz-files: build-dev  ## damage, cut and forge checkpoints and client files, and count what is refused
	$(PY) -m tests.fuzz.checkpoints $(ARGS)

fuzz-threads: build-dev  ## step, save and load one aggregator of each rule in many threads
	$(PY) -m tests.fuzz.threads $(ARGS)

fuzz-signals: build-dev  ## interrupt steps of every rule by signals at random times; ARGS="--signals 10000"
	$(PY) -m tests.fuzz.signals $(ARGS)

fuzz-disks: build-dev  ## full, broken and read-only disks at every write of checkpoints, memory rows and results
	$(PY) -m tests.fuzz.disks $(ARGS)

fuzz-memory: build-dev  ## let memory run out at every allocation of a step, of every rule
	$(PY) -m tests.fuzz.memory $(ARGS)

fuzz-long: build-dev  ## run every rule for 10^5 steps: memory, descriptors and time per step must stay flat
	$(PY) -m tests.fuzz.long $(ARGS)

# Flower, pfl-research, NVFlare and FLGO need other versions of packages that the tools use, so they get a
# separate environment. It takes everything else from $(VENV).
FRAMEWORKS := $(VENV)/frameworks
test-flower: build-dev $(FRAMEWORKS)/.stamp  ## install Flower, pfl-research, NVFlare and FLGO in a separate environment, run the tests that need them
	$(FRAMEWORKS)/bin/python -m pytest -q $(PARALLEL) -m flower tests/integrations tests/pages $(ARGS)

# The first command skips the tests that need Flower; the second one runs those.
test-long: build-dev $(FRAMEWORKS)/.stamp  ## run the tests that the others leave out, because they are marked long (10 minutes)
	$(PY) -m pytest -q $(PARALLEL) --long -m long tests $(ARGS)
	$(FRAMEWORKS)/bin/python -m pytest -q $(PARALLEL) --long -m "flower and long" tests/integrations $(ARGS)

# Files of other projects are kept in a folder, and checked by digest before each run.
PEERS := $(VENV)/peers
test-peers: build-dev $(FRAMEWORKS)/.stamp  ## run ByzFL's and Flower's own tests on fastagg's callables and strategies
	$(FRAMEWORKS)/bin/python -m tests.peers --folder $(PEERS) $(ARGS)

flower-environment: $(FRAMEWORKS)/.stamp

# An emulated Python of ARM64 builds the package with a cross compiler, which runs natively, and runs
# the op tests with the NEON kernels. It leaves out the portable kernels, which no user gets on ARM64, and two files that test what is
# the same on every processor: registrations, and checks of tensors that overlap.
ARM := $(abspath $(VENV))/arm
ARM_TREE := build/arm/tree
ARM_PYTHON = PYTHONPATH=$(ARM)/site PYTHONDONTWRITEBYTECODE=1 $(ARM)/python
# Tests that start processes must find the package for ARM64 in them, too, and not that of the checkout.
ARM_TESTS = PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(ARM_TREE)):$(ARM)/site PYTHONDONTWRITEBYTECODE=1 $(ARM)/python
# Left out: so many rows and columns take 10 s to 10 minutes there, and go the same way with fewer or other numbers; statistics of sketches,
# whose bits another test compares with those of the portable kernels; and what processes of their own, which take 20 s to start, and
# several callers observe of threads, signals and the scheduler: they are those of the machine that emulates.
ARM_SAME := test_registration.py test_aliasing.py
ARM_LEFT_OUT := "test_gram.py::test_many_rows[1000-600]" "test_gram.py::test_many_rows[2045-600]" \
  "test_gram.py::test_many_rows[4096-600]" test_gram.py::test_many_rows_on_many_threads \
  "test_gram.py::test_against_oracle[neon-positive-41-40000]" "test_gram.py::test_against_oracle[neon-correlated-41-40000]" \
  "test_scratch.py::test_gram_needs_as_much_as_gram_scratch_returns[neon-400-4099-1]" \
  "test_scratch.py::test_gram_needs_as_much_as_gram_scratch_returns[neon-400-4099-3]" \
  "test_rounded_memory.py::test_the_bits_of_float32_rows_with_rounded_values[neon-41-400003-False]" \
  "test_rounded_memory.py::test_the_bits_of_float32_rows_with_rounded_values[neon-41-400003-True]" \
  "test_faded_total.py::test_against_the_oracle[neon-float32-25-400003]" \
  "test_faded_total.py::test_against_the_oracle[neon-rounded-25-400003]" \
  test_sketch.py::test_mean_and_variance test_sketch.py::test_error_of_cosines_falls_with_k \
  test_threads.py::test_concurrent_callers_share_the_threads_and_get_the_same_bits \
  test_threads.py::test_a_forked_process_starts_its_own_threads \
  test_threads.py::test_a_fork_during_calls_of_other_threads_locks_nothing \
  test_threads.py::test_small_calls_start_no_thread_and_helpers_block_signals \
  test_threads.py::test_a_helper_wakes_on_another_core_than_that_of_the_caller
test-arm: build-dev $(ARM)/.stamp  ## cross-compile for ARM64 and run the op tests in an emulator (qemu-user)
	mkdir -p build/arm  # metadata in this folder would be found before that of the installed package
	CXX=aarch64-linux-gnu-g++ CC=aarch64-linux-gnu-gcc CPLUS_INCLUDE_PATH=$(ARM)/debian/usr/include \
	  FASTAGG_CUDA=0 PATH="$(abspath $(VENV))/bin:$$PATH" \
	  $(ARM_PYTHON) setup.py --quiet egg_info --egg-base build/arm \
	  build --build-base build/arm --build-lib $(ARM_TREE)
	HYPOTHESIS_PROFILE=quick $(ARM_TESTS) -m pytest -q $(PARALLEL) -p no:cacheprovider -o "pythonpath=$(ARM_TREE) ." \
	  -k "not portable" tests/ops $(ARM_SAME:%=--ignore tests/ops/%) $(ARM_LEFT_OUT:%=--deselect tests/ops/%) $(ARGS)

arm-environment: $(ARM)/.stamp

# Clang with libc++ and the headers of macOS; a package of Python, of 100 MB. It keeps what it compiles of them.
MACOS := $(abspath $(VENV))/macos
ZIGLANG := 0.17.1
compile-macos: build $(MACOS)/.stamp-$(ZIGLANG)  ## compile all C++ sources for macOS on ARM64, on any system; nothing is linked or run
	ZIG_GLOBAL_CACHE_DIR=$(MACOS)/cache .ci/compile_macos.sh $(MACOS)/bin/python $(PY)

macos-environment: $(MACOS)/.stamp-$(ZIGLANG)

# The site is generated from the sources; the package is neither built nor imported. The theme warns at every build that it
# will reach its end of life; the answer is in docs/releasing.md, so the variable mutes the warning.
SITE := $(VENV)/site
docs: $(SITE)/.stamp  ## build the documentation site in build/site, with warnings as errors, and check it
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build $(ARGS)
	$(SITE)/bin/python docs/check_site.py build/site

bench: build-dev  ## ops and server steps against others: tables and a picture in benchmarks/results
	$(PY) -m benchmarks main $(ARGS)

bench-accuracy: build-dev  ## errors against float64 up to d = 1e8: tables and a picture in benchmarks/results
	$(PY) -m benchmarks accuracy --out benchmarks/results $(ARGS)

bench-scaling: build-dev  ## time over S, d, K and threads: a table in benchmarks/results
	$(PY) -m benchmarks scaling --out benchmarks/results $(ARGS)

bench-simulation: build-dev  ## local training and rounds of the simulation: a table in benchmarks/results
	$(PY) -m benchmarks simulation --out benchmarks/results $(ARGS)

bench-regress: build-dev  ## compare the speed of this tree with a commit: make bench-regress BASE=main~1
	$(PY) -m benchmarks regress --base $(BASE) $(ARGS)

bench-ops: build-dev  ## time single ops with pytest-benchmark and store the times
	$(PY) -m pytest -q benchmarks/test_ops_bench.py --benchmark-autosave $(ARGS)

# ByzFL without its dependencies: they require torchvision, which would install another PyTorch.
bench-peers: build-dev  ## install Flower and ByzFL, so that the benchmarks compare with them
	$(PIP) install --quiet "$(TORCH)" 'fastagg[bench]'
	$(PIP) install --quiet --no-deps 'byzfl>=0.0.11,<0.1'

gpu-check:  ## on a machine with a GPU: build with its torch, test, measure, sanitize; make gpu-check OUT=FOLDER
	@[ -n "$(OUT)" ] || { echo "make: gpu-check needs OUT=FOLDER for logs and figures" >&2; exit 2; }
	PYTHON="$(PYTHON)" PYTHONPATH="$(PYTHONPATH)" benchmarks/gpu_session.sh "$(OUT)"

EMULATED := build/emulated
emulate: build-dev  ## run the op tests and rounds of FDMS on emulated CUDA kernels and check memory accesses
	$(PY) tests/cuda/emulator/build.py $(EMULATED)
	PYTHONPATH=$(EMULATED) $(PY) -m pytest -q $(PARALLEL) -o pythonpath=$(EMULATED) tests/ops \
	  -k "cuda and not test_registration" $(ARGS)
	PYTHONPATH=$(EMULATED) $(PY) -m pytest -q -o pythonpath=$(EMULATED) tests/rules/test_enqueued.py

# Leak detection is off: Python and PyTorch leave much memory allocated on purpose. torch.compile,
# which test_registration.py runs, starts a compiler that fails with the preloaded libraries.
SANITIZED := build/sanitize/tree
# The kernels are templates of the width of vectors. Two widths are enough here: the 4 lanes of portable code, and the widest of this
# machine. valgrind runs those of AVX2.
sanitize-build: build-dev
	CXXFLAGS="$(CXXFLAGS) -DFASTAGG_WITHOUT_AVX$(if $(shell grep -s avx512bw /proc/cpuinfo),2,512)" \
	  FASTAGG_SANITIZE=1 FASTAGG_CUDA=0 $(PY) setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)

# Few random examples, and no slow tests, are enough here, since `make test` checks the results.
sanitize: sanitize-build  ## run the op tests under AddressSanitizer and UndefinedBehaviorSanitizer, the threads under ThreadSanitizer
	$(CXX) -std=c++17 -O1 -g -fsanitize=thread -pthread tests/ops/pool_race.cpp csrc/kernels/cpu/pool.cpp csrc/kernels/cpu/wake_core.cpp -o build/sanitize/pool_race
	build/sanitize/pool_race
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZED) HYPOTHESIS_PROFILE=quick \
	  $(PY) -m pytest -q $(PARALLEL) -m "not slow" -o pythonpath=$(SANITIZED) tests/ops \
	  --ignore tests/ops/test_registration.py --ignore tests/ops/test_vectors.py $(ARGS)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH=$(SANITIZED):. $(PY) tests/fuzz/ops.py --calls 2000

# The kernels alone, without Python and PyTorch: seconds instead of an hour. Each row is a separate
# heap allocation. Valgrind cannot run AVX-512.
MEMCHECK := build/memcheck/memcheck
$(MEMCHECK): tests/ops/memcheck.cpp $(wildcard csrc/kernels/*.h csrc/kernels/cpu/*)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -Og -g1 -Wall -Wextra -Wno-psabi -DFASTAGG_WITHOUT_AVX512 -pthread $(filter %.cpp,$^) -o $@

valgrind: $(MEMCHECK)  ## run the kernels under valgrind, which must be installed
	$(MEMCHECK)
	valgrind --quiet --leak-check=full --error-exitcode=1 $(MEMCHECK)

# The wheel is built from what is in the source distribution, so that nothing else of the checkout gets into it, and for the PyTorch of
# WHEEL_PYTHON. (uv refuses to build it from the file: the version of the wheel has the PyTorch, that of the source distribution has not.)
# WHEEL_CXXFLAGS=-O0 builds a slow one in half of the time, to test the packaging.
WHEEL := build/wheel
WHEEL_PYTHON := $(PY)
wheel: build $(VENV)/.stamp-wheel  ## dist/: the source distribution, and a wheel for the Python and PyTorch of the environment
	rm -rf $(WHEEL) dist && mkdir -p $(WHEEL)
	$(PY) setup.py --quiet egg_info --egg-base $(WHEEL) sdist --dist-dir dist
	mkdir $(WHEEL)/sources && tar xzf dist/fastagg-*.tar.gz -C $(WHEEL)/sources --strip-components 1
	CXXFLAGS="$(CXXFLAGS) $(WHEEL_CXXFLAGS)" $(VENV)/bin/uv build --quiet --wheel --no-build-isolation --python $(WHEEL_PYTHON) \
	  --out-dir $(WHEEL) $(WHEEL)/sources
	PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair --strip --exclude 'libtorch*' --exclude 'libc10*' \
	  --exclude 'libcudart*' --wheel-dir dist $(WHEEL)/fastagg-*.whl
	@ls -sh dist

test-packages: build $(VENV)/.stamp-wheel  ## make wheel in an environment that has only what it needs, and test it in an empty one
	.ci/test_packages.sh $(VENV) '$(TORCH)' '$(WHEEL_CXXFLAGS)'

# The page makes an environment of its own, with the wheel that `make wheel` or `make test-packages` left in dist/.
test-start:  ## execute docs/flower_start.md as it is written, in an empty folder; first make wheel
	PIP_FIND_LINKS="$$PIP_FIND_LINKS $(abspath dist)" FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 \
	  $(PY) .ci/run_page.py docs/flower_start.md $$(mktemp -d)/page --expect '^finished$$' --times 2

matrix: wheel  ## build and test for each Python and PyTorch that the index has: a table in benchmarks/results
	.ci/matrix.py --uv $(abspath $(VENV))/bin/uv $(ARGS)

lint: build-dev  ## ruff, clang-format, mypy and licence headers; changes nothing
	$(PY) .ci/check_sources.py
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(VENV)/bin/mypy

format: build-dev  ## let ruff and clang-format rewrite the sources
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

build: $(VENV)/.stamp-build $(STUB)  ## create the environment, with the built package and the simulation

build-dev: build $(VENV)/.stamp-dev  ## the same, with the tools for tests and checks

clean:  ## remove what builds, tests and tools leave behind; keep the environment
	rm -rf build dist *.egg-info python/*.egg-info fastagg/_C*.so fastagg/_built_for.py $(STUB)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
	rm -f $(VENV)/.stamp-build

distclean: clean  ## the same, and remove the environment
	rm -rf $(VENV)

# --- set-up ----------------------------------------------------------------------------------

define check_machine
	command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python >= 3.10 or set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $$($(PYTHON) --version) is too old; fastagg needs Python >= 3.10 (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { echo "make: no Python.h beside $(PYTHON); install its headers (Debian, Ubuntu: apt-get install python3-dev)" >&2; exit 1; }
	command -v $(firstword $(CXX)) >/dev/null || { echo "make: no C++ compiler ($(CXX)); install one (Debian, Ubuntu: apt-get install g++) or set CXX=..." >&2; exit 1; }
endef

# venv writes pyvenv.cfg first and pip late: the stamp marks a complete environment.
$(VENV)/.stamp-venv:
	@$(check_machine)
	[ -x $(PY) ] && $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV_ARGS) $(VENV)
	@touch $@

# PyTorch first and pinned: later installations must not replace it.
$(VENV)/.stamp-torch: $(VENV)/.choice-torch $(VENV)/.stamp-venv
	@echo "setting up $(VENV): $(TORCH); the first download can take minutes"
	$(PIP) install --quiet "$(TORCH)" 'setuptools>=77' wheel ninja
	@touch $@

$(VENV)/.stamp-build: $(VENV)/.stamp-torch $(VENV)/.choice-build $(SOURCES)
	@echo "building fastagg's extension, about a minute"
	$(PIP) install --quiet --no-build-isolation -e '.[sim]'
	@touch $@

# The build above writes it as well. A new, changed or removed rule needs no build.
$(STUB): write_stub.py fastagg/aggregator.py fastagg/rules $(wildcard fastagg/rules/*.py) | $(VENV)/.stamp-build
	$(PY) write_stub.py

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch | $(VENV)/.stamp-build
	$(PIP) install --quiet 'fastagg[dev]'
	@touch $@

$(VENV)/.stamp-wheel: pyproject.toml $(VENV)/.stamp-torch | $(VENV)/.stamp-build
	$(PIP) install --quiet 'fastagg[wheel]'
	@touch $@

# parameterized: Flower's own tests import it (make test-peers).
# FLGO without its dependencies: they have torchvision, whose usual build no CPU build of PyTorch can import, and
# pynvml, which warns in every process. FLGO needs neither for its tests.
$(FRAMEWORKS)/.stamp: pyproject.toml | $(VENV)/.stamp-dev
	$(PY) -m venv --clear $(FRAMEWORKS)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_main.pth"
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet 'fastagg[flower,pfl,nvflare,dp]'
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet networkx parameterized prettytable requests tqdm ujson
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps 'flgo>=0.4.4,<0.5'
	@touch $@

$(ARM)/.stamp: tests/arm/environment.sh | $(VENV)/.stamp-dev
	tests/arm/environment.sh $(ARM) $(PY)
	@touch $@

$(MACOS)/.stamp-$(ZIGLANG): $(VENV)/.stamp-venv
	$(PY) -m venv --clear $(MACOS)
	$(MACOS)/bin/python -m pip --disable-pip-version-check install --quiet ziglang==$(ZIGLANG)
	@touch $@

$(SITE)/.stamp: docs/requirements.txt $(VENV)/.stamp-venv
	$(PY) -m venv --clear $(SITE)
	$(SITE)/bin/python -m pip --disable-pip-version-check install --quiet -r docs/requirements.txt
	@touch $@

# Choices made on the command line: the file changes only when a choice changes.
$(VENV)/.choice-torch: CHOICE = $(TORCH)
$(VENV)/.choice-build: CHOICE = $(CXX) $(CXXFLAGS) FASTAGG_CUDA=$(FASTAGG_CUDA)
$(VENV)/.choice-torch $(VENV)/.choice-build: FORCE | $(VENV)/.stamp-venv
	@echo '$(CHOICE)' | cmp -s - $@ || echo '$(CHOICE)' > $@

FORCE:
