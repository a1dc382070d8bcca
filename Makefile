# Every target sets up .venv by itself, once for each version of pyproject.toml.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench

demo: $(READY)
	@$(BIN)/nearfar demo

test: lint
	$(BIN)/pytest -q -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/networks.py

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
