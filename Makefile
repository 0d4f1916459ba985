# Everything runs in .venv, made on first use from a Python 3.11 or newer and pip: `make quickstart`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
BENCH_STAMP := .venv/.installed-bench
WHEEL_STAMP := .venv-wheel/.torch
ARVIZ1_STAMP := .venv-arviz1/.torch
ELSEWHERE_STAMP := .venv-elsewhere/.installed
# Python compiles what it imports on first use: pip would compile all there is, on one core, half of its time.
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# One process per core, each with one thread: threads of several test processes would only fight for the cores.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1, 16))")
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LATEST_INSTALL := .venv-latest/bin/pip install --disable-pip-version-check --upgrade --upgrade-strategy eager
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: quickstart test test-slow test-latest lint tutorials docs package package-arviz1 elsewhere bench clean

quickstart: $(STAMP)
	MPLBACKEND=Agg $(BIN)/python docs/quickstart.py $(QUICKSTART)

test: $(STAMP)
	$(PYTEST)

test-slow: $(STAMP)
	$(PYTEST) -m slow

# The newest releases that pip gives, in an environment of their own; ArviZ 1.x needs PYTHON to be 3.12 or newer.
test-latest:
	$(PYTHON) -m venv .venv-latest
	$(LATEST_INSTALL) torch --index-url $(TORCH_INDEX) --timeout 15 --retries 1 || $(LATEST_INSTALL) torch
	$(LATEST_INSTALL) -e ".[test]"
	$(PYTEST:$(BIN)/%=.venv-latest/bin/%)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

tutorials: $(STAMP)
	$(PYTEST) -o addopts= --nbmake --nbmake-timeout=900 docs/tutorials/*.ipynb

# The site, in docs/_build/html. Its code cells run; warnings are errors.
docs: $(DOCS_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -j $(WORKERS) -b html docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

# The sdist, the wheel made from it, and that wheel in an environment with nothing else: README's code and the quickstart.
package: $(STAMP) $(WHEEL_STAMP)
	rm -rf dist $(WHEEL_STAMP)
	$(BIN)/python -m build --quiet --outdir dist .
	$(PIP_INSTALL:.venv/%=.venv-wheel/%) --quiet dist/*.whl scikit-learn matplotlib
	MPLBACKEND=Agg .venv-wheel/bin/python docs/run_installed.py

# The wheel of `make package` with ArviZ 1.x, which needs PYTHON to be 3.12 or newer, and the tests of the file that knows ArviZ.
package-arviz1: $(ARVIZ1_STAMP)
	rm $(ARVIZ1_STAMP)
	.venv-arviz1/bin/pip install --disable-pip-version-check --no-compile --quiet dist/*.whl 'arviz>=1,<2' scikit-learn matplotlib pytest
	MPLBACKEND=Agg .venv-arviz1/bin/python docs/run_installed.py
	.venv-arviz1/bin/python -c "import arviz, sys; print('Python', sys.version.split()[0], 'ArviZ', arviz.__version__)"
	.venv-arviz1/bin/pytest -p no:cacheprovider -o addopts= tests/contract/test_arviz_compat.py

# What the docs show of NumPyro, PyMC, Stan and Lightning, run beside ours in an environment of its own.
elsewhere: $(ELSEWHERE_STAMP)
	OMP_NUM_THREADS=1 MPLBACKEND=Agg .venv-elsewhere/bin/python docs/run_elsewhere.py

bench: $(BENCH_STAMP) elsewhere
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.time_to_target
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.leaderboard
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.particles
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.step_cost
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.distributed
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

# Nothing but torch; `make package` takes the stamp away, so each wheel meets a new one.
$(WHEEL_STAMP):
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	$(PIP_INSTALL:.venv/%=.venv-wheel/%) --quiet torch==2.13.0
	touch $@

# PyPI's Linux build of torch comes with 5 GB of CUDA libraries, without which it cannot be imported even where there is no
# GPU. torch's own index has builds without CUDA; PyPI is the second choice, for machines that cannot reach that index.
$(ARVIZ1_STAMP): TORCH := .venv-arviz1/bin/pip install --disable-pip-version-check --no-compile --quiet torch==2.13.0
$(ARVIZ1_STAMP):
	rm -rf .venv-arviz1
	$(PYTHON) -m venv .venv-arviz1
	$(TORCH) --index-url $(TORCH_INDEX) --timeout 15 --retries 1 || $(TORCH)
	touch $@

$(ELSEWHERE_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-elsewhere
	$(PIP_INSTALL:.venv/%=.venv-elsewhere/%) --quiet torch==2.13.0
	$(PIP_INSTALL:.venv/%=.venv-elsewhere/%) --quiet -e ".[elsewhere]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP_INSTALL) -e ".[docs]"
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(PIP_INSTALL) -e ".[bench]"
	touch $@

clean:
	rm -rf .venv .venv-arviz1 .venv-latest .venv-wheel .venv-elsewhere dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
