# `make demo` and `make test` set everything up on a fresh machine; a second call only does what is new.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two busy threads on a shared machine are slower than one.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-slow test-sglang lint format clean

$(VENV)/.installed: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt $(PIP_OPTIONS)
	touch $@

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# The trainings on the toy (about 15 minutes on two cores).
test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow -s

# A real SGLang server on a CPU, in an environment of its own.
.venv-sglang/.installed: tests/sglang_cpu/install.sh
	bash tests/sglang_cpu/install.sh .venv-sglang
	touch $@

test-sglang: $(VENV)/.installed .venv-sglang/.installed
	$(BIN)/python -m pytest -m sglang

# The toy, its cold start, and one question that needs two windows at once.
demo: $(VENV)/.installed
	test -d toy_data || $(BIN)/python toy.py build toy_data
	$(BIN)/python sft.py configs/toy_sft.yaml
	$(BIN)/python rollout.py --model runs/toy/sft/model --video toy_data/videos/test00000.mp4 --k 4 "Which color flashes?"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf runs .pytest_cache .ruff_cache .hypothesis
