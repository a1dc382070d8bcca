# Every target sets up .venv, once for each version of pyproject.toml and constraints.txt.

PYTHON ?= python3
JOBS ?= 2
MINUTES ?= 60
INPUTS ?= 10000
SEED ?= 1
VERSIONS ?= 3.11 3.12 3.13
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench browser proxy audit soak distributions package matrix smoke site

demo: $(READY)
	@$(BIN)/nearfar demo

test: lint browser proxy
	$(BIN)/pytest -q -n $(JOBS)

# The search page is tested in a real browser. Debian's chromium is installed if there is none and we may install it.
browser:
	@test -n "$$NEARFAR_CHROMIUM" || command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "Installing chromium for the tests of the page." && \
		(apt-get install -y -qq chromium >/dev/null 2>&1 || \
		(apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1); \
	} || echo "!!! No chromium found, and it cannot be installed: TESTS OF THE PAGE ARE SKIPPED !!!"

# The configuration of nginx in docs/serve.md is tested as well.
proxy:
	@command -v nginx >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get install -y -qq nginx-light >/dev/null 2>&1; \
	} || echo "No nginx found, and it cannot be installed: its test is skipped."

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Compares constraints.txt with the advisories of PyPI, in an environment of its own. Needs access to the internet.
audit:
	@test -x build/audit/bin/pip-audit || ($(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet pip-audit)
	build/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

# The documentation, for a browser without a server: build/site/index.html.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

# Builds wheel and sdist, installs each into an empty environment without any extra, and uses it there.
package: distributions
	$(MAKE) smoke

distributions:
	@test -x build/tools/bin/pyproject-build || ($(PYTHON) -m venv build/tools && build/tools/bin/pip install --quiet build)
	rm -rf dist
	build/tools/bin/pyproject-build

smoke: EMPTY = build/empty-$(notdir $(PYTHON))
smoke:
	rm -rf $(EMPTY)
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	tests/helpers/smoke.sh $(EMPTY)
	$(EMPTY)/bin/pip install --quiet --force-reinstall --no-deps dist/*.tar.gz
	tests/helpers/smoke.sh $(EMPTY)

# The same with every version of Python that is installed: on the PATH, or by pyenv.
matrix: distributions
	@tried=; for version in $(VERSIONS); do \
		python=$$(tests/helpers/interpreter.sh $$version) || continue; \
		$(MAKE) smoke PYTHON=$$python || exit 1; tried="$$tried $$version"; \
	done; echo "Works with Python:$${tried:- none was found}"; test -n "$$tried"

# Faults for as long as wanted: damaged input for every parser, kills, full and torn disks, then load on a server, and
# what the dearest requests of some clients cost the others.
soak: $(READY)
	NEARFAR_FUZZ=$(INPUTS) NEARFAR_ROUNDS=50 NEARFAR_KILLS=50 NEARFAR_SEED=$(SEED) $(BIN)/pytest -q -n $(JOBS) --durations 0 \
		tests/faults tests/search/test_search_kill.py tests/serve/test_serve_process.py tests/training/loop/test_resume.py
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python tests/faults/busy.py

bench: $(READY)
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/networks.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/serve.py

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV). This takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@
