"""Every model by name, and the names of the package."""

import dataclasses
import subprocess
import sys

import pytest

import transformer_jax
from transformer_jax.models.registry import DECODERS, MODELS, TRANSLATORS, module_of

ENTRIES = [(kind, name) for kind, models in MODELS.items() for name in models]


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_presets_of_every_model(kind, name):
    entry = MODELS[kind][name]
    assert "mini" in entry.presets
    fields = {field.name for field in dataclasses.fields(entry.config)}
    texts = "vocab_size" in fields
    changes = (
        {"vocab_size": 101, "max_length": 77}
        if texts
        else {"channels" if "channels" in fields else "layers": 2}
    )
    for preset in entry.presets:
        config = entry.preset(preset, **changes)
        assert type(config) is entry.config
        assert {name: getattr(config, name) for name in changes} == changes
        assert {name: getattr(config, name) for name in entry.changes} == entry.changes
    assert module_of(config, kind) is entry.module
    assert not {"presets", "preset_fields"} & {field.name for field in dataclasses.fields(entry.config)}
    with pytest.raises(ValueError, match=f"unknown preset 'huge': choose one of {', '.join(entry.presets)}"):
        entry.preset("huge", 101 if texts else None)


def test_a_name_sets_its_changes_unless_they_are_overridden():
    assert (DECODERS["gru"].preset("mini", 101).cell, TRANSLATORS["gru"].preset("mini", 101).cell) == (
        "gru",
        "gru",
    )
    assert DECODERS["gru"].preset("mini", 101, cell="lstm").cell == "lstm"


def test_the_package_exports_every_model():
    models = {c for ms in MODELS.values() for e in ms.values() for c in (e.config.__name__, e.module.__name__)}
    assert models <= set(transformer_jax.__all__) <= set(dir(transformer_jax))
    for name in transformer_jax.__all__:
        assert getattr(transformer_jax, name).__name__ == name
    names = {}
    exec("from transformer_jax import *", names)
    assert set(transformer_jax.__all__) <= set(names)
    for unknown in ("gpt", "load_run", "Config", "MODELS"):
        with pytest.raises(AttributeError, match=f"module 'transformer_jax' has no attribute '{unknown}'"):
            getattr(transformer_jax, unknown)


def test_importing_the_package_imports_nothing_else():
    code = "import sys, transformer_jax; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
