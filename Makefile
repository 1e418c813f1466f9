# Every target installs what it needs. `make run` and `make test` require only make and Python.

# Candidates for the interpreter. The first suitable one is used.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
# Arguments for the command of run, test, test-clients, the benchmarks and lock: make test ARGS="-k sse"
ARGS ?=

# Parallel test processes. The limit bounds the memory that their models use.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

# Tests that only `make test-clients` runs. Their clients take seconds to import, in each of the processes.
CLIENTS := tests/clients/codex tests/clients/node $(wildcard tests/clients/test_langchain.py tests/clients/test_openai_agents*.py)

# Generated examples for each test of test-slow: make test-slow EXAMPLES=1000
EXAMPLES ?= 100

# Bytecode is cached even if the environment forbids it: every process would compile again.
run test test-slow test-clients: export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --quiet --no-input --disable-pip-version-check
CODE := src tests scripts $(wildcard benchmarks examples)
PAGES := $(wildcard *.md docs/*.md docs/*/*.md benchmarks/*.md)
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup extras run test test-slow test-clients check check-format check-lint check-types check-imports check-shape check-words format bench bench-guard bench-peers bench-record lock clean

help:
	@echo "make run           serve the embedded model on 127.0.0.1:8484"
	@echo "make test          run all tests except those of test-slow and test-clients"
	@echo "make test-slow     run the slow tests, and those with many streams and generated input at their full size"
	@echo "make test-clients  run the tests with third-party clients; some need node and npm"
	@echo "make check         check format, lint, types, imports, sizes and words"
	@echo "make format        format the code and generate docs/behaviour.md"
	@echo "make bench         run the benchmarks, including those of other projects (benchmarks/README.md)"
	@echo "make bench-peers   compare with other servers and write docs/benchmarks.md (15 minutes and 1.5 GB in .peers)"
	@echo "make bench-record  measure all figures of docs/benchmarks.md again; needs an idle machine"
	@echo "make bench-guard   compare the instructions of a request with the committed baseline (ARGS=--update records it)"
	@echo "make setup         install into .venv; the command is then .venv/bin/antiphon"
	@echo "make extras        add the packages of the extras search, code, postgres and otel, and schemas for tests, to .venv (350 MB)"
	@echo "make lock          resolve the lock files again (ARGS=--upgrade for newer versions)"
	@echo "make clean         remove everything that these targets create"
	@echo "ARGS=... are arguments for the command of a target, PYTHON=... selects the interpreter"

setup: .venv/.project

extras: .venv/.extras

run: setup
	@$(BIN)/antiphon serve $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(PARALLEL) $(addprefix --ignore=,$(CLIENTS)) -m "not slow" $(ARGS)

test-slow: setup
	@$(BIN)/python -m pytest --numprocesses 2 -m slow $(ARGS)
	@ANTIPHON_TEST_STREAMS=2000 $(BIN)/python -m pytest tests/hostile/test_many_streams.py $(ARGS)
	@ANTIPHON_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --numprocesses 2 -m "hypothesis and not slow" $(ARGS)

# Without node, the Python clients are still tested. The warning names the clients that are not.
test-clients: setup
	@if command -v node >/dev/null && command -v npm >/dev/null; then $(MAKE) --silent .node/codex/.lock .node/node/.lock; else \
		echo "!!! node or npm is missing: CODEX CLI AND THE JAVASCRIPT CLIENTS ARE NOT TESTED. Install Node.js 20 or newer. !!!" >&2; fi
	@$(BIN)/python -m pytest tests/clients $(ARGS)

check: check-format check-lint check-types check-imports check-shape check-words

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

check-words: setup
	@$(BIN)/python scripts/check_words.py $(CODE) $(PAGES)

format: setup
	@$(BIN)/ruff check --fix-only $(CODE)
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/python tests/manifest.py

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: setup
	@$(BIN)/python -m benchmarks.side_by_side $(ARGS)

bench-record: extras
	@for part in bridge agents nodes hosted code retrieval $(if $(wildcard benchmarks/embedded.py),embedded); do \
		$(BIN)/python -m benchmarks --only $$part --record || exit; done
	@$(BIN)/python -m benchmarks.capacity --record
	@$(MAKE) --silent bench-peers

bench-guard: setup
	@$(BIN)/python -m benchmarks.guard $(ARGS)

lock: .venv/bin/pip
	@$(BIN)/python scripts/lock.py $(ARGS)

clean:
	rm -rf .venv .node .peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp files make set-up incremental. The lock lists every package, so pip resolves nothing. Bytecode is compiled at the
# first import, which is less work: most modules of the packages are never imported.
.venv/.project: .venv/.lock pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import xllamacpp' 2>/dev/null || echo "The embedded model cannot be loaded. To see why: $(BIN)/antiphon doctor" >&2
	@touch $@

.venv/.lock: requirements.lock | .venv/bin/pip
	@echo "setting up: installing requirements.lock into .venv ..."
	@$(PIP) install --no-compile --no-deps --require-hashes --only-binary :all: --requirement requirements.lock
	@touch $@

.venv/.extras: requirements-extras.lock .venv/.project
	@echo "setting up: installing requirements-extras.lock into .venv ..."
	@$(PIP) install --no-compile --no-deps --require-hashes --only-binary :all: --requirement requirements-extras.lock
	@echo "setting up: compiling the interpreter of the code sandbox into .venv, which takes minutes ..."
	@$(BIN)/python -m antiphon.tools.hosted.code_interpreter.prepare .venv/code-interpreter
	@touch $@

# Install scripts of packages are not run.
.node/%/.lock: tests/clients/%/package.json tests/clients/%/package-lock.json
	@echo "setting up: installing the packages of tests/clients/$* into .node ..."
	@mkdir -p .node/$*
	@cp $^ .node/$*
	@npm ci --prefix .node/$* --ignore-scripts --prefer-offline --no-audit --no-fund --loglevel=error
	@touch $@

# venv creates pip last. After an interruption, set-up starts over.
.venv/bin/pip:
	@for python in $(PYTHON); do \
		if $$python -c '$(SUITABLE)' 2>/dev/null; then \
			echo "setting up: creating .venv with $$python ..."; \
			exec $$python -m venv --clear .venv; \
		fi; \
	done; \
	echo "No Python 3.11 or newer with the venv and ensurepip modules found among: $(PYTHON)" >&2; \
	echo "Install one (Debian and Ubuntu: apt install python3-venv), or give its path: make setup PYTHON=/path/to/python" >&2; \
	exit 1
