from experiments.published_sizes import rows
from transformer_jax.models.registry import MODELS

KINDS = ("translator", "decoder", "masked_lm", "replaced_token", "image_classifier")
# Sizes of this package; the recurrent translators of the papers are given by their widths, and only LSTM
# language models have published sizes.
OWN = {"mini", "micro"}
OWN_OF = {"translator": {"tiny", "small"}, "gru": {"small", "medium"}}


def test_every_model_and_published_size_has_a_row():
    every = [row.config() for row in rows()]
    names = [(row.name, row.topology) for row in rows()]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        for name, entry in MODELS[kind].items():
            presets = {
                config.preset
                for config in every
                if type(config.model) is entry.config
                and all(getattr(config.model, field) == value for field, value in entry.changes.items())
            }
            assert presets, (kind, name)
            missing = {*entry.presets} - OWN - OWN_OF.get(kind, set()) - OWN_OF.get(name, set()) - presets
            assert not missing, (kind, name)
