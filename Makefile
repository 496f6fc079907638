# Everything starts from a fresh clone: each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ACCELERATORS := .venv-accelerators

.PHONY: translate test test-all fuzz soak accelerators test-accelerators on-accelerator commands-on-accelerator lint types docs notebooks lock clean

# The embedded corpus: a Transformer from nothing to scored translations.
translate: $(VENV)/train
	$(BIN)/python -m experiments.translate

# The suite that everybody runs.
test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal

# With the long tests: whole commands, signals, a full disk, parity with torch where it is installed.
test-all: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal --long

# Thousands of mutated folders, tables, archives and flags.
fuzz: $(VENV)/test
	TRANSFORMER_JAX_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest -n 2 --dist worksteal tests/trust/test_fuzz.py

# What breaks only rarely, many times over (a run that is killed a hundred times), and what only takes long.
soak: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal --long --soak -m soak
	$(BIN)/python -m pytest --long --soak tests/training/test_checkpoints.py -m "not soak"

# Programs for TPUs and GPUs that are not here: what is in them, tested on tiny models.
test-accelerators: $(ACCELERATORS)/ready
	$(ACCELERATORS)/bin/python -m pytest -n 2 --dist worksteal --long tests/accelerators
	$(ACCELERATORS)/bin/python -m experiments.accelerators --jobs 2 --only "124M, 8 x"

# Every model at its published sizes, compiled for the chips that it is meant for: a page of the site.
accelerators: $(ACCELERATORS)/ready
	$(ACCELERATORS)/bin/python -m experiments.accelerators --write docs/measurements/compiled_for_chips.md

# On a machine that has an accelerator, with JAX for it installed: kernels, training steps and generation, checked
# and timed in at most eight minutes, next to PyTorch if it is installed.
ON := runs/on-accelerator
on-accelerator:
	mkdir -p $(ON)
	$(PYTHON) -m experiments.on_accelerator --write $(ON)/results.json --json

# The commands of the page "On an accelerator" in short, on such a machine.
commands-on-accelerator:
	$(PYTHON) -m experiments.translate --run-dir $(ON)/translator
	$(PYTHON) -m experiments.translate --run-dir $(ON)/translator --text "A dog runs ."
	$(PYTHON) -m experiments.language_model --model gpt --preset 124M --context 1024 --batch-size 8 \
		--dtype bfloat16 --steps 20 --run-dir $(ON)/gpt
	$(PYTHON) -m experiments.generate --run-dir $(ON)/gpt --prompt "The" --max-new-tokens 20

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
		--extra train --extra speech --extra decisions --extra graphs --extra tfds --extra notebooks --extra test --extra dev pyproject.toml \
		-c requirements/train.txt -o requirements/dev.txt
	$(BIN)/uv pip compile -q --universal --no-header --no-annotate \
		--extra train --extra test --extra tpu-compiler --extra gpu-compiler pyproject.toml \
		-c requirements/dev.txt -o requirements/accelerators.txt
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

# An environment of its own: where a compiler for accelerators is installed, JAX looks for their drivers.
$(ACCELERATORS)/ready: requirements/accelerators.txt pyproject.toml | $(VENV)/uv
	$(BIN)/uv venv -q --clear --python $(BIN)/python $(ACCELERATORS)
	$(BIN)/uv pip install -q --compile-bytecode --python $(ACCELERATORS)/bin/python \
		-r requirements/accelerators.txt
	$(BIN)/uv pip install -q --python $(ACCELERATORS)/bin/python --no-deps -e .
	touch $@

$(VENV)/docs: requirements/docs.txt pyproject.toml | $(VENV)/uv
	$(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -r requirements/docs.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	touch $(VENV)/train $@

clean:
	rm -rf $(VENV) $(ACCELERATORS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
