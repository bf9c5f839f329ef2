# Set-up, checks, tests and the demo. Each target works on a fresh clone and again on a used one.
# Needs Python 3.11 or later with venv, and g++; everything else is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

READY := $(VENV)/.ready
# Each environment compiles for itself: in a shared cache they would recompile in turns, and wait for each other's locks.
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
# DeepSpeed and torch look for ninja and for the launcher on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)

.PHONY: help setup collectives demo test check pytest format clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   create $(VENV) with everything in it"
	@echo "make demo    set up, then train the demo fleet on this machine"
	@echo "make test    set up, then check and pytest"
	@echo "make check   ruff, mypy, import-linter, codespell"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove $(VENV) and the caches"

setup: collectives

# torch first, by itself, so that deepspeed's set-up finds it and the version is the one the tests ran on.
$(READY): pyproject.toml Makefile
	@command -v g++ >/dev/null || { echo "make: g++ is required (DeepSpeed compiles its CPU collectives)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: Python 3.11 or later is required, $(PYTHON) is older; say make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet '$(TORCH)'
	DS_BUILD_OPS=0 $(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	touch $@

# DeepSpeed compiles its shared-memory collectives on first use. Ranks that start together race for it, and one killed
# while compiling leaves a lock that the others wait for without end. So compile before any rank starts (2 s if there is
# nothing to do), and drop a lock older than any compilation takes.
collectives: $(READY)
	@find "$(TORCH_EXTENSIONS_DIR)" \
		-path '*deepspeed_shm_comm/lock' -mmin +3 -delete 2>/dev/null || true
	timeout 300 python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' || \
		{ echo "make: DeepSpeed's CPU collectives did not compile (if it waited for a lock: try again)" >&2; exit 1; }

demo: collectives
	moe-fragment launch recipes/demo.yaml

test: check pytest

check: $(READY)
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	codespell

# One thread a rank: with more, the ranks of a test fleet fight for the cores.
pytest: collectives
	OMP_NUM_THREADS=1 python -m pytest

format: $(READY)
	ruff check --fix .
	ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
