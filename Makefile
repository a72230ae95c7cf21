# Each target builds the environment .venv first, if it is not there or older than what it is built from.
# On a machine with an NVIDIA GPU (`nvidia-smi -L` lists one) that is vllm-omni as its authors ship it. Elsewhere it is the
# same vllm-omni with only what it imports on a CPU (requirements/, installed in the order below; about 7 GB, some minutes).

PYTHON ?= python3
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench

help:
	@echo 'make demo    outputs of several sizes through the real vllm-omni engine and a packer, every byte verified'
	@echo 'make test    the tests, a file on each core  (ARGS="-k name -x" goes to pytest; ARGS=-n0: in one process)'
	@echo 'make lint    ruff and mypy'
	@echo 'make bench   the benchmarks                  (ARGS="--help" lists them)'
	@echo
	@echo 'Each builds .venv first if needed, with PYTHON=$(PYTHON) (3.10 to 3.13; without a GPU not 3.10).'

demo: $(STAMP)
	$(VENV)/bin/packer-service demo $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest tests --numprocesses auto --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks.run $(ARGS)

# The stamp goes first and comes back last: a build that was interrupted has none, and the next make starts it afresh.
$(STAMP): pyproject.toml requirements/torch-cpu.txt requirements/vllm-light.txt requirements/vllm-serve.txt
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear $(VENV); fi
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then \
	    set -ex; \
	    $(PIP) -e '.[vllm,dev]'; \
	else \
	    set -ex; \
	    $(PIP) -r requirements/torch-cpu.txt; \
	    $(PIP) -r requirements/vllm-light.txt; \
	    $(PIP) --no-deps -r requirements/vllm-serve.txt; \
	    $(PIP) --no-deps vllm==0.30.0 vllm-omni==0.30.0; \
	    $(PIP) -e '.[dev]'; \
	fi
	@touch $@
