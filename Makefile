# `make demo` and `make test` do all set-up from a fresh clone.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test lint types docs setup clean

demo: setup
	$(BIN)/agent-r1-train

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,dev]'
	@touch $@

clean:
	rm -rf .venv runs build dist *.egg-info
