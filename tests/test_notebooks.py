"""Notebooks define no model code, contain the outputs of one clean run, and run in a fresh kernel."""

import ast
import importlib.util
import json
import re
import runpy

import pytest

from tests.cases import others_soak
from tests.conftest import FAST_TO_COMPILE, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: int(path.stem.split("_")[0]))
# Classes of Flax that are layers or build them.
LAYERS = re.compile(r"\b(?:nnx|nn)\.(?!Rngs\b|initializers\b|split\b|merge\b|state\b)[A-Z]\w*|flax\.linen")


def cells(path, cell_type):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == cell_type]


def code(path):
    lines = []
    for cell in cells(path, "code"):
        for line in "".join(cell["source"]).split("\n"):
            # `pass` keeps an `if` valid whose only line is a shell command or a magic.
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


def test_every_lecture_has_its_notebook():
    assert [path.stem for path in NOTEBOOKS] == [
        "1_soft_dictionary", "2_order", "3_recurrence", "4_transformer", "5_gpt", "6_many_devices",
        "7_bert", "8_vision", "9_images_and_words", "10_speech_decisions_graphs",
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


def test_a_class_or_a_layer_is_detected(tmp_path):
    for bad in ("class Mine:\n    pass", "layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))"):
        path = tmp_path / "bad.ipynb"
        cell = {"cell_type": "code", "source": f"from transformer_jax import GPT\n{bad}", "outputs": []}
        path.write_text(json.dumps({"cells": [cell]}))
        with pytest.raises(AssertionError, match="belongs in the package"):
            test_a_notebook_defines_no_model_code(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_come_from_one_clean_run(path):
    saved_cells = cells(path, "code")
    assert [cell["execution_count"] for cell in saved_cells] == list(range(1, len(saved_cells) + 1)), (
        "top to bottom"
    )
    check_outputs([output for cell in saved_cells for output in cell["outputs"]])
    pictures = [o for cell in saved_cells for o in cell["outputs"] if "image/png" in o.get("data", {})]
    assert len(pictures) >= 3
    assert "find_spec" in "".join(saved_cells[0]["source"]), "the first cell installs a missing package"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_exists(path):
    for node in ast.walk(code(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("transformer_jax"):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                exists = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                assert exists, f"{node.module} has no {name}"


@pytest.mark.long
@pytest.mark.parametrize("path", others_soak(NOTEBOOKS, *NOTEBOOKS[:2]), ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_fresh_kernel(path):
    """Each training takes only a few steps; `make notebooks` takes all of them for the saved outputs."""
    # After fewer steps the translator writes no words, and the notebook draws the attention of the words.
    steps = 120 if path.stem == "4_transformer" else 20
    pytest.importorskip("nbclient", reason="runs notebooks: the dev requirements")
    pytest.importorskip("nbformat", reason="reads notebooks: the dev requirements")
    executed = runpy.run_path(str(ROOT / "notebooks/execute.py"))["executed"]
    notebook = executed(path, steps=steps, xla_flags=" ".join(FAST_TO_COMPILE))
    check_outputs([output for cell in notebook.cells for output in cell.get("outputs", [])])
