# `make demo` and `make test` set everything up on a fresh machine; a second call only does what is new.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two busy threads on a shared machine are slower than one.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: test lint format clean

$(VENV)/.installed: requirements-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-cpu.txt $(PIP_OPTIONS)
	touch $@

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf runs .pytest_cache .ruff_cache .hypothesis
