# fedconcord: `make help` lists what there is.
PYTHON ?= python3
VENV   ?= .venv
TEST_PROCESSES ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export HF_HUB_OFFLINE ?= 1
export FLWR_TELEMETRY_ENABLED ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup demo fleet test lint types bench clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*## "} {printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with everything installed (once; minutes)

$(STAMP): pyproject.toml
	@echo "Installing into $(VENV): several minutes and about 7 GB, mostly PyTorch."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(STAMP) ## CRAFT, FedAvg and FedAvgM on 100 non-IID digits clients: a table and curves
	$(BIN)/python -m experiments.run -m experiment=demo_digits strategy=craft,fedavg,fedavgm \
	  hydra.sweep.dir=outputs/demo/$$(date +%Y-%m-%d_%H-%M-%S)

fleet: $(STAMP) ## CRAFT on a SuperLink and three SuperNodes with TLS and keys; one is killed and comes back (minutes)
	$(BIN)/python -m experiments.fleet $(FLEET_OPTIONS)

test: $(STAMP) ## Everything a machine without GPU or network can test; real data where DATA_DIR is set
	$(BIN)/python -m pytest -n $(TEST_PROCESSES)

lint: $(STAMP) ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Static types
	$(BIN)/mypy

bench: $(STAMP) ## What engines and solves cost, side by side in one run (an hour; BENCH=--quick: ten minutes)
	$(BIN)/python -m experiments.benchmarks $(BENCH)

clean: ## Remove caches and outputs, keep .venv
	rm -rf outputs multirun build .pytest_cache .mypy_cache .ruff_cache .hypothesis
