"""Random configs of every family and head have the outputs of `transformers`."""

import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import others_soak
from tests.pretrained.test_encoders import our_output, small_tokenizer, their_output
from tests.pretrained.test_image_text import make_folder, torch_logits, torch_vectors
from tests.pretrained.test_parity import LLAMA3, noisy, their_logits
from tests.pretrained.test_vision import jax_outputs, torch_outputs
from transformer_jax import pretrained
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.pretrained.families import FAMILIES

V, T = 97, 11
# Longformer, whose inputs also have global tokens, has a test of its own.
FAMILY_LIST = [family for name, families in FAMILIES.items() if name != "longformer" for family in families]
# The architectures of the ordinary suite; each of the others has a smaller test of its own.
CORNERS = [
    family
    for family in FAMILY_LIST
    if family.architecture.startswith(("BertForPre", "LlamaFor", "ViTModel", "SiglipModel", "WhisperFor"))
]
ROPES = [
    dict(rope_type="default", rope_theta=100.0), dict(rope_type="default", rope_theta=500_000.0), LLAMA3,
    dict(rope_type="linear", rope_theta=10_000.0, factor=2.0),
]  # fmt: skip


def random_fields(family, draw):
    """Draw the fields of a config of `transformers`."""
    heads, layers = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    width = heads * draw.choice([4, 8, 12])
    activation = draw.choice(["gelu", "gelu_new", "relu"])
    epsilon = draw.choice([1e-12, 1e-5, 1e-3])
    is_reader = family.architecture.endswith("QuestionAnswering")
    classes = {"num_labels": 2 if is_reader else draw.choice([1, 2, 5])}
    if family.model_type == "gpt2":
        return dict(
            vocab_size=V, n_positions=32, n_embd=width, n_layer=layers, n_head=heads,
            n_inner=draw.choice([None, 37]), activation_function=activation, layer_norm_epsilon=epsilon,
            tie_word_embeddings=draw.random() < 0.5,
        )  # fmt: skip
    if family.model_type in ("llama", "mistral"):
        extra = dict(sliding_window=draw.choice([4, 9, 40]))
        if family.model_type == "llama":
            extra = dict(attention_bias=draw.random() < 0.5, mlp_bias=draw.random() < 0.5)
        return extra | dict(
            vocab_size=V, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=draw.choice([1, heads]), intermediate_size=37, rms_norm_eps=epsilon,
            tie_word_embeddings=draw.random() < 0.5, rope_parameters=draw.choice(ROPES),
            max_position_embeddings=32,
        )  # fmt: skip
    if family.model_type == "distilbert":
        return classes | dict(
            vocab_size=V, dim=width, n_layers=layers, n_heads=heads, hidden_dim=37, max_position_embeddings=19,
            activation=draw.choice(["gelu", "relu"]), sinusoidal_pos_embds=draw.random() < 0.5,
        )  # fmt: skip
    if family.model_type in ("clip", "siglip", "vision-encoder-decoder"):
        return image_text_fields(family, draw)
    if family.model_type == "whisper":
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 0)
        return ids | dict(
            vocab_size=310, d_model=width, encoder_layers=layers, decoder_layers=draw.choice([1, 2, 3]),
            encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=37,
            decoder_ffn_dim=37, num_mel_bins=draw.choice([8, 80, 128]), max_source_positions=30,
            max_target_positions=19, begin_suppress_tokens=None,
        )  # fmt: skip
    common = dict(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, hidden_act=activation,
        layer_norm_eps=epsilon, **classes,
    )  # fmt: skip
    if family.model_type in ("vit", "deit"):
        return common | dict(
            image_size=28, patch_size=7, intermediate_size=37, num_channels=draw.choice([1, 3])
        )
    if family.model_type.startswith("dinov2"):
        gated = family.accepts({"use_swiglu_ffn": True})
        return common | dict(image_size=28, patch_size=7, mlp_ratio=2, use_swiglu_ffn=gated)
    embedding = {"embedding_size": draw.choice([width, 12])} if family.model_type == "electra" else {}
    types = 1 if family.model_type == "roberta" else draw.choice([1, 2, 3])
    return common | embedding | dict(
        vocab_size=V, intermediate_size=37, max_position_embeddings=19, type_vocab_size=types
    )  # fmt: skip


