# Everything runs in a virtual environment of its own inside the checkout.
# PYTHON chooses the interpreter, VENV the folder:  make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# the commands start hundreds of Python processes: what one has compiled the next must not compile again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-all test-slow test-quick test-others lint bench mutants docs dist clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fald needs Python 3.11 or newer; set PYTHON" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fald into $(VENV) (a minute or two, once)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $@

# in one installation, which is quicker than what the demo needs and then the rest
$(VENV)/install.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fald and what the tests need into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/run.stamp $(VENV)/dev.stamp $@

install: $(VENV)/install.stamp  ## install fald with everything that tests, lint and documentation need

# packages without the checkout itself, so that this can run beside an installation of it elsewhere
$(VENV)/needs.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing what fald and pytest need into $(VENV)"
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["test"], sep="\n")' > $(VENV)/needs.txt
	@$(PIP) --requirement $(VENV)/needs.txt
	@touch $@

$(VENV)/quick.stamp: $(VENV)/needs.stamp
	@echo "installing fald and pytest into $(VENV) (a minute or two, once)"
	@$(PIP) --editable '.[test]'
	@touch $@

demo: $(VENV)/run.stamp  ## analyse the bundled four-hospital trial
	@$(BIN)/fald demo

# one process runs all tests of a file: it compiles their programs and makes their fixtures once;
# three for two cores, because tests of commands and sites wait for other processes
TESTS = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/dev.stamp  ## run the tests that are not marked slow; a few minutes
	$(TESTS) -m 'not slow' $(PYTEST)

test-slow: $(VENV)/dev.stamp  ## run the slow ones alone
	$(TESTS) -m slow $(PYTEST)

test-all: test  ## run those, and then the slow ones
	@$(MAKE) test-slow

test-quick: $(VENV)/quick.stamp  ## run tests that need nothing but pytest: those that PYTEST names
	$(TESTS) -m 'not slow' $(PYTEST)

# after dev.stamp, because two installations of one checkout at a time disturb each other
test-others: $(VENV)/dev.stamp  ## run some quick tests on the newest other Python >= 3.11 that is present
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

mutants: $(VENV)/dev.stamp  ## change the code in one place at a time; the tests must notice: MUTANTS='wire.py --all'
	$(BIN)/python -m benchmarks.mutants $(MUTANTS)

dist: $(VENV)/dev.stamp  ## build a wheel and a source archive in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean:  ## remove environments and build products
	rm -rf .venv .venv-* docs/_build build dist .cache .pytest_cache .ruff_cache
