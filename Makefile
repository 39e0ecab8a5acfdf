# Everything a fresh machine needs: Python 3.11 and pip. Each target does its own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
DOCS := $(VENV)/.ready-docs

.PHONY: train test check slow mutants bench site tutorials clean

train: $(READY)
	$(BIN)/noshuffle train
	@echo "for noshuffle in this shell: . $(BIN)/activate"

# Three at a time on two cores: some tests wait for processes of their own most of the time. Where
# the environment forbids compiled files, every process would compile all test modules for itself.
test: export PYTHONDONTWRITEBYTECODE =
test: $(DEV)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	# Test modules are compiled meanwhile, once; else each of the three would do it for itself.
	@$(BIN)/python -m pytest --noconftest -p tests.rewrite_only > /dev/null 2>&1 & $(BIN)/mypy; is=$$?; wait; exit $$is
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3

# Every speed table beside its peers; what is not installed is named and left out.
bench: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/all.py

# Plants every privacy bug of tests/mutants in a copy of src/ and runs the tests that must notice it.
mutants: $(DEV)
	CI=1 $(BIN)/python -m tests.mutants

# The pages of docs/tutorials from top to bottom, all or one (make tutorial-mnist): what they print, and
# notebooks of them.
NOTEBOOKS := $(BIN)/python docs/notebooks.py build/notebooks
tutorials: $(DEV)
	$(NOTEBOOKS) --show

tutorial-%: $(DEV)
	$(NOTEBOOKS) --show $*

# docs/ as a static site in site/, tutorials run anew where they or the package changed; a link that leads
# nowhere fails.
site: $(DEV) $(DOCS)
	$(NOTEBOOKS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open site/index.html; for the search: $(BIN)/python -m http.server -d site"

slow: $(DEV)
	$(BIN)/python -m pytest -m slow

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/noshuffle/native/*.[ch]) | $(VENV)/bin/python
	@echo "setting up .venv, once: PyTorch and what else is needed; some minutes without a word"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(DEV): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,federated]'
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site build/notebooks
