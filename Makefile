# `make demo` and `make test` do all the set-up themselves; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests share the cores out between this many processes. None of them waits for a core of its own.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Those that load no model, compile no kernel and start no server.
QUICK := tests/test_layering.py tests/clip tests/kernels tests/llm tests/mtmd/prompt tests/mtmd/test_config.py \
    --ignore tests/kernels/gpu --ignore tests/mtmd/prompt/test_bridge.py

.PHONY: demo test check quick lint clean

demo: $(VENV)/installed
	$(BIN)/mtmd describe examples/shapes.png

test: $(VENV)/tested-with
	$(PYTEST)

# What to run before each commit: under a minute on two cores. mypy, one process, runs beside the tests.
check: $(VENV)/tested-with
	$(MAKE) --no-print-directory -j2 lint quick

quick: $(VENV)/tested-with
	$(PYTEST) $(QUICK)

lint: $(VENV)/tested-with
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	sh tools/typecheck.sh $(BIN)/python

# torch first and by its pinned version: a wider request takes gigabytes of CUDA packages.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/tested-with: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	sh tools/browser.sh
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
