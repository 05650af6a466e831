# make demo    a short tour on whatever device is there
# make test    lint, types, tests, doctests, examples of the documentation
# make bench   the measurements, small where there is no GPU. Options: make bench ARGS="all --quick"
# make docs    the documentation as a site, in site/
# make clean   remove what was built; the virtual environment stays (remove .venv by hand)

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
JOBS   ?= 2

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Tests of one file stay together where they can: they share what was compiled for the first of them.
# What was compiled of them, with their assertions, is kept for the second run and for what they start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal
STAMP  := $(VENV)/.insum-installed

.PHONY: help setup demo test lint bench docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

# torch comes first, by its exact version: a loose requirement may pull gigabytes of packages that are not needed.
# The package itself is built with the pinned backend rather than in an isolated, unpinned environment.
$(STAMP): pyproject.toml constraints.txt
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e '.[test]'
	touch $@

$(VENV)/.insum-docs-installed: $(STAMP)
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

# What layers are compared with and saved by. Where it cannot be had, those tests say that they are skipped.
$(VENV)/.insum-rivals-installed: $(STAMP)
	$(PIP) --no-build-isolation -e '.[rivals]' || echo "e3nn, PyG or safetensors were not installed: what needs them is skipped"
	touch $@

demo: $(STAMP)
	$(PY) -m insum.demo $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Two runs, because Triton decides between interpreter and compiler once, when it is imported. The
# second imports only the files that have tests for it.
test: lint $(VENV)/.insum-rivals-installed
	$(PYTEST) --doctest-modules -m "not interpreter" src tests
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter $$(grep -rl --include='test_*.py' mark.interpreter tests)

bench: $(STAMP)
	$(VENV)/bin/insum bench $(ARGS)

docs: $(VENV)/.insum-docs-installed
	$(PY) -m mkdocs build --strict

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
