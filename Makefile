# Everything starts from a fresh clone: each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: translate test test-all soak lint types docs notebooks lock clean

# The embedded corpus: a Transformer from nothing to scored translations.
translate: $(VENV)/train
	$(BIN)/python -m experiments.translate

# The suite that everybody runs.
test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal

# With the long tests: whole commands, kills, a full disk, parity with torch where it is installed.
test-all: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal --long

# What breaks only rarely, many times over (a run that is killed a hundred times), and what only takes long.
soak: $(VENV)/test
	$(BIN)/python -m pytest --long --soak tests/commands/test_kills.py tests/training/test_checkpoints.py \
		tests/layers/test_long_attention.py tests/experiments/test_induction_heads.py

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

# The site in build/docs, from docstrings, the README and the notebooks as they are saved; a warning is an error.
# All of it is read anew (-E): what was read before would not warn again.
docs: $(VENV)/docs
	$(BIN)/python docs/pages.py
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees build/pages build/docs

# The notebooks from clean kernels, saved with their outputs.
notebooks: $(VENV)/dev
	$(BIN)/python notebooks/execute.py

# Pins for every supported Python, written from pyproject.toml.
lock: $(VENV)/uv
	$(BIN)/uv pip compile -q --universal --no-header --no-annotate --upgrade \
		--extra train pyproject.toml -o requirements/train.txt
	$(BIN)/uv pip compile -q --universal --no-header --no-annotate \
		--extra train --extra tfds --extra notebooks --extra test --extra dev pyproject.toml \
		-c requirements/train.txt -o requirements/dev.txt
	$(BIN)/uv pip compile -q --universal --no-header --no-annotate \
		--extra train --extra docs pyproject.toml -c requirements/dev.txt -o requirements/docs.txt

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

$(VENV)/docs: requirements/docs.txt pyproject.toml | $(VENV)/uv
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -r requirements/docs.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	touch $(VENV)/train $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
