"""The side files of sentence-transformers folders: lower case, prompts and the layout with a subfolder."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from tests.trust.folders import change_json
from transformer_jax import load, pretrained
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
