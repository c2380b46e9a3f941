# `make demo` and `make test` do all the set-up themselves; a second call is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests share the cores out between this many processes. None of them waits for a core of its own.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Of every check: that imports, words and patterns are as they should be, options in step with their documents, and that the demo model answers.
ALWAYS := tests/test_layering.py tests/test_words.py tests/test_patterns.py tests/docs tests/mtmd/options tests/mtmd/test_python_api.py
# Seconds after which a check begins no further test.
WITHIN ?= 45

.PHONY: demo test ptx ray published check quick lint docs floors audit hostile clients deployments clean

demo: $(VENV)/installed
	$(BIN)/mtmd describe examples/shapes.png

test: $(VENV)/tested-with
	$(PYTEST)

# GPU kernels as they are compiled for TARGET, an instruction at a time: all cases, and the tests of single kernels.
TARGET ?= cuda:80
ptx: $(VENV)/tested-with
	$(PYTEST) --ptx $(TARGET) tests/kernels/gpu/test_table.py tests/kernels/gpu/test_flash_attention.py tests/kernels/gpu/test_gpu_*.py

# `mtmd batch --ray` and `mtmd serve --ray` on a Ray that is started here, which takes longer to install and to start than other tests to run.
ray: $(VENV)/tested-with $(VENV)/with-ray
	$(BIN)/python -m pytest -q tests/web/replicas/on_aiohttp.py tests/mtmd/cluster/on_ray.py tests/web/replicas/on_ray.py

# Published models, some hundred MB of them fetched by pip, against transformers with the same files: PUBLISHED="smollm2" chooses.
PUBLISHED ?= smollm2 qwen2.5-coder gemma3
PUBLISHED_MODELS := $(VENV)-published/models
published: $(VENV)/tested-with $(VENV)/with-accelerate $(if $(filter qwen2.5-coder,$(PUBLISHED)),$(VENV)-published/installed)
	$(BIN)/python tests/published/published_models.py $(PUBLISHED_MODELS) $(PUBLISHED)
	OMP_NUM_THREADS=$(WORKERS) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/published/on_*.py \
	    --published "$(PUBLISHED)" --published-folder $(PUBLISHED_MODELS)

# What to run before each commit: about a minute on two cores. mypy, one process, runs beside the tests.
check: $(VENV)/tested-with
	$(MAKE) --no-print-directory -j2 lint quick

# The tests nearest to what was changed since main, and a few of everything.
quick: $(VENV)/tested-with
	near=$$($(BIN)/python tools/near_tests.py) && $(PYTEST) --within $(WITHIN) $$near $(ALWAYS)

lint: $(VENV)/tested-with
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	sh tools/typecheck.sh $(BIN)/python

# docs/ as a site, in .venv-docs/site: every page in the navigation, every link and anchor found, or it fails.
docs: $(VENV)-docs/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict --config-file tools/mkdocs.yml

$(VENV)-docs/installed: constraints.txt
	test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
	touch $@

# The lowest versions that pyproject.toml allows, and the tests that need neither transformers nor gguf, which want newer ones.
FLOORS := tests/web tests/clip/image tests/mtmd/prompt tests/mtmd/batch tests/mtmd/checkpoint/test_hub.py tests/kernels/checkpoint \
    tests/llm/sampling --ignore tests/web/test_fuzz.py --ignore tests/clip/image/test_pixels_exact.py --ignore-glob '*gguf*' \
    --ignore tests/llm/sampling/test_constraint.py --ignore tests/llm/sampling/test_sampler.py \
    tests/kernels/gpu/on_lowest_triton.py

floors: $(VENV)-floors/installed
	$(VENV)-floors/bin/mtmd describe examples/shapes.png
	$(VENV)-floors/bin/python -m pytest -p no:cacheprovider -n $(WORKERS) --dist worksteal $(FLOORS)

$(VENV)-floors/installed: pyproject.toml constraints.txt tools/floors.py
	test -x $(VENV)-floors/bin/python || $(PYTHON) -m venv $(VENV)-floors
	$(VENV)-floors/bin/python -m pip install --quiet --disable-pip-version-check packaging
	$(VENV)-floors/bin/python tools/floors.py > $(VENV)-floors/floors.txt
	$(VENV)-floors/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)-floors/floors.txt torch
	$(VENV)-floors/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)-floors/floors.txt -e '.[gpu,parquet,video]' \
	    pytest pytest-xdist openai jsonschema playwright
	sh tools/browser.sh
	touch $@

# Known vulnerabilities of the pinned set, as PyPI knows them: needs pypi.org. A package that could not be looked up is a failure.
audit: $(VENV)/tested-with
	test -x $(VENV)-audit/bin/pip-audit || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip freeze --exclude-editable > $(VENV)-audit/installed.txt
	$(VENV)-audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)-audit/installed.txt

# A server under attack for half an hour, then the data folder, and somebody who reads, under kill -9. HOSTILE="--minutes 5 --schemas 0" chooses; --help lists.
hostile: $(VENV)/tested-with
	$(BIN)/python tests/hostile/run.py $(HOSTILE)
	$(BIN)/python tests/hostile/store_kills.py --kills 50
	$(BIN)/python tests/hostile/answer_kills.py --kills 20
	$(BIN)/python tests/hostile/damaged_files.py --files 2000
	$(BIN)/python tests/hostile/growth.py

# The files of contrib/ with nginx, Caddy and systemd's check, which have to be here, and Chromium.
deployments: $(VENV)/tested-with
	$(BIN)/python tools/deployments.py

# Real clients against the server, in environments of their own: needs pypi.org and, for Node's, npm. CLIENTS="openai ollama" chooses.
clients: $(VENV)/tested-with $(VENV)-clients/installed
	$(BIN)/python -W ignore tests/clients/run.py $(VENV)-clients $(CLIENTS)

CLIENT_PIP := $(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check
$(VENV)-clients/installed: tests/clients/requirements.txt tests/clients/package.json
	test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	grep '^[a-z]' tests/clients/requirements.txt | xargs -n 1 $(CLIENT_PIP)
	$(CLIENT_PIP) --no-deps $$(sed '/^# ---/,$$d; /^#/d' tests/clients/requirements.txt)
	mkdir -p $(VENV)-clients/node
	cp tests/clients/package.json $(VENV)-clients/node
	if command -v npm > /dev/null; then npm install --prefix $(VENV)-clients/node --no-fund --no-audit; fi
	touch $@

# torch first and by its pinned version: a wider request takes gigabytes of CUDA packages.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gpu,video]'
	touch $@

$(VENV)/tested-with: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	sh tools/browser.sh
	touch $@

# transformers opens GGUF files with it.
$(VENV)/with-accelerate: pyproject.toml constraints.txt $(VENV)/tested-with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt accelerate
	touch $@

# Clients that run tools themselves, at the versions that docs/clients.md names.
$(VENV)-published/installed: tests/clients/requirements.txt
	test -x $(VENV)-published/bin/python || $(PYTHON) -m venv $(VENV)-published
	$(VENV)-published/bin/python -m pip install --quiet --disable-pip-version-check $$(grep -E '^(langchain-openai|pydantic-ai)' $<)
	touch $@

$(VENV)/with-ray: pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-floors $(VENV)-audit $(VENV)-clients $(VENV)-published build *.egg-info
