# Two commands for a fresh machine: `make demo` and `make test`.
#
# Everything goes into .venv, nothing into the system. A step that is done is stamped there, and done
# again only when this file or pyproject.toml changes.

PYTHON   ?= python3
VENV     ?= .venv
SCHEDULE ?= schedules/forward/fwd_fp16_d128_causal_m128n128.toml
# processes that run tests: one more than there are cores, since some tests wait
WORKERS  ?= $(shell echo $$(($$(nproc) + 1)))
SAMPLE   ?= 1

# whichever build of torch pip offers: with CUDA or without
TORCH   := torch==2.13.0
# the headers alone: with its dependencies it would be half a gigabyte
CUTLASS := nvidia-cutlass==4.2.0.0
# all five extras: left to themselves they come in versions that do not fit together
NVCC    := 'cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.*'
JAX     := jax==0.10.2 scikit-build-core ninja
READERS := nvidia-cuda-nvdisasm==13.2.51 nvidia-cuda-cuobjdump==13.2.51

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),--quiet)
# fagen's cache of kernels lies there too: a home need not be there, nor be writable
export FAGEN_CACHE ?= $(abspath $(VENV))/cache
# kept bytecode spares each process of the tests the work of another, whatever the environment says
TESTS = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# stops a recipe with a message, and with fagen's exit code for a missing tool
fail = { printf '%s\n' $(1) >&2; exit 3; }

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-long coverage lint tests format generated pages docs gpu-tests clean

help:
	@echo 'make demo       take a schedule all the way: check, render, compile, run'
	@echo 'make quick      the tests that take seconds: the house, schedules, ledgers, the command line'
	@echo 'make test       everything that CI runs: lint, types, tests; needs no GPU'
	@echo 'make format     lay the Python out anew'
	@echo 'make generated  bring generated/ up to date; TO=folder: render every schedule there'
	@echo 'make pages      draw the pages of benchmarks anew, from their data'
	@echo 'make docs       write what fagen really prints into README.md and docs/'
	@echo 'make test-long  the tests that CI has no time for: more kernels, more cases'
	@echo 'make coverage   make test, and which lines and branches of fagen it runs'
	@echo 'make gpu-tests  the tests that need a Hopper GPU; SAMPLE=16: a few minutes of them'
	@echo 'make clean      remove .venv, kernels built there and what tools left behind'
	@echo
	@echo 'PYTHON=python3.12 picks another Python, SCHEDULE=my.toml another schedule for the demo.'

# ---- the environment -----------------------------------------------------------------------------

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || $(call fail,'$(PYTHON) is missing: sudo apt-get install python3 python3-venv')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(call fail,'$(PYTHON) is too old: fagen needs Python 3.11 or later; name one by make PYTHON=python3.12')
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call fail,'$(PYTHON) comes without venv: sudo apt-get install $(notdir $(PYTHON))-venv')
	@command -v g++ >/dev/null || $(call fail,'g++ is missing: sudo apt-get install g++')
	@echo '== making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml Makefile
	@echo '== installing fagen, its tests and $(TORCH): 0.3 GB, or some 3 GB where torch brings CUDA'
	@$(PIP) $(TORCH) $(READERS) -e '.[bench,test,dev]'
	@echo '== installing the CUTLASS headers'
	@$(PIP) --no-deps $(CUTLASS)
	@touch $@

# an nvcc of the machine's own serves, if fagen can use it
$(VENV)/.nvcc: $(VENV)/.installed
	@$(BIN)/python -c 'from fagen.toolchain import find_nvcc; find_nvcc()' 2>/dev/null || \
		{ echo '== installing the CUDA compiler: 0.1 GB' && $(PIP) $(NVCC); }
	@$(BIN)/fagen doctor
	@touch $@

# JAX, for what is vendored for it
$(VENV)/jax/.installed: $(VENV)/.made Makefile
	@echo '== installing JAX into $(VENV)/jax: 0.6 GB'
	@$(PYTHON) -m venv $(VENV)/jax
	@$(VENV)/jax/bin/python -m pip install --disable-pip-version-check $(if $(CI),--quiet) $(JAX)
	@touch $@

# ---- the two commands ----------------------------------------------------------------------------

demo: $(VENV)/.nvcc
	$(BIN)/fagen check $(SCHEDULE)
	$(BIN)/fagen generate $(SCHEDULE) -o $(VENV)/demo
	$(BIN)/fagen build $(SCHEDULE)
	$(BIN)/python examples/demo.py $(SCHEDULE)

# side by side: types take a core for a minute
test: $(VENV)/.nvcc
	@$(MAKE) --no-print-directory --jobs=2 lint tests

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

tests: $(VENV)/.nvcc
	$(TESTS)

quick: WORKERS = auto
quick: $(VENV)/.nvcc
	$(TESTS) -m quick

# which tests these are: tests/rings.py
coverage: $(VENV)/.nvcc
	@$(BIN)/python -c 'import pytest_cov' 2>/dev/null || $(PIP) 'pytest-cov>=6'
	$(TESTS) --cov fagen --cov-branch --cov-report json:$(VENV)/coverage.json
	@$(BIN)/python -c 'import json; t = json.load(open("$(VENV)/coverage.json"))["totals"]; \
		print(*(f"{t[a]:,} of {t[b]:,} {b[4:]} ({t[a] / t[b]:.2%})" for a, b in \
		(("covered_lines", "num_statements"), ("covered_branches", "num_branches"))), sep="\n")'

# ---- for who works on fagen ----------------------------------------------------------------------

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

generated: $(VENV)/.installed
	$(BIN)/fagen generate --all$(if $(TO), -o $(TO))

pages: $(VENV)/.installed
	$(BIN)/python benchmarks/pages.py

docs: $(VENV)/.installed
	$(BIN)/python docs/fill.py

test-long: $(VENV)/.nvcc $(VENV)/jax/.installed
	$(TESTS) -m long

gpu-tests: $(VENV)/.nvcc
	$(BIN)/python -m pytest -m gpu --sample $(SAMPLE)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
