# Everything but test-peers, test-kernels, kernel-gate, launches, docs and dist runs in .venv, created on first use from the
# pinned versions in constraints.txt.
# On Windows run it in Git Bash (make itself: choco install make).
PYTHON ?= python3
VENV := .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
READY := $(VENV)/.ready
EXTRAS := cli,train,report,image,parquet,hf,onnx,dev
# another torch than the pinned one: make test TORCH=2.10.0, or TORCH=newest
TORCH ?=

.PHONY: demo test test-all test-peers test-kernels kernel-gate launches check lint format types \
	docs test-docs diagrams bench reproduce-small browser audit dist release clean

demo: $(READY)
	$(BIN)/seqboat train demo && $(BIN)/seqboat report runs/demo

# one thread per test process: two processes with two threads each would wait for each other on two cores. A file's tests
# stay in one process, which makes its shared fixtures once, and files come in order: the last ones are the shortest.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) -m "not slow"

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL)

# compare mixers with independent packages, in a separate environment from constraints-peers.txt: MEGA is only in a
# transformers older than the rest of the project supports. pytest fails on a missing test; a skipped one, as where a
# package is missing, fails here.
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
	OMP_NUM_THREADS=1 $(PEERS)/$(SCRIPTS)/pytest -rs --junit-xml=$(PEERS)/comparisons.xml $(COMPARISONS)
	@! grep --quiet "<skipped" $(PEERS)/comparisons.xml || { echo "comparisons were skipped"; exit 1; }

# Triton kernels on the CPU, in Triton's interpreter: a separate environment, for Triton is 700 MB and never needed by
# the core; the make target sets the variable because Triton reads it when it is imported
KERNELS := .venv-kernels
test-kernels: $(KERNELS)/.ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(KERNELS)/$(SCRIPTS)/pytest -n 2 -p no:cacheprovider tests/kernels

# every kernel in every configuration, compiled for GPUs that are not here; the table goes to docs/gpu.md
kernel-gate: $(KERNELS)/.ready
	$(KERNELS)/$(SCRIPTS)/python tools/kernel_gate.py --page docs/gpu.md

# launches and traffic of a training step and of decoding, counted, and what they allow a GPU; tables of docs/gpu.md
launches: $(KERNELS)/.ready
	TRITON_INTERPRET=1 $(KERNELS)/$(SCRIPTS)/python tools/launches.py --decode --page docs/gpu.md
	TRITON_INTERPRET=1 $(KERNELS)/$(SCRIPTS)/python tools/roofline.py --page docs/gpu.md

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

# what the documents say: links, code blocks, examples, generated tables and diagrams
test-docs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_readme.py tests/test_public.py

# the documents and an API reference as a site in site/, in a separate environment: it reads our source without
# importing it, so it needs neither torch nor a network. Warnings are errors, and every link is followed.
DOCS := .venv-docs
docs: $(DOCS)/.ready
	$(DOCS)/$(SCRIPTS)/python tools/website.py collect
	NO_MKDOCS_2_WARNING=1 $(DOCS)/$(SCRIPTS)/mkdocs build --quiet --strict --config-file build/mkdocs.yml
	$(DOCS)/$(SCRIPTS)/python tools/website.py check site

diagrams: $(READY)
	$(BIN)/python tools/diagrams.py

bench: $(READY)
	$(BIN)/seqboat bench

# every table and figure, hours on two cores; needs the data (docs/data.md); a second call continues where the first
# one stopped. Runs share the cores.
TARGETS := lra speech enwik8 ablation tradeoff activation confidence span efficiency
REPRODUCE := $(BIN)/seqboat reproduce
reproduce-small: $(READY)
	OMP_NUM_THREADS=1 $(REPRODUCE) $(TARGETS) & OMP_NUM_THREADS=1 $(REPRODUCE) $(TARGETS); wait
	$(REPRODUCE) page runs/reproduce/results.jsonl --page docs/results.md

# a page that runs the bundled language model in a browser, from build/browser and nothing else; needs npm, once
browser: $(READY)
	$(BIN)/python tools/browser.py build/browser

# licenses of everything installed; known vulnerabilities too if pip-audit is installed in .venv and has a network
audit: $(READY)
	$(BIN)/python tools/pins.py audit

# wheel and source archive from the last commit, built twice and compared, by hashed packages only
DIST := .venv-dist
dist: $(DIST)/.ready
	$(DIST)/$(SCRIPTS)/python tools/dist.py dist

# upload what dist built to the release of the current tag, which has to name the version
release: dist
	test "$$(git describe --exact-match --tags)" = "v$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/seqboat/version.py)"
	gh release create "$$(git describe --exact-match --tags)" --notes-file CHANGELOG.md dist/*

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -e '$(if $(TORCH),/^torch==/d,)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt \
		--editable ".[$(EXTRAS)]" "torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))"
	touch $(READY)

$(PEERS)/.ready: pyproject.toml constraints-peers.txt
	test -x $(PEERS)/$(SCRIPTS)/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/$(SCRIPTS)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-peers.txt \
		--editable ".[peers]" pytest pytest-timeout
	touch $@

$(KERNELS)/.ready: pyproject.toml constraints-kernels.txt
	test -x $(KERNELS)/$(SCRIPTS)/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/$(SCRIPTS)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-kernels.txt --editable ".[kernels]" pytest pytest-timeout pytest-xdist
	touch $@

$(DOCS)/.ready: constraints-docs.txt
	test -x $(DOCS)/$(SCRIPTS)/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/$(SCRIPTS)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-docs.txt \
		mkdocs-material "mkdocstrings[python]" ruff
	touch $@

$(DIST)/.ready: requirements-build.txt
	test -x $(DIST)/$(SCRIPTS)/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/$(SCRIPTS)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-build.txt
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(KERNELS) $(DOCS) $(DIST) build dist site src/*.egg-info .mypy_cache .pytest_cache \
		.ruff_cache .hypothesis
