# The two commands: `make demo` and `make test`. Both prepare .venv when it is missing or old.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider

.PHONY: demo test lint bench calibrate docs clean

demo: $(VENV)/installed
	$(BIN)/trnsim train examples/gpt.py --instance trn2.3xlarge --lnc 2 --mesh dp=2,tp=2 \
		--steps 5 --runtime ray --out out/demo

test: $(VENV)/installed-dev
	$(PYTEST) tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/device.py
	$(BIN)/python benchmarks/transfers.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/plans.py
	$(BIN)/python benchmarks/studies.py

calibrate: $(VENV)/installed
	$(BIN)/trnsim calibrate
	$(BIN)/trnsim calibrate --steps

# What the commands in the documentation print today.
docs: $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/outputs.py

# The package is installed as a user would install it, and again whenever a source file changes.
SOURCES := pyproject.toml $(shell find device collectives cluster -name '*.py' -o -name '*.toml' -o -name '*.csv')

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "trnsim needs Python 3.11 or newer, found %d.%d; set PYTHON=" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	rm -rf build/lib build/bdist*  # setuptools would pack what it left there
	$(BIN)/python -m pip install --quiet .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build out .pytest_cache .ruff_cache .hypothesis
