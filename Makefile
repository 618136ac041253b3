# Everything runs in .venv, which is made on first use from the pinned versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := cli,train,report,image,hf,dev

.PHONY: demo test test-all check lint format types bench reproduce-small clean

demo: $(READY)
	$(BIN)/seqboat demo

# one thread per test process: two processes with two threads each would wait for each other on two cores
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/seqboat bench

# every table and figure, hours on two cores; needs the data (docs/data.md); a second call goes on where the first
# was stopped. Runs share the cores, measurements of speed come last and have both to themselves.
TRAINED := diagnostics lra speech enwik8 mixers ablation tradeoff
OBSERVED := activation confidence span
MEASURED := efficiency mixers-efficiency
REPRODUCE := $(BIN)/seqboat reproduce --scale small --page docs/results.md
reproduce-small: $(READY)
	OMP_NUM_THREADS=1 $(REPRODUCE) $(TRAINED) & OMP_NUM_THREADS=1 $(REPRODUCE) $(TRAINED); wait
	$(REPRODUCE) $(TRAINED) $(OBSERVED)
	$(REPRODUCE) $(MEASURED)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