def image_text_fields(family, draw):
    """Draw the fields of a config with a part for images and a part for texts."""
    heads, text_heads = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    width, text_width = heads * draw.choice([4, 8, 12]), text_heads * draw.choice([4, 8, 12])
    activation = draw.choice(["gelu", "quick_gelu"])
    epsilon = draw.choice([1e-6, 1e-5, 1e-3])
    images = dict(
        hidden_size=width, intermediate_size=37, num_hidden_layers=draw.choice([1, 2, 3]),
        num_attention_heads=heads, image_size=28, patch_size=draw.choice([7, 14]), layer_norm_eps=epsilon,
    )  # fmt: skip
    if family.model_type == "vision-encoder-decoder":
        texts = dict(
            model_type="gpt2", vocab_size=300, n_positions=32, n_embd=text_width, n_head=text_heads,
            n_layer=draw.choice([1, 2, 3]), n_inner=draw.choice([None, 37]), add_cross_attention=True,
            layer_norm_epsilon=epsilon, activation_function=draw.choice(["gelu", "gelu_new"]),
        )  # fmt: skip
        return dict(
            encoder=images | {"model_type": "vit", "hidden_act": "gelu"}, decoder=texts,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=0,
        )  # fmt: skip
    texts = dict(
        vocab_size=300, hidden_size=text_width, intermediate_size=41, num_hidden_layers=draw.choice([1, 2, 3]),
        num_attention_heads=text_heads, max_position_embeddings=13, hidden_act=activation,
        layer_norm_eps=epsilon, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    parts = dict(text_config=texts, vision_config=images | {"hidden_act": activation})
    if family.model_type == "clip":
        return parts | {"projection_dim": draw.choice([16, width])}
    texts["projection_size"] = width
    return parts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("TRANSFORMER_JAX_RANDOM_CONFIGS", "1"))))
@pytest.mark.parametrize("family", others_soak(FAMILY_LIST, *CORNERS), ids=lambda family: family.architecture)
def test_random_configs_have_the_outputs_of_transformers(family, seed, tmp_path):
    torch = pytest.importorskip("torch", reason="parity needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    name = family.architecture
    draw, rng = random.Random(f"{name} {seed}"), np.random.default_rng(seed)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**random_fields(family, draw))
    config.architectures = [name]
    model = noisy(model_class(config))
    model.save_pretrained(tmp_path)
    if family.model_type in ("gpt2", "llama", "mistral"):
        TextTokenizer.characters([[chr(65 + n) for n in range(V)]]).save(tmp_path / "tokenizer.json")
        tokens = rng.integers(0, V, (3, T)).astype(np.int32)
        ours, _ = pretrained.load(tmp_path)
        np.testing.assert_allclose(
            jax.jit(lambda m, x: m(x))(ours, tokens), their_logits(model, tokens), atol=1e-4
        )
        return
    if hasattr(config, "vision_config"):
        make_folder(model, tmp_path, frame=True)
        ours, processor = pretrained.load(tmp_path)
        images = rng.normal(size=(2, 28, 28, 3)).astype(np.float32)
        texts = processor.encode(["a dog runs", "two cats on the grass of a town"])
        outputs = zip(
            (
                ours.embed_images(jnp.asarray(images)), ours.embed_texts(texts.tokens, texts.lengths),
                ours(jnp.asarray(images), texts.tokens, texts.lengths),
            ),
            torch_vectors(model, images, texts.tokens.astype(np.int64)), strict=True,
        )  # fmt: skip
    elif name == "VisionEncoderDecoderModel":
        make_folder(model, tmp_path, frame=False)
        ours, _ = pretrained.load(tmp_path)
        images = rng.normal(size=(2, 28, 28, 3)).astype(np.float32)
        tokens = rng.integers(0, 300, (2, T))
        outputs = [(ours(jnp.asarray(images), tokens), torch_logits(model, images, tokens))]
    elif family.model_type == "whisper":
        TextTokenizer.byte_pairs(["one two three"] * 3, 300).save(tmp_path / "tokenizer.json")
        ours, _ = pretrained.load(tmp_path)
        spectrograms = rng.normal(size=(2, 60, config.num_mel_bins)).astype(np.float32)
        tokens = rng.integers(0, 310, (2, T))
        with torch.no_grad():
            expected = model(
                input_features=torch.tensor(spectrograms.transpose(0, 2, 1)),
                decoder_input_ids=torch.tensor(tokens),
            )
        outputs = [
            (ours.encode(jnp.asarray(spectrograms)), expected.encoder_last_hidden_state.numpy()),
            (ours(jnp.asarray(spectrograms), tokens), expected.logits.numpy()),
        ]
    elif hasattr(config, "image_size"):
        images = rng.normal(size=(2, 28, 28, config.num_channels)).astype(np.float32)
        ours, _ = pretrained.load(tmp_path)
        outputs = zip(jax_outputs(ours, jnp.asarray(images)), torch_outputs(model, images), strict=True)
    else:
        small_tokenizer(pad=config.pad_token_id).save(tmp_path / "tokenizer.json")
        mask = np.arange(T) < np.array([11, 4, 7])[:, None]
        tokens = np.where(mask, rng.integers(5, V, mask.shape), config.pad_token_id)
        has_types = getattr(config, "type_vocab_size", 0) > 1
        types = (np.arange(T) >= 3).astype(int) * mask if has_types else None
        ours, _ = pretrained.load(tmp_path)
        theirs = their_output(model, tokens, types, mask)
        outputs = zip(our_output(ours, name, tokens, types, mask), theirs, strict=True)
        outputs = [
            (np.asarray(output)[mask], reference[mask])
            if reference.shape[:2] == mask.shape
            else (output, reference)
            for output, reference in outputs
        ]
    for output, reference in outputs:
        np.testing.assert_allclose(output, reference, rtol=1e-4, atol=1e-4)
