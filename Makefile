# Everything but test-peers runs in .venv, which is made on first use from the pinned versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := cli,train,report,image,hf,dev

.PHONY: demo test test-all test-peers check lint format types bench reproduce-small clean

demo: $(READY)
	$(BIN)/seqboat demo

# one thread per test process: two processes with two threads each would wait for each other on two cores
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# ours against other people's packages, in an environment of its own from constraints-peers.txt: MEGA is only in a
# transformers older than the rest of the project works with. A test that is not found is an error of pytest's; one
# that is skipped, as it is where its package is missing, is an error here.
PEERS := .venv-peers
COMPARISONS := \
	tests/test_s5.py::test_equals_another_implementation \
	tests/test_mega.py::test_equals_another_implementation \
	tests/test_performer.py::test_agrees_with_performer_pytorch \
	tests/test_linformer.py::test_agrees_with_the_package_linformer \
	tests/test_transformer_xl.py::test_agrees_with_x_transformers_where_the_equations_meet \
	tests/test_bigbird.py::test_agrees_with_transformers \
	tests/test_reformer.py::test_agrees_with_transformers
test-peers: $(PEERS)/.ready
	OMP_NUM_THREADS=1 $(PEERS)/bin/pytest -rs --junit-xml=$(PEERS)/comparisons.xml $(COMPARISONS)
	@! grep --quiet "<skipped" $(PEERS)/comparisons.xml || { echo "comparisons were skipped"; exit 1; }

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

$(PEERS)/.ready: pyproject.toml constraints-peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-peers.txt \
		--editable ".[peers]" pytest pytest-timeout
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
