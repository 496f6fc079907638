"""Imports flow one way, and a model definition costs no data set, tokenizer or command line."""

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

# The order in which imports flow: a room may import itself and what stands before it.
ORDER = (
    ("errors", "parameter_names"),
    ("distributed",),
    ("data",),
    ("layers",),
    ("models",),
    ("decoding", "evaluation", "pretrained", "interpretability", "plotting"),
    ("training",),
    ("tasks",),
    ("commands",),
)
ROOMS = tuple(room for rank in ORDER for room in rank)


def may_import(room: str) -> set[str]:
    """The rooms that stand before one; of those of its own rank, itself alone."""
    rank = next(number for number, names in enumerate(ORDER) if room in names)
    return {room, *(name for names in ORDER[:rank] for name in names)}


def imported(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_flow_one_way(room):
    for path in [*(PACKAGE / room).rglob("*.py"), *PACKAGE.glob(f"{room}.py")]:
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "transformer_jax" and len(parts) > 1:
                assert parts[1] in may_import(room), f"{path.relative_to(ROOT)} imports {name}"
            assert parts[0] != "experiments", path
            if room == "data":
                assert parts[0] not in ("jax", "flax"), f"{path} imports {name}: data is NumPy"


def test_nothing_else_stands_at_the_top():
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    modules = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms | modules == set(ROOMS)


# What reads files of pairs and texts, for which the phrases' Babel is not installed.
FILES = ("data.corpora.pairs", "data.corpora.parallel", "data.corpora.texts", "data.batches.encoded_pairs")


def test_files_of_pairs_need_no_babel():
    modules = ", ".join(f"transformer_jax.{name}" for name in FILES)
    code = f"import sys, {modules}; print('babel' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_importing_every_model_is_light():
    names = sorted(set(transformer_jax.__all__) - {"configure", "load", "train"})
    code = (
        f"import sys, transformer_jax; [getattr(transformer_jax, name) for name in {names}]; "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    # Flax itself looks for some of them; what it brings is not ours to judge, so ask what we add.
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
        assert not any(n.split(".")[0] == "tensorflow" for n in imported(path)), path
