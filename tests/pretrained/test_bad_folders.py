"""Errors of folders of weights: one clear line, before anything is compiled."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from transformer_jax import pretrained
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.models.decoders import gpt, llama, modern_gpt
from transformer_jax.models.decoders.gpt import GPT
from transformer_jax.models.decoders.llama import Llama
from transformer_jax.models.decoders.modern_gpt import ModernGPT


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.characters(["abcdefgh"])


def small(tokenizer):
    config = llama.LlamaConfig.preset(
        "mini", tokenizer.vocab_size, width=16, layers=2, heads=2, kv_heads=1, feed_forward=24
    )
    return jax.jit(lambda: Llama(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def good(tokenizer, tmp_path_factory):
    folders = tmp_path_factory.mktemp("good")
    pretrained.save(folders / "single", small(tokenizer), tokenizer)
    pretrained.save(folders / "sharded", small(tokenizer), tokenizer, largest_file=4_000)
    return folders


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good / "single", tmp_path / "model")


@pytest.fixture
def sharded(good, tmp_path):
    return shutil.copytree(good / "sharded", tmp_path / "model")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_missing_folder_or_config(folder, tmp_path):
    with pytest.raises(UserError, match="no such folder of weights"):
        pretrained.load(tmp_path / "none")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        pretrained.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        pretrained.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="mamba"), "unknown architecture, model_type is 'mamba': known are gpt2, llama"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu' is supported"),
        (
            dict(rope_parameters={"rope_type": "longrope"}),
            r"rope_parameters\.rope_type \"longrope\": known are default, linear, llama3, yarn",
        ),
        (dict(num_attention_heads=3, head_dim=None), "width 16 must be a multiple of heads 3"),
        (
            dict(hidden_size=32),
            r"tensor\(s\) do not fit: .*model\.embed_tokens\.weight is \(8, 16\), not \(8, 32\)",
        ),
    ],
)
def test_unsupported_configs(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        pretrained.load(folder)


def test_missing_unknown_and_misshapen_tensors_are_listed(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    tensors["model.norm.weight"] = np.zeros(7, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        pretrained.load(folder)
    for part in (
        "3 tensor(s) do not fit",
        "missing model.layers.1.mlp.up_proj.weight",
        "unknown model.layers.2.mlp.up_proj.weight",
        "model.norm.weight is (7,), not (16,)",
    ):
        assert part in str(error.value)


def test_buffers_and_a_tied_head_are_ignored(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    pretrained.load(folder)
    change_config(folder, tie_word_embeddings=True)
    model, _ = pretrained.load(folder)
    assert model.unembedding is None


def test_quantised_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(16, np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is I8; supported are F32"):
        pretrained.load(folder)


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        UserError, match=r"model\.safetensors: cannot be read .*; the file is truncated or damaged"
    ):
        pretrained.load(folder)
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is not read: convert it to safetensors"):
        pretrained.load(folder)


def test_a_missing_shard(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    files[1].unlink()
    with pytest.raises(UserError, match=f"1 of {len(files)} files of weights are missing: {files[1].name}"):
        pretrained.load(sharded)


def test_an_index_with_a_missing_tensor_or_without_a_map(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"names tensors that no file holds: model\.ghost"):
        pretrained.load(sharded)
    index.write_text("{}")
    with pytest.raises(UserError, match="missing required field weight_map"):
        pretrained.load(sharded)


def test_a_tokenizer_of_another_vocabulary(folder):
    TextTokenizer.characters(["abcdefghi"]).save(folder / "tokenizer.json")
    with pytest.raises(UserError, match="the tokenizer has ids up to 8 and the model a vocabulary of 8"):
        pretrained.load(folder)


def test_models_and_folders_that_save_refuses(tokenizer, good, tmp_path):
    with pytest.raises(UserError, match="exists and is not empty: name another folder"):
        pretrained.save(good / "single", small(tokenizer), tokenizer)
    config = modern_gpt.ModernGPTConfig.preset(
        "mini", tokenizer.vocab_size, width=16, heads=2, kv_heads=2, layers=1
    )
    model = jax.jit(lambda: ModernGPT(config, rngs=nnx.Rngs(0)))()
    with pytest.raises(
        UserError, match=r"ModernGPT has no published format: known are GPT \(gpt2\), Llama \(llama\)"
    ):
        pretrained.save(tmp_path / "modern", model, tokenizer)
    rotary = gpt.GPTConfig.preset(
        "mini", tokenizer.vocab_size, width=16, heads=2, kv_heads=2, layers=1, positions="rotary"
    )
    model = jax.jit(lambda: GPT(rotary, rngs=nnx.Rngs(0)))()
    with pytest.raises(UserError, match="GPT-2's format needs learned positions"):
        pretrained.save(tmp_path / "rotary", model, tokenizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "published"),
    [
        ('{"model_type": "llama"}', True),
        ('{"architectures": ["MambaForCausalLM"]}', True),
        ('{"format_version": 1, "model": "gpt"}', False),
        ('{"format_version": 2, "model_type": "gpt"}', False),
        ('{"steps": 3}', False),
        ('["model_type"]', False),
        ("{", False),
        (None, False),
    ],
)
def test_published_folders_and_runs_are_distinguished(tmp_path, content, published):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert pretrained.is_published(tmp_path) is published


def test_a_saved_folder_is_published(good, tmp_path):
    assert pretrained.is_published(good / "single")
    assert not pretrained.is_published(tmp_path / "missing")
