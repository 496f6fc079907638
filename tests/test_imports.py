"""Imports flow one way, and importing a model loads no data set, tokenizer or command-line package."""

import ast
import pathlib
import subprocess
import sys

import pytest

import transformer_jax
from tests.conftest import ROOT

PACKAGE = ROOT / "transformer_jax"
HEAVY = ("tensorflow", "tensorflow_datasets", "grain", "matplotlib", "tokenizers", "tyro", "babel", "orbax",
         "sacrebleu", "tensorboardX", "rich", "sklearn", "PIL", "msgspec", "safetensors",
         "seqeval")  # fmt: skip

# The order in which imports flow: a component may import itself and the components of earlier ranks.
ORDER = (
    ("errors", "parameter_names"),
    ("limits",),
    ("json_files",),
    ("distributed",),
    ("data",),
    ("layers",),
    ("models",),
    ("decoding", "evaluation", "pretrained", "interpretability", "plotting"),
    ("training",),
    ("tasks",),
    ("commands",),
)
COMPONENTS = tuple(component for rank in ORDER for component in rank)


def may_import(component: str) -> set[str]:
    """Return the components that one may import: all of earlier ranks, and itself."""
    rank = next(number for number, names in enumerate(ORDER) if component in names)
    return {component, *(name for names in ORDER[:rank] for name in names)}


def imported_names(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("component", COMPONENTS)
def test_imports_flow_one_way(component):
    for path in [*(PACKAGE / component).rglob("*.py"), *PACKAGE.glob(f"{component}.py")]:
        for name in imported_names(path):
            path_parts = name.split(".")
            if path_parts[0] == "transformer_jax" and len(path_parts) > 1:
                assert path_parts[1] in may_import(component), f"{path.relative_to(ROOT)} imports {name}"
            assert path_parts[0] != "experiments", path
            if component == "data":
                assert path_parts[0] not in ("jax", "flax"), f"{path} imports {name}: data is NumPy"


def test_the_package_has_no_other_components():
    components = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    modules = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert components | modules == set(COMPONENTS)


# Readers of files of pairs and texts work without Babel, which only the phrase corpus needs.
READERS = ("data.corpora.pairs", "data.corpora.parallel", "data.corpora.texts", "data.batches.encoded_pairs")


def test_files_of_pairs_need_no_babel():
    modules = ", ".join(f"transformer_jax.{name}" for name in READERS)
    code = f"import sys, {modules}; print('babel' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_importing_every_model_is_light():
    names = sorted(set(transformer_jax.__all__) - {"configure", "load", "train"})
    code = (
        f"import sys, transformer_jax; [getattr(transformer_jax, name) for name in {names}]; "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    # Flax itself imports some of them, so the test asks only what the package adds.
    flax = f"import sys, flax.nnx; print([m for m in {HEAVY} if m in sys.modules])"
    ours, theirs = (
        set(ast.literal_eval(subprocess.check_output([sys.executable, "-c", c], text=True)))
        for c in (code, flax)
    )
    assert ours <= theirs


def test_no_nnx_transforms_or_tensorflow():
    forbidden = ("nnx.jit", "nnx.grad", "nnx.value_and_grad", "nnx.scan", "nnx.vmap", "nnx.Optimizer", ".sow(")
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        text = path.read_text()
        assert not [word for word in forbidden if word in text], path
        assert not any(n.split(".")[0] == "tensorflow" for n in imported_names(path)), path
