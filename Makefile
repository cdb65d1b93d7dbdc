# make train: train a language model with Streaming DiLoCo, here, now.
# make test: lint, types, quick tests.   make test-all: all tests.   make coverage: what the tests reach.
# make hostile: the fuzzers of tests/hostile for hours.
# make release: sdist and wheels in dist/, checked, installed and run.
# make sbom: the dependencies that a user installs, as CycloneDX JSON.
# make gpu: the proof on a GPU, with the PyTorch of PYTHON; without a network, and none of it is installed.
PYTHON ?= python3
BIN := .venv/bin
# The files in their order, which tests/conftest.py decides: by number of tests, those that take minutes would come last.
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
# Where this is set, each of the many processes that the tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env train check test test-all pytest-test pytest-test-all hostile coverage format clean

env: .venv/installed

# Few of the 20,000 files are ever imported; compiling all takes a minute.
.venv/installed: pyproject.toml constraints.txt src/diloco/version.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-compile \
		--editable '.[dev]'
	touch $@

train: env
	$(BIN)/diloco train laptop

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --min-severity warn --output-format min-text

# Tests wait for processes and networks; meanwhile the types are checked.
test test-all: env
	$(MAKE) --no-print-directory --jobs 2 check pytest-$@

pytest-test:
	$(PYTEST) -m "not slow"

pytest-test-all:
	$(PYTEST)

EXAMPLES ?= 10000
hostile: env
	$(PYTEST) tests/hostile --hostile-examples $(EXAMPLES)

# In one process, since the replicas that tests start are measured, too; .coverage.* is one file a process.
coverage: env
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# In pieces of at most 8 minutes that write into GPU_RESULTS as they go: after an interruption, call it again.
GPU_RESULTS ?= gpu-results
.PHONY: gpu
gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/on_gpu.py --output $(GPU_RESULTS)

# The code in the docs, too, is written anew from its files.
format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/generate.py

.PHONY: docs docs-serve
# The pages, in site/; a broken link, or a command with an unknown flag, fails.
docs docs-serve: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(filter docs,$@),build,serve)

# Pythons that have a torch to install here, and those that are tried without one.
PYTHONS ?= $(PYTHON)
WITHOUT_TORCH ?=
.PHONY: release
release: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	WHEEL_OPTIMIZATION=-O3 $(BIN)/pytest tests/test_packaging.py
	$(BIN)/python release.py --pythons $(PYTHONS) --without-torch $(WITHOUT_TORCH)

.PHONY: site
# The pages of VERSION in site/VERSION, beside those of others, as a web server shows them; SITE_URL is its address.
VERSION ?= $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/diloco/version.py)
site: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/python docs/versioned.py $(VERSION) $(SITE_URL)
.PHONY: sbom
# dist/sbom.json: what `pip install diloco` brings, with EXTRAS=lora,wandb those extras too, as CycloneDX.
SBOM := dist/sbom-env
sbom:
	rm -rf $(SBOM) $(SBOM)-tool
	$(PYTHON) -m venv $(SBOM) && $(PYTHON) -m venv $(SBOM)-tool
	$(SBOM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
		'.$(if $(EXTRAS),[$(EXTRAS)])'
	$(SBOM)/bin/python -m pip uninstall --quiet --yes setuptools pip
	$(SBOM)-tool/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt cyclonedx-bom
	$(SBOM)-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file dist/sbom.json $(SBOM)/bin/python
	rm -rf $(SBOM) $(SBOM)-tool

clean:
	rm -rf .venv dist
