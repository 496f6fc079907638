# Everything starts from a fresh clone: each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: translate test test-all lint types lock clean

# The embedded corpus: a Transformer from nothing to scored translations.
translate: $(VENV)/train
	$(BIN)/python -m experiments.translate

# The suite that everybody runs.
test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal

# With the long tests: whole commands, kills, a full disk, parity with torch where it is installed.
test-all: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal --long

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

# Pins for every supported Python, written from pyproject.toml.
lock: $(VENV)/uv
	$(BIN)/uv pip compile -q --universal --no-header --no-annotate --upgrade \
		--extra train pyproject.toml -o requirements/train.txt
	$(BIN)/uv pip compile -q --universal --no-header --no-annotate \
		--extra train --extra tfds --extra test --extra dev pyproject.toml \
		-c requirements/train.txt -o requirements/dev.txt

$(VENV)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv==0.13.8
	touch $@

# Byte code is compiled once here; each command would otherwise compile it anew where caches are off.
$(VENV)/train: requirements/train.txt pyproject.toml | $(VENV)/uv
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -r requirements/train.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	touch $@

$(VENV)/test $(VENV)/dev: requirements/dev.txt pyproject.toml | $(VENV)/uv
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -r requirements/dev.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	touch $(VENV)/train $(VENV)/test $(VENV)/dev

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
