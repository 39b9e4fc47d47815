# The commands of this repository. `make` lists them; each does its own set-up, so a fresh machine needs Python and make.

# The Python to set up with; once named, it stays the default.
PYTHON ?= $(shell cat .venv/made-by 2>/dev/null || echo python3)
# 1: use the torch that $(PYTHON) already has. 0: never. Empty: as the last time, and at first if it sees a GPU.
SYSTEM_TORCH ?=
# Another package index to take torch from, for example one with CPU builds. Empty: as the last time.
TORCH_INDEX ?=
# More options for pytest, or for bench: make test ARGS="-k nvfp4 -x"
ARGS ?=
export SYSTEM_TORCH TORCH_INDEX

PY := .venv/bin/python
NEXT := .venv-next/bin/python
# Expanded after the set-up. A machine without network may lack xdist, and then the tests run one by one.
PARALLEL = $(shell $(PY) -c "import xdist" 2>/dev/null && echo "-n auto --dist worksteal")
# Once in some full runs a rank dies of SIGSEGV in a thread of gloo (docs/design/distributed.md). Its test then runs once
# more; the closing lines name it.
RERUN = $(shell $(PY) -c "import pytest_rerunfailures" 2>/dev/null && echo "--reruns 1 --only-rerun='terminated with signal SIGSEGV' -rsR")

.DEFAULT_GOAL := help
.PHONY: help setup setup-next demo doctor test test-all test-next test-gpu sanitize aot sass bench report convergence lint format clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PYTHON=python3.12  use that Python         SYSTEM_TORCH=1   use the torch it already has"
	@echo "  TORCH_INDEX=URL    take torch from there   ARGS=\"-k gemm\"   more options for pytest"

setup: ## make .venv, or bring it up to date
	@$(PYTHON) tools/setup_venv.py

# Under four minutes with the set-up; runs that are in out/compare already are read. `blockscale formats --errors` shows what each
# format does. All blocks are converted, since NVFP4 would keep these two in bf16; `broken` must come out as worse.
# One thread: layers are so small that others would only wait, and sums are taken in one order on every machine.
DEMO = --layers 2 --recipe.keep-first 0 --recipe.keep-last 0 --recipes fp8_blockwise,mxfp8,nvfp4 --control \
	--seeds 3 --steps 24 --eval-every 6 --eval-batches 4 --jobs 2 --out out/compare
demo: setup ## train a tiny model by three recipes and a broken one: a table, and a page in out/compare/report.html
	@OMP_NUM_THREADS=1 $(PY) -m blockscale compare tiny $(DEMO) $(ARGS)

doctor: setup ## say what runs on this machine, and check that it is right
	@$(PY) -m blockscale doctor

# One thread per worker: the workers already keep every core busy. Compiled modules are kept whatever the environment says:
# without them every worker rewrites the asserts of all tests, ten seconds, and every program that a test starts compiles the library.
test: setup ## run the tests, one worker per core
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest $(PARALLEL) $(RERUN) --durations=25 $(ARGS)

test-all: setup ## run every variant of every test that needs no GPU, also those that `make test` has one of
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest $(PARALLEL) $(RERUN) --all $(ARGS)

# The newest triton may be newer than any torch asks for: what it changes is better seen here than by a user.
setup-next: # make .venv-next: the same torch, the newest triton
	@SYSTEM_TORCH=0 $(PYTHON) tools/setup_venv.py next

# One of each: casts, products, grouped ones, the interpreter, not what another ptxas makes of them. All that it could change:
# make test-next NEXT_TESTS=tests/aot
INTERPRETED = tests/casts/test_triton.py::test_interpreted_casts_equal_the_reference
NEXT_TESTS = tests/launch tests/aot/test_aot.py tests/aot/test_hopper_mx.py tests/aot/test_hopper_grouped.py tests/aot/test_blackwell.py \
	"$(INTERPRETED)[mxfp8_e4m3 nvfp4 fp8_128x128]"
test-next: setup-next ## compile and interpret the kernels with the newest triton
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(NEXT) -m pytest -n auto --dist worksteal -k "not other_ptxas" $(NEXT_TESTS) $(ARGS)

# Needs no GPU. Fails on a spill that tests/aot/cases.py does not name, with either triton.
aot: setup setup-next ## compile all kernel variants for all GPUs, with both tritons (half an hour and more)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m aot.matrix $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(NEXT) -m aot.matrix $(ARGS)

# Needs no GPU. For a change that only renames: every kernel keeps its instructions (tests/golden/sass.txt).
sass: setup ## compare the SASS of every kernel for sm_90 and sm_100 with the stored hashes (twenty minutes on two cores)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m aot.sass $(ARGS)

# Runs where nothing can be installed. Without a GPU it fails: none selected must not look like all passed.
test-gpu: ## run the tests that need a GPU, with PYTHON as it is, without .venv
	BLOCKSCALE_REQUIRE_GPU=1 PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS)

sanitize: ## run every Triton cast under compute-sanitizer, with PYTHON as it is, without .venv
	PYTHONPATH=src $(PYTHON) tools/sanitize.py $(ARGS)

bench: ## check and time every cast (ARGS=gemm: every product), with PYTHON as it is, without .venv
	PYTHONPATH=src $(PYTHON) -m blockscale bench $(ARGS)

report: setup ## rewrite the tables and pictures of this repository from benchmarks/results
	$(PY) -m benchmarks.report

# 25 times the work of the demo; goes on where it was cut off. On a GPU: ARGS="--device cuda --jobs 12".
CONVERGENCE = --recipe.keep-first 0 --recipe.keep-last 0 --recipes fp8_blockwise,mxfp8,nvfp4,mxfp4 --control \
	--seeds 5 --steps 300 --eval-every 50 --jobs 2 --out out/convergence
convergence: setup ## train a tiny model by four recipes and a broken one, long enough for a verdict
	@OMP_NUM_THREADS=1 $(PY) -m blockscale compare tiny $(CONVERGENCE) $(ARGS)

# Everything through $(PY): tools that come with a borrowed torch have no command in .venv/bin.
lint: setup ## check style, types, layers and spelling
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m basedpyright --pythonpath $(PY)
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()" --no-logo
	$(PY) -m codespell_lib

format: setup ## rewrite the code in the house style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean: ## remove caches, builds and outputs; .venv and .venv-next stay (remove them by hand to start over)
	rm -rf build dist out .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src benchmarks tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
