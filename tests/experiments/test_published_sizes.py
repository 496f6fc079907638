"""Every model and published size has a row in the table of compiled programs."""

from experiments.published_sizes import rows
from transformer_jax.models.registry import MODELS

MODEL_TYPES = ("translator", "decoder", "masked_lm", "replaced_token", "image_classifier")
# Presets that only this package has. Papers give recurrent translators by width, and only LSTM language models
# have published sizes.
OWN_PRESETS = {"mini", "mini_cct", "micro"}
OWN_PRESETS_OF = {"translator": {"tiny", "small"}, "gru": {"small", "medium"}}


def test_every_model_and_published_size_has_a_row():
    configs = [row.config() for row in rows()]
    names = [(row.name, row.topology) for row in rows()]
    assert len(set(names)) == len(names)
    for model_type in MODEL_TYPES:
        for name, entry in MODELS[model_type].items():
            presets = {
                config.preset
                for config in configs
                if type(config.model) is entry.config
                and all(getattr(config.model, field) == value for field, value in entry.changes.items())
            }
            assert presets, (model_type, name)
            own_presets = OWN_PRESETS | OWN_PRESETS_OF.get(model_type, set()) | OWN_PRESETS_OF.get(name, set())
            assert {*entry.presets} <= presets | own_presets, (model_type, name)
