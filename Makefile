# make demo, make test: the two commands; both set everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test faults lint types docs package resolve benchmark clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("error: Python 3.10 or later is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/tfidf-tune demo

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

faults: install
	ALL_FAULTS=1 $(BIN)/python -m pytest tests/faults

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# The site, in site/; without network. A broken link or anchor is an error (but not under --quiet).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Source distribution and wheel, in dist/; without network.
package: install
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# The table of docs/install.md; needs a package index.
resolve: package
	$(BIN)/python benchmarks/resolve.py dist/*.whl

benchmark: install
	for script in weights fused_head training_step probe; do $(BIN)/python benchmarks/$$script.py || exit; done

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
