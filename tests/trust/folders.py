"""Small published folders that the tests of this package damage."""

import json

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from transformer_jax import pretrained
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.models.decoders.llama import Llama, LlamaConfig
from transformer_jax.models.encoders.bert import BertClassifier, BertConfig
from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig

TEXTS = ["a dog runs in the park .", "two films were good , one was not ."] * 5


def write_llama(folder):
    """Write a Llama of 16 dimensions with a byte-level vocabulary."""
    tokenizer = TextTokenizer.byte_pairs(TEXTS, 270)
    config = LlamaConfig.preset(
        "mini", tokenizer.vocab_size, width=16, layers=2, heads=2, kv_heads=1, feed_forward=24, max_length=32
    )
    pretrained.save(folder, jax.jit(lambda: Llama(config, rngs=nnx.Rngs(0)))(), tokenizer)


def write_bert(folder):
    """Write a BERT of 16 dimensions that classifies texts."""
    tokenizer = EncoderTokenizer.wordpiece(TEXTS, 120).with_labels(("bad", "good"), target="label", pairs=False)
    sizes = dict(width=16, layers=1, heads=2, feed_forward=24, max_length=32, classes=2)
    config = BertConfig.preset("mini", tokenizer.vocab_size, **sizes)
    pretrained.save(folder, jax.jit(lambda: BertClassifier(config, rngs=nnx.Rngs(0)))(), tokenizer)


def write_vit(folder):
    """Write a ViT of 16 dimensions for images of 8 pixels."""
    sizes = dict(width=16, layers=1, heads=2, feed_forward=24, classes=2)
    config = ViTConfig.preset("mini", **sizes)
    model = jax.jit(lambda: ViTClassifier(config, rngs=nnx.Rngs(0)))()
    pretrained.save(folder, model, ImageProcessor(size=8, labels=("cat", "dog")))


def change_json(path, **changes):
    """Change fields of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensor(folder, name, index, value):
    """Set an element of a tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.array(tensors[name])
    tensors[name].reshape(-1)[index] = value
    save_file(tensors, folder / "model.safetensors")
