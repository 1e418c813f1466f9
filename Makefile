# Every target does its own set-up: `make run` and `make test` need nothing but make and a Python.

# The interpreter, or several of which the first suitable one is taken.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
# What is passed on to the command behind run, test, bench and lock: make test ARGS="-k sse"
ARGS ?=

# Tests run side by side, so that no processor is idle, but not so many that their models fill the memory.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist worksteal

# Tests start hundreds of processes, and each would compile everything again.
test test-clients: export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --quiet --no-input --disable-pip-version-check
CODE := src tests scripts $(wildcard benchmarks examples)
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup run test test-clients check check-format check-lint check-types check-imports check-shape format bench lock clean

help:
	@echo "make run      serve the embedded model on 127.0.0.1:8484"
	@echo "make test     run the tests"
	@echo "make test-clients  run the tests with the clients of others, some need node and npm"
	@echo "make check    format, lint, types, imports, sizes"
	@echo "make format   rewrite the code as make check wants it, and the generated pages"
	@echo "make bench    measure, beside others (benchmarks/README.md)"
	@echo "make setup    only the environment: .venv/bin/antiphon is then the command"
	@echo "make lock     resolve requirements.lock anew (ARGS=--upgrade for newer versions)"
	@echo "make clean    remove all that these make"
	@echo "ARGS=... goes to the command behind the target, PYTHON=... chooses the interpreter"

setup: .venv/.project

run: setup
	@$(BIN)/antiphon serve $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

# Without node the other clients are still tested, and nobody can overlook what was not.
test-clients: setup
	@if command -v node >/dev/null && command -v npm >/dev/null; then $(MAKE) --silent .node/codex/.lock .node/node/.lock; else \
		echo "!!! node or npm is missing: CODEX CLI AND THE JAVASCRIPT CLIENTS ARE NOT TESTED. Install Node.js 20 or newer. !!!" >&2; fi
	@$(BIN)/python -m pytest tests/clients $(ARGS)

check: check-format check-lint check-types check-imports check-shape

check-format: setup
	@$(BIN)/ruff format --check $(CODE)

check-lint: setup
	@$(BIN)/ruff check $(CODE)

check-types: setup
	@$(BIN)/python -m mypy

check-imports: setup
	@$(BIN)/lint-imports --no-logo

check-shape: setup
	@$(BIN)/python scripts/check_shape.py $(CODE)

format: setup
	@$(BIN)/ruff check --fix-only $(CODE)
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/python tests/manifest.py

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

lock: .venv/bin/pip
	@$(BIN)/python scripts/lock.py $(ARGS)

clean:
	rm -rf .venv .node .peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make set-up incremental. The lock lists every package, so pip resolves and compiles nothing.
.venv/.project: .venv/.lock pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.lock: requirements.lock | .venv/bin/pip
	@echo "setting up: installing requirements.lock into .venv ..."
	@$(PIP) install --no-deps --require-hashes --only-binary :all: --requirement requirements.lock
	@touch $@

# Nothing that a package brings is run while it is installed.
.node/%/.lock: tests/clients/%/package.json tests/clients/%/package-lock.json
	@echo "setting up: installing the packages of tests/clients/$* into .node ..."
	@mkdir -p .node/$*
	@cp $^ .node/$*
	@npm ci --prefix .node/$* --ignore-scripts --prefer-offline --no-audit --no-fund --loglevel=error
	@touch $@

# pip is the last thing that venv makes: an interrupted set-up starts over.
.venv/bin/pip:
	@for python in $(PYTHON); do \
		if $$python -c '$(SUITABLE)' 2>/dev/null; then \
			echo "setting up: making .venv with $$python ..."; \
			exec $$python -m venv --clear .venv; \
		fi; \
	done; \
	echo "None of these is a Python 3.11 or newer with the venv and ensurepip modules: $(PYTHON)" >&2; \
	echo "Install one (Debian and Ubuntu: apt install python3-venv), or name it: make setup PYTHON=/path/to/python" >&2; \
	exit 1
