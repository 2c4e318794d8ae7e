# `make demo` and `make test` each set up .venv first and then do their job: one command on a fresh machine.
#
#   PYTHON=python3.12     the interpreter .venv is made with (default: the first of python3, 3.12, 3.11, 3.13 that fits)
#   PIP_ARGS='...'        passed to every `pip install`: a mirror, a proxy, PyTorch's index of CPU wheels
#   PYTEST_ARGS='-x -k …' passed to pytest

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?=
PIP_ARGS ?=
PYTEST_ARGS ?=

TORCH_VERSION := 2.13.0
VLLM_VERSION := 0.32.0

VENV := .venv
BIN := $(VENV)/bin
# Written last, so that a set-up that was cut off is taken up again.
READY := $(VENV)/.ready
REQUIREMENTS := .ci/requirements-cpu.txt

.PHONY: help venv demo test test-unit test-engine check clean distclean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(READY) ## set up .venv: vLLM's CPU engine, the tools, this package (a few minutes, once)

$(READY): $(REQUIREMENTS) pyproject.toml .ci/make-venv
	@PIP_ARGS='$(PIP_ARGS)' .ci/make-venv '$(VENV)' '$(PYTHON)' '$(REQUIREMENTS)' '$(TORCH_VERSION)' '$(VLLM_VERSION)'
	@touch $@

demo: venv ## two long prompts back to back on a real server, the first one back from host memory
	PYTHON=$(BIN)/python examples/long_context_back_to_back.sh

test: venv ## all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-unit: venv ## the tests that need no engine
	$(BIN)/python -m pytest -m 'not engine and not gpu' $(PYTEST_ARGS)

test-engine: venv ## the tests that run a real vLLM engine
	$(BIN)/python -m pytest -m engine $(PYTEST_ARGS)

check: venv ## style, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy safe_offload
	$(BIN)/python -m pytest -q tests/test_layering.py

clean: ## remove caches and what the tools left
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
