# Everything runs in a virtual environment of its own inside the checkout.
# PYTHON chooses the interpreter, VENV the folder:  make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-others lint bench docs clean

$(VENV)/run.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fald needs Python 3.11 or newer; set PYTHON" >&2; exit 2; }
	@echo "installing fald into $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/run.stamp  ## analyse the bundled four-hospital trial
	@$(BIN)/fald demo

test: $(VENV)/dev.stamp  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST)

test-others: $(VENV)/dev.stamp  ## run the quick tests on the newest other Python >= 3.11 that is present
	$(BIN)/python tests/interpreters.py

lint: $(VENV)/dev.stamp  ## style, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

docs: $(VENV)/dev.stamp  ## build the documentation, running its examples; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	@echo "installing what fald is measured against into $(VENV)"
	@$(PIP) --editable '.[bench]'
	@touch $@

bench: $(VENV)/bench.stamp  ## measure speed beside other loops, as ratios in one run; at most 15 minutes
	$(BIN)/fald bench --out benchmarks/speed
	$(BIN)/python -m benchmarks

clean:  ## remove environments and build products
	rm -rf .venv .venv-* docs/_build build .pytest_cache .ruff_cache
