# Two commands: `make verify` runs the main job, `make test` passes the tests. Both set up what they need; PYTHON may
# name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
ZOO ?= .venv-zoo
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

# Whole suites and workers start hundreds of processes: none of them is to compile all of this package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: verify test whole lint types docs bench zoo sweep release clean

verify: $(STAMP)
	$(BIN)/veriformer check reference torch --profile quick --out build/verify
	$(BIN)/veriformer ablate --out build/ablations

test: lint types
	$(BIN)/python -m pytest -n auto

# All tests: what is to pass before a release, and before a change of more than one room.
whole: lint types
	$(BIN)/python -m pytest -n auto --whole

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy checks the package's types; pyright that every import is found in all that is here.
types: $(STAMP)
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

# The site, without a network: build/site/index.html opens as a file. Every link inside it must lead somewhere.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean
	@echo "build/site/index.html"

bench: $(STAMP)
	$(BIN)/python benchmarks/check_speed.py
	$(BIN)/python benchmarks/ablation_speed.py
	$(BIN)/python benchmarks/stack_throughput.py --widths 1 4 12 24

# Every library that is checked, at the releases of requirements-zoo.txt: a lock, since some of them exclude one another by
# what they declare and work together all the same. SWEEP may name libraries: make sweep SWEEP="hf timm".
zoo: $(ZOO)/.installed

sweep: zoo
	$(ZOO)/bin/veriformer sweep $(SWEEP) --model-seconds 300 --out build/sweep

$(ZOO)/.installed: requirements-zoo.txt constraints.txt pyproject.toml
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet -c constraints.txt torch
	$(ZOO)/bin/python -m pip install --quiet --no-deps -r requirements-zoo.txt
	$(ZOO)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=")'
	@test -d src/veriformer/cli || { echo 'src/ holds symbolic links: git config core.symlinks true && git checkout src'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

# The sdist and the wheel, each tried in empty environments with the oldest torch and the newest.
release:
	PYTHON=$(PYTHON) .ci/release

clean:
	rm -rf build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .veriformer
