# Everything but docs, dist and the two for peers and kernels runs in .venv, created on first use from constraints.txt.
# On Windows run it in Git Bash (make itself: choco install make).
PYTHON ?= python3
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
VENV := .venv
BIN := $(VENV)/$(SCRIPTS)
READY := $(VENV)/.ready
# another torch than the pinned one: make test TORCH=2.10.0, or TORCH=newest
TORCH ?=
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test test-all test-peers test-kernels check lint types format docs bench dist clean

setup: $(READY)

demo: $(READY)
	$(BIN)/seqboat train demo && $(BIN)/seqboat report runs/demo

# one thread per test process: two processes with two threads each would wait for each other on two cores. A file's tests
# stay in one process, which makes its shared fixtures once, and files come in order: the last ones are the shortest.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) -m "not slow"

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL)

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/seqboat bench

# mixers beside independent packages; MEGA is only in a transformers older than the rest of the project supports. pytest
# fails on a missing test; a skipped one, as where a package is missing, fails here.
PEERS := .venv-peers
COMPARISONS := \
	tests/test_ssm.py::test_s5_equals_another_implementation \
	tests/test_mixers.py::test_mega_equals_another_implementation \
	tests/test_mixers.py::test_agrees_with_performer_pytorch \
	tests/test_mixers.py::test_agrees_with_the_package_linformer \
	tests/test_mixers.py::test_agrees_with_x_transformers_where_the_equations_meet \
	tests/test_mixers.py::test_bigbird_agrees_with_transformers \
	tests/test_mixers.py::test_reformer_agrees_with_transformers
test-peers: $(PEERS)/.ready
	OMP_NUM_THREADS=1 $(PEERS)/$(SCRIPTS)/pytest -rs --junit-xml=$(PEERS)/comparisons.xml $(COMPARISONS)
	@! grep --quiet "<skipped" $(PEERS)/comparisons.xml || { echo "comparisons were skipped"; exit 1; }

# Triton's kernels on the CPU, in its interpreter, which it chooses when it is imported
KERNELS := .venv-kernels
test-kernels: $(KERNELS)/.ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(KERNELS)/$(SCRIPTS)/pytest -n 2 -p no:cacheprovider tests/kernels

# the documents as a site in site/; the API page is made from our source without importing it
DOCS := .venv-docs
docs: $(DOCS)/.ready
	$(DOCS)/$(SCRIPTS)/zensical build --strict

# wheel and source archive of the last commit, with its time, made by the hashed packages of requirements-build.txt
DIST := .venv-dist
dist: $(DIST)/.ready
	rm -rf build/source && mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(DIST)/$(SCRIPTS)/python -m build --no-isolation --outdir dist build/source

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -e '$(if $(TORCH),/^torch==/d,)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python $(PIP) --constraint $(VENV)/constraints.txt --editable ".[lab,hf,onnx,dev]" \
		"torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))"
	touch $@

# the pins of constraints.txt, but for those that constraints-peers.txt has in another version
$(PEERS)/.ready: pyproject.toml constraints.txt constraints-peers.txt
	test -x $(PEERS)/$(SCRIPTS)/python || $(PYTHON) -m venv $(PEERS)
	awk -F== '!/^#/ && !seen[$$1]++' constraints-peers.txt constraints.txt > $(PEERS)/constraints.txt
	$(PEERS)/$(SCRIPTS)/python $(PIP) --constraint $(PEERS)/constraints.txt --editable ".[peers]" pytest pytest-timeout
	touch $@

$(KERNELS)/.ready: pyproject.toml constraints.txt
	test -x $(KERNELS)/$(SCRIPTS)/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/$(SCRIPTS)/python $(PIP) --constraint constraints.txt --editable ".[kernels]" pytest pytest-timeout pytest-xdist
	touch $@

$(DOCS)/.ready: constraints.txt
	test -x $(DOCS)/$(SCRIPTS)/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/$(SCRIPTS)/python $(PIP) --constraint constraints.txt zensical mkdocstrings-python
	touch $@

$(DIST)/.ready: requirements-build.txt
	test -x $(DIST)/$(SCRIPTS)/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/$(SCRIPTS)/python $(PIP) --require-hashes -r requirements-build.txt
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(KERNELS) $(DOCS) $(DIST) build dist site src/*.egg-info .mypy_cache .pytest_cache \
		.ruff_cache .hypothesis
