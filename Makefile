# `make` lists the targets. The targets install the versions of constraints.txt into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRA ?= cpu
PRESET ?= demo
FUZZ_SECONDS ?= 30
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
PIP := $(BIN)/pip --disable-pip-version-check --quiet

export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help run test test-fast fuzz fuzz-serving check sync pecos ui clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "error: $(PYTHON) is not Python 3.11; use 'make PYTHON=/path/to/python3.11'" >&2; exit 1; }
	@echo "installing the pinned dependencies into $(VENV) (once, a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt '$(TORCH)'
	@$(PIP) install -c constraints.txt -e '.[$(EXTRA),peers,dev]'
	@touch $@

run: $(READY) ## train, evaluate and publish on Debian data, compared with the base (PRESET=debian: all data)
	ramen run --preset $(PRESET)

# one thread per process: OpenMP threads of two processes on two cores slow each other down by spinning
test test-fast: export OMP_NUM_THREADS := 1
test: $(READY) ## run all tests
	pytest -n 2 --dist loadfile

test-fast: $(READY) ## run the tests that are not marked slow (under 90 s on 2 cores)
	pytest -n 2 --dist loadfile -m "not slow"

fuzz: $(READY) ## fuzz the parsers, FUZZ_SECONDS=30 each (6 minutes); writes findings to fuzz-findings/
	python tests/helpers/parsers.py --seconds $(FUZZ_SECONDS)

check: $(READY) ## check lint rules, format, types, import layers and generated files
	ruff check
	ruff format --check
	mypy
	lint-imports
	ramen sync --check

fuzz-serving: $(READY) ## fuzz the serving API, EXAMPLES=2000 requests of each kind (minutes)
	RAMEN_FUZZ_EXAMPLES=$${EXAMPLES:-2000} pytest tests/serving/test_requests.py -q --timeout 3600

sync: $(READY) ## update the generated files
	ramen sync

pecos: ## install libpecos into .venv-pecos, for the study `peers`
	@$(PYTHON) -m venv .venv-pecos
	@.venv-pecos/bin/pip --disable-pip-version-check --quiet install -r requirements-pecos.txt

ui: $(READY) ## start the MLflow UI for the runs of this folder
	mlflow ui --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///mlflow.db}" --port "$${PORT:-5000}"

clean: ## remove results and caches; keeps data, DVC's cache and .venv
	rm -rf artifacts metrics .ramen mlflow.db mlartifacts mlruns .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
