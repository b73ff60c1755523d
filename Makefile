# `make` lists the targets. Everything is installed into .venv from constraints.txt.

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
.PHONY: help run test fuzz fuzz-serving check sync pecos ui clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "error: Python 3.11 is needed, $(PYTHON) is another; use 'make PYTHON=/path/to/python3.11'" >&2; exit 1; }
	@echo "installing the pinned dependencies into $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt '$(TORCH)'
	@$(PIP) install -c constraints.txt -e '.[$(EXTRA),peers,dev]'
	@touch $@

run: $(READY) ## the whole pipeline on the Debian data set, beside its base (PRESET=debian: all of it)
	ramen run --preset $(PRESET)

# one thread each: two processes whose OpenMP threads share two cores spin against each other
test: export OMP_NUM_THREADS := 1
test: $(READY) ## the whole test suite
	pytest -n 2 --dist loadfile

fuzz: $(READY) ## search for input that breaks a parser, FUZZ_SECONDS=30 each (6 minutes); findings: fuzz-findings/
	python tests/helpers/parsers.py --seconds $(FUZZ_SECONDS)

check: $(READY) ## lint, format, types, import layers, generated files
	ruff check
	ruff format --check
	mypy
	lint-imports
	ramen sync --check

fuzz-serving: $(READY) ## many random requests to the serving API (minutes; EXAMPLES=2000 of each kind)
	RAMEN_FUZZ_EXAMPLES=$${EXAMPLES:-2000} pytest tests/serving/test_requests.py -q --timeout 3600

sync: $(READY) ## write the generated files again
	ramen sync

pecos: ## install libpecos for the study `peers`, in a separate environment
	@$(PYTHON) -m venv .venv-pecos
	@.venv-pecos/bin/pip --disable-pip-version-check --quiet install -r requirements-pecos.txt

ui: $(READY) ## open the MLflow UI on the runs of this folder
	mlflow ui --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///mlflow.db}" --port "$${PORT:-5000}"

clean: ## remove results and caches; data, DVC's cache and .venv stay
	rm -rf artifacts metrics .ramen mlflow.db mlartifacts mlruns .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
