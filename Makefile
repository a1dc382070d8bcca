# Every target sets up .venv by itself, once for each version of pyproject.toml.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench browser

demo: $(READY)
	@$(BIN)/nearfar demo

test: lint browser
	$(BIN)/pytest -q -n $(JOBS)

# The page is tested in a real browser: Debian's, where there is none and it may be installed.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "Installing chromium for the tests of the page." && \
		(apt-get install -y -qq chromium >/dev/null 2>&1 || \
		(apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1); \
	} || echo "!!! No chromium, and it cannot be installed: THE TESTS OF THE PAGE ARE LEFT OUT !!!"

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
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/serve.py

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@touch $@
