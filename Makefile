# make demo | test | test-all | soak | bench | docs | release-check | venv | clean
#
# Needs Python 3.11 or newer, make and pip; everything else goes into .venv.
# Another torch wheel, for example without CUDA:
#   make demo TORCH="torch==2.13.0+cpu --extra-index-url <index of that wheel>"
# Other options for pip, for example a mirror: PIP_OPTIONS="--index-url <mirror>"

PYTHON ?= python3.11
TORCH ?= torch==2.13.0
PIP_OPTIONS ?=
DEMO ?=
BENCH ?=
SEEDS ?= 10000
RESUMES ?= 1000
JOBS ?= 2
SOAK ?=
RELEASE ?=

VENV := .venv
BIN := $(VENV)/bin
FOR_DEMO := $(VENV)/.for-demo
FOR_TEST := $(VENV)/.for-test
FOR_DOCS := $(VENV)/.for-docs
DOCS := $(VENV)/docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS)
PACKAGES := packages/plan packages/testing
SOURCES := src $(patsubst %,%/src,$(PACKAGES))

# `make test` runs what is not marked slow. Two processes share the files, the longest first, so that
# both end at the same time; Ray is in one file of them. `make test-all` runs everything in three turns: the tests that start Ray
# again and again have one of their own, and what makes networks or compares times runs alone.
ALONE := $(patsubst %,tests/examples/test_%.py,compare_sync_async ignore_stragglers)
ON_RAY := tests/benchmarks tests/ray tests/examples/test_programs.py
EXAMPLES := $(filter-out $(ALONE) $(ON_RAY),$(wildcard tests/examples/test_*.py))
BESIDE := tests/learning $(EXAMPLES) tests/faults tests/contract tests/sim tests/api tests/deploy \
	tests/unit
QUICK := -m "not slow" $(patsubst %,tests/%,ray learning examples faults contract sim benchmarks api deploy \
	network unit)
PYTEST := $(BIN)/python -m pytest
IN_TWO := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# Each of the hundreds of processes that the tests start would compile all sources anew, in 0.4 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo lint test test-all soak bench docs release-check clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train MNIST through a parameter server, in Sync and in Async"
	@echo "make test    ruff, mypy, import-linter and the tests that are not marked slow"
	@echo "make test-all  the same with every test: long learning runs, the Ray matrix, networks"
	@echo "make soak    simulated clusters, SEEDS=10000 seeds, and RESUMES=1000 of clusters that are lost;"
	@echo "             SOAK='--first 5000 --policy async'"
	@echo "make bench   measure against the rivals; the tables of docs/benchmarks.md"
	@echo "make docs    the documentation as a site, build/site/index.html, which is read without a network"
	@echo "make release-check  build what is committed, and install and run it elsewhere; leaves it in dist/;"
	@echo "             RELEASE='--core python3.12 --core python3.13 --final'"
	@echo "make venv    only make .venv"
	@echo "make clean   remove .venv, caches and runs/"

venv: $(FOR_TEST)

$(FOR_DEMO): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; torch is large) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt -e ".[examples]" $(TORCH)
	@touch $@

# Distributions of this repository that need each other are given to pip together: it then looks for
# none of them in an index.
$(FOR_TEST): $(FOR_DEMO) $(wildcard packages/*/pyproject.toml packages/*/hatch_build.py)
	@echo "Installing what the tests and benchmarks need into $(VENV) (once) ..."
	@$(PIP) -c constraints.txt -e ".[examples,dev,ray,train,plan,testing]" $(patsubst %,-e %,$(PACKAGES)) $(TORCH)
	@touch $@

# mkdocs has an environment of its own, so that what the tests run with does not depend on it.
$(FOR_DOCS): pyproject.toml constraints.txt
	@echo "Installing mkdocs into $(DOCS) (once) ..."
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) \
		-c constraints.txt -e ".[docs]"
	@touch $@

demo: $(FOR_DEMO)
	@$(BIN)/python examples/mnist.py $(DEMO)

lint: $(FOR_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(SOURCES)
	$(BIN)/lint-imports --no-logo

test: lint
	$(PYTEST) $(IN_TWO) $(QUICK)

test-all: lint
	$(PYTEST) $(IN_TWO) $(BESIDE)
	$(PYTEST) $(IN_TWO) $(ON_RAY)
	$(PYTEST) $(patsubst %,--ignore=%,$(BESIDE) $(ON_RAY))

soak: $(FOR_TEST)
	@$(BIN)/python -m tests.sim.soak --seeds $(SEEDS) --resumes $(RESUMES) $(SOAK)

bench: $(FOR_TEST)
	@$(BIN)/python -m benchmarks $(BENCH)

docs: $(FOR_TEST) $(FOR_DOCS)
	$(BIN)/python docs/write_api.py --check
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs --quiet build
	$(PYTEST) tests/site

release-check: $(FOR_TEST)
	@$(BIN)/python -m tests.deploy.release --python "$(PYTHON)" --torch "$(TORCH)" \
		--pip-options "$(PIP_OPTIONS)" $(RELEASE)

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find $(SOURCES) tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + || true
