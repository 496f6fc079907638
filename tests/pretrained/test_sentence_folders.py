"""The side files of sentence-transformers folders: lower case, prompts and the layout with a subfolder."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.trust.folders import change_json
from transformer_jax import configure, load, pretrained
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.models.encoders.bert import Bert, BertConfig

TEXTS = ["query: the Cat runs", "the dog", "a CAT in the park"]


@pytest.fixture
def folder(tmp_path):
    """Write a folder with a cased vocabulary."""
    tokenizer = EncoderTokenizer.wordpiece([*TEXTS, "the cat runs query : a cat"] * 5, 120, lowercase=False)
    tokenizer.settings |= {"pooling": "mean", "normalize": False, "max_length": 12}
    sizes = dict(width=16, layers=1, heads=2, feed_forward=24, max_length=32)
    config = BertConfig.preset("mini", tokenizer.vocab_size, **sizes)
    model = jax.jit(lambda: Bert(config, rngs=nnx.Rngs(0)))()
    pretrained.save(tmp_path / "flat", model, tokenizer)
    return tmp_path / "flat"


def test_lower_case_of_sentence_transformers(folder):
    cased = load(folder).embed(["the Cat runs", "the cat runs"])
    change_json(folder / "sentence_bert_config.json", do_lower_case=True)
    run = load(folder)
    lower = run.embed(["the Cat runs", "the cat runs"])
    assert np.abs(cased[0] - cased[1]).max() > 1e-3
    np.testing.assert_allclose(lower, [cased[1]] * 2, rtol=1e-5, atol=1e-6)
    stored = type(run.processor).from_files(run.processor.files())
    assert stored.encode(["the Cat"]) == stored.encode(["the cat"])


def test_prompts(folder):
    plain = load(folder)
    prompts = {"query": "query: ", "document": ""}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "query"})
    )
    run = load(folder)
    expected = plain.embed(["query: the dog", "the dog"])
    np.testing.assert_array_equal(run.embed(["the dog"])[0], expected[0])
    np.testing.assert_array_equal(run.embed(["the dog"], prompt_name="document")[0], expected[1])
    np.testing.assert_array_equal(run.embed(["dog"], prompt="the ")[0], expected[1])
    assert type(run.processor).from_files(run.processor.files()).prompt() == "query: "
    with pytest.raises(UserError, match="unknown prompt 'passage': known are query, document"):
        run.embed(["the dog"], prompt_name="passage")
    pretrained.save(folder.parent / "saved", run.model, run.processor)
    np.testing.assert_array_equal(load(folder.parent / "saved").embed(["the dog"])[0], expected[0])
    change_json(folder / "1_Pooling/config.json", include_prompt=False)
    with pytest.raises(UserError, match="excludes prompts from its vectors"):
        load(folder).embed(["the dog"])
    change_json(folder / "config_sentence_transformers.json", default_prompt_name="none")
    with pytest.raises(UserError, match='default_prompt_name is "none", which is none of its prompts'):
        load(folder)


def test_the_layout_with_a_subfolder(folder):
    old = folder.parent / "old"
    (old / "0_Transformer").mkdir(parents=True)
    for path in folder.iterdir():
        into = old if path.name in ("modules.json", "1_Pooling") else old / "0_Transformer"
        shutil.move(path, into / path.name)
    modules = json.loads((old / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(modules))
    (old / "0_Transformer/sentence_bert_config.json").rename(old / "0_Transformer/sentence_roberta_config.json")
    assert pretrained.is_published(old)
    run = load(old)
    assert run.vector_limit == 12
    assert run.embed(TEXTS).shape == (3, 16)


def test_a_text_that_normalizes_to_nothing_has_the_vector_of_the_empty_text(folder):
    run = load(folder)
    with pytest.warns(
        UserWarning, match=r"2 text\(s\) have no tokens, the first is text 2: their vectors are that"
    ):
        vectors = run.embed(["the dog", "", "\u200b"])
    np.testing.assert_array_equal(vectors[1], vectors[2])
    with pytest.raises(UserError, match="lone surrogate"):
        run.embed(["\ud83d"])


def test_only_texts_have_prompts(folder):
    run = load(folder)
    for texts in ("the cat", [None], ["the cat", 3]):
        with pytest.raises(UserError):
            run.embed(texts)
        with pytest.raises(UserError):
            run.similarity(texts)
    with pytest.raises(UserError, match="a prompt is for texts, not for pairs"):
        run.embed([("the cat", "a dog")], prompt="query: ")
    with pytest.raises(UserError, match="a prompt is a text, not a int"):
        run.embed(["the cat"], prompt=3)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_Pooling/config.json", {"include_prompt": False}, "excludes prompts from its vectors"),
        ("sentence_bert_config.json", {"tokenizer_args": {"do_lower_case": True}}, 'args sets "do_lower_case"'),
        ("sentence_bert_config.json", {"config_kwargs": {"hidden_act": "relu"}}, 'kwargs sets "hidden_act"'),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim 8 is not supported"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "manhattan"}, "neither cosine nor dot"),
    ],
)  # fmt: skip
def test_settings_that_would_change_vectors_are_refused(folder, file, changes, message):
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(UserError, match=message):
        load(folder).embed(["the dog"], prompt="query: ")


def test_a_dense_layer_reads_the_width_of_the_model(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 12, "out_features": 4, "bias": False, "activation_function": "torch.nn.Identity"}
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": np.zeros((4, 12), np.float32)}, folder / "2_Dense/model.safetensors")
    with pytest.raises(UserError, match="in_features is 12, but its input has the width 16"):
        load(folder)
    (folder / "2_Dense/config.json").write_text(json.dumps(dense | {"use_residual": True}))
    with pytest.raises(UserError, match="use_residual is not supported"):
        load(folder)


def test_similarity_by_dot_products(folder):
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": "dot"}))
    run = load(folder)
    vectors = run.embed(TEXTS)
    np.testing.assert_allclose(run.similarity(TEXTS), vectors @ vectors.T, rtol=1e-5)


def test_the_limit_of_a_start_survives_training(folder):
    config = configure("sentence_embedding", "fine_tune", start=(str(folder),))
    assert config.model.max_length == 12
    assert (
        configure("sentence_embedding", "fine_tune", start=(str(folder),), max_length=20).model.max_length == 20
    )
