"""Notebooks import, never define; their saved outputs are real and clean, and they run from nothing."""

import ast
import json
import re
import runpy

import pytest

from tests.conftest import FAST_TO_COMPILE, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What of Flax makes a layer, or is one.
LAYERS = re.compile(r"\b(?:nnx|nn)\.(?!Rngs\b|initializers\b|split\b|merge\b|state\b)[A-Z]\w*|flax\.linen")


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def code(path):
    lines = []
    for cell in cells(path, "code"):
        for line in "".join(cell["source"]).split("\n"):
            # A shell command or a magic may be all that an `if` holds.
            lines.append(re.sub(r"^(\s*)[%!].*", r"\1pass", line))
    return ast.parse("\n".join(lines))


def check_outputs(outputs):
    for output in outputs:
        assert output["output_type"] != "error", output.get("evalue")
        assert output.get("name") != "stderr", output["text"]
        texts = json.dumps({k: v for k, v in output.items() if k != "metadata"}, ensure_ascii=False)
        texts = re.sub(r'"image/png": "[^"]*"', "", texts)
        assert not re.search(r"\w*Warning\b|Traceback", texts), texts[:500]
        assert not re.search(r"(?<![\w.<])/(?:home|root|work|tmp|usr)/", texts), texts[:500]


def test_the_whole_line_is_there():
    assert [path.stem for path in NOTEBOOKS] == [
        "1_soft_dictionary", "2_order", "3_recurrence", "4_transformer", "5_gpt", "6_many_devices",
        "7_bert", "8_vision",
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_defines_no_model_code(path):
    tree = code(path)
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert classes == [], "a class belongs in the package"
    layers = LAYERS.findall(ast.unparse(tree))
    assert layers == [], "a layer belongs in the package"
    package = {
        node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert "transformer_jax" in package
    assert "experiments" not in package


def test_a_class_or_a_layer_would_be_found(tmp_path):
    for bad in ("class Mine:\n    pass", "layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))"):
        path = tmp_path / "bad.ipynb"
        cell = {"cell_type": "code", "source": f"from transformer_jax import GPT\n{bad}", "outputs": []}
        path.write_text(json.dumps({"cells": [cell]}))
        with pytest.raises(AssertionError, match="belongs in the package"):
            test_a_notebook_defines_no_model_code(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_are_of_one_clean_run(path):
    found = cells(path, "code")
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1)), "top to bottom"
    check_outputs([output for cell in found for output in cell["outputs"]])
    pictures = [o for cell in found for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(pictures) >= 3
    assert "find_spec" in "".join(found[0]["source"]), "the first cell installs where it must"


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_nothing(path):
    """With few steps of each training: `make notebooks` takes them all, for the outputs that are saved."""
    # A translator of fewer steps has no words yet, and the notebook draws their attention.
    steps = 120 if path.stem == "4_transformer" else 20
    pytest.importorskip("nbclient", reason="runs notebooks: the dev requirements")
    pytest.importorskip("nbformat", reason="reads notebooks: the dev requirements")
    executed = runpy.run_path(str(ROOT / "notebooks/execute.py"))["executed"]
    notebook = executed(path, steps=steps, xla_flags=" ".join(FAST_TO_COMPILE))
    check_outputs([output for cell in notebook.cells for output in cell.get("outputs", [])])
