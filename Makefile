# Everything runs in .venv, made on first use from a Python 3.11 or newer and pip: `make quickstart`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
# One process per core, each with one thread: threads of several test processes would only fight for the cores.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1, 16))")
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: quickstart test test-slow lint tutorials bench clean

quickstart: $(STAMP)
	MPLBACKEND=Agg $(BIN)/python -m pyro_ngvi.quickstart

test: $(STAMP)
	$(PYTEST)

test-slow: $(STAMP)
	$(PYTEST) -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

tutorials: $(STAMP)
	$(PYTEST) -o addopts= --nbmake --nbmake-timeout=600 tutorials

bench: $(BENCH_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.time_to_target
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.particles
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.step_cost
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.any_guide
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ifvb_paper
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.blr_papers --only fig1 slang digits
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.blr_papers --only uci --seeds 20
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.whvi_paper.transform
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.whvi_paper --seeds 5
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.flows --seeds 10
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.cvi

# The pinned torch goes in first, by its exact version, so that no later requirement can choose another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
	  || { echo "pyro-ngvi needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) -e ".[test,tutorials]"
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(PIP_INSTALL) -e ".[bench]"
	touch $@

clean:
	rm -rf .venv .venv-arviz1 dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
