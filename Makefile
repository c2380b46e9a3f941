# `make demo` and `make test` do all the set-up themselves; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(BIN)/mtmd describe examples/shapes.png

test: $(VENV)/tested-with
	$(BIN)/python -m pytest

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
