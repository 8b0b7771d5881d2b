# Everything a newcomer needs; each target does its own set-up, a second call installs nothing.
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart test pytest lint slurm-test nightly chaos clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: ## virtual environment with both engines for CPUs
	@tools/install_cpu.sh $(VENV)

quickstart: install ## watch a language model learn arithmetic by asynchronous RL
	rm -rf runs/quickstart runs/quickstart-sft
	$(BIN)/megarl data data/arithmetic
	$(BIN)/megarl sft configs/quickstart_sft.yaml
	$(BIN)/megarl train configs/quickstart.yaml

lint: install ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint pytest ## lint and all tests that need no GPU

# Most of a run's ranks wait for one that computes: two tests at a time keep two cores busy.
pytest: install
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadscope --no-loadscope-reorder --durations=15

slurm-test: install ## run jobs on a real Slurm of virtual nodes; root installs it first
	@tools/install_slurm.sh
	$(BIN)/python -m pytest -m slurm --durations=5 tests/slurm

nightly: install ## ten thousand random layouts and schedules against their oracles
	MEGARL_DRAWS=10000 $(BIN)/python -m pytest tests/unit/megatron_bridge/test_layouts.py -k any
	MEGARL_DRAWS=10000 $(BIN)/python -m pytest tests/unit/megarl/rollout/test_buffer.py

chaos: install ## kill ranks thirty times at random moments; nothing may be lost
	MEGARL_KILLS=30 $(BIN)/python -m pytest tests/e2e/test_chaos.py -k many

clean: ## remove what the other targets made
	rm -rf $(VENV) runs data build *.egg-info
