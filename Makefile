# `make demo` and `make test` set everything up on a fresh machine; a second call only does what is new.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two busy threads on a shared machine are slower than one.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo paradox test test-slow test-sglang lint format clean

$(VENV)/.installed: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt $(PIP_OPTIONS)
	touch $@

setup: $(VENV)/.installed

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

# The paradox and its cure on one seed (12 minutes on two cores), then one question that needs two windows at once.
demo: $(VENV)/.installed
	$(BIN)/python -m study.paradox demo
	$(BIN)/python rollout.py --model runs/demo/seed0/paragrpo/model --video runs/demo/data/sft/videos/test00003.mp4 --k 4 "Which color flashes?"
	@echo "curves, tables and episodes: runs/demo/report.html"

# Every row and control over three seeds (100 minutes on two cores; goes on where it was stopped) -> results/paradox.md
paradox: $(VENV)/.installed
	$(BIN)/python -m study.paradox study

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis
