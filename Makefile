# Every target works from a bare clone: the first one that runs makes .venv (needs Python >= 3.10 and a C++ compiler).
#   make demo      train the example on two processes and draw the result (ARGS='--steps 200' adds options)
#   make test      lint, types and the quick tests (ARGS='-k name' adds pytest options)
#   make test-all  all tests; installs Hugging Face's and Lightning's packages and an MPI first (about 300 MB)
#   make test-deepspeed-min, make test-deepspeed-max   the tests that need DeepSpeed, with the oldest release supported and
#                  with the newest on the index, each in an environment of its own, .venv-deepspeed-min and -max
#   make lint      lint and types;  make format  applies the formatter
#   make docs      write the tables of settings in configs/README.md anew
#   make bench     the cost of a step beside AdamW's
#   make bench-sweep   optimizers on real tasks, as many runs as fit into MINUTES=30 (ARGS='--task burgers'); resumable
#   make bench-report  tables and pictures of what bench-sweep has recorded;  make bench-smoke  both in short
#   make clean     removes everything that the targets above made
# PYTHON=/path/to/python3 chooses the interpreter of a new .venv.

PYTHON ?= python3
ARGS ?=
MINUTES ?= 30
VENV := .venv
PY = $(VENV)/bin/python
STAMP := $(VENV)/.dho2-installed
STAMP_ALL := $(STAMP)-all
DEEPSPEED_MIN := $(shell sed -n 's/.*"deepspeed>=\([^"]*\)".*/\1/p' pyproject.toml)
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)

# `deepspeed`, `ninja` and `mpirun` are looked up by name, also by processes that a test starts.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# One thread a process: several ranks share the cores.
export OMP_NUM_THREADS ?= 1
# A private folder for compiled extensions: a killed build in the shared one makes every later run wait for its lock.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Build back-ends under the same pins: older pips read the first name, newer ones the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

PIP_INSTALL = $(PY) -m pip install $(if $(MAKE_TERMOUT),,-q) -c constraints.txt
# Where there is a `flock`, two makes at once install one after the other.
LOCK = if command -v flock >/dev/null; then exec 9>.venv.lock; flock 9; fi
# Where there is no accelerator, CPU is named for DeepSpeed, which else warns about every one it does not find.
ACCELERATOR = if [ -z "$$DS_ACCELERATOR" ] && ! $(PY) -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'; \
	then export DS_ACCELERATOR=cpu; fi

TIME_TO_TARGET = $(PY) examples/benchmarks/time_to_target.py
SMOKE := runs/bench-smoke

.PHONY: help install demo test test-all test-deepspeed-min test-deepspeed-max lint format docs bench bench-sweep
.PHONY: bench-report bench-smoke clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(LOCK); set -e; \
	if [ -e $@ ] && [ -z "$$(find pyproject.toml constraints.txt -newer $@)" ]; then exit 0; fi; \
	if ! $(PY) -c '' 2>/dev/null; then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
			{ echo "$(PYTHON): must be Python >= 3.10; name another one with PYTHON=/path/to/python3"; exit 1; }; \
		echo "[1/3] creating $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi; \
	echo "[2/3] installing $(TORCH)"; \
	$(PIP_INSTALL) '$(TORCH)'; \
	echo "[3/3] installing dho2-ds with its extras"; \
	$(PIP_INSTALL) -e '.[deepspeed,test,bench]'; \
	touch $@

# What only slow tests need.
$(STAMP_ALL): $(STAMP)
	@$(LOCK); set -e; \
	if [ -e $@ ] && [ $@ -nt $(STAMP) ]; then exit 0; fi; \
	echo "installing the extras hf, lightning and mpi"; \
	$(PIP_INSTALL) -e '.[deepspeed,test,bench,hf,lightning,mpi]'; \
	touch $@

demo: $(STAMP)
	@$(ACCELERATOR); $(VENV)/bin/dho2 demo $(ARGS)

test: lint
	@$(ACCELERATOR); $(PY) -m pytest -q --durations=15 $(ARGS)

test-all: $(STAMP_ALL) lint bench-smoke
	@$(ACCELERATOR); $(PY) -m pytest -q --durations=15 -m '' $(ARGS)

# The same pins but DeepSpeed's, which is looked up anew by every run: the newest release is the newest of today.
# Releases come as sources whose build asks the installed torch, so it is built without isolation.
test-deepspeed-min: DEEPSPEED = 'deepspeed==$(DEEPSPEED_MIN)'
test-deepspeed-max: DEEPSPEED = --upgrade deepspeed
test-deepspeed-%: VENV = .venv-deepspeed-$*
test-deepspeed-%: export PIP_CONSTRAINT = $(VENV)/constraints.txt
test-deepspeed-min test-deepspeed-max: test-deepspeed-%:
	@set -e; export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; \
	if ! $(PY) -c '' 2>/dev/null; then $(PYTHON) -m venv --clear $(VENV); fi; \
	grep -v '^deepspeed==' constraints.txt >$(PIP_CONSTRAINT); \
	install() { $(PY) -m pip install $(if $(MAKE_TERMOUT),,-q) "$$@"; }; \
	install '$(TORCH)'; \
	install -e '.[test]'; \
	install --no-build-isolation $(DEEPSPEED); \
	$(PY) -c 'from importlib.metadata import version as v; print("deepspeed", v("deepspeed"), "on torch", v("torch"))'; \
	$(ACCELERATOR); $(PY) -m pytest -q --durations=15 -m deepspeed $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict dho2_ds

format: $(STAMP)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(STAMP)
	@$(VENV)/bin/dho2 settings --into configs/README.md

bench: $(STAMP)
	@$(ACCELERATOR); $(PY) examples/benchmarks/step_cost.py $(ARGS)

bench-sweep: $(STAMP)
	@$(TIME_TO_TARGET) sweep --minutes $(MINUTES) $(ARGS)

bench-report: $(STAMP)
	@$(TIME_TO_TARGET) report $(ARGS)

# The table task needs no fetch. Its records are thrown away first: a resumed sweep would check nothing.
bench-smoke: $(STAMP)
	@rm -rf $(SMOKE)
	@$(TIME_TO_TARGET) sweep --task mlp --peer adamw --peer dho2-soap --trials 3 --seeds 2 --minutes 2 --results $(SMOKE)
	@$(TIME_TO_TARGET) report --results $(SMOKE)

clean:
	rm -rf $(VENV) $(VENV)-deepspeed-min $(VENV)-deepspeed-max .venv.lock .torch_extensions .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
