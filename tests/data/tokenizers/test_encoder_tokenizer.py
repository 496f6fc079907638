"""The encoders' tokenizers, against pieces by hand and against those of `transformers`."""

import json

import numpy as np
import pytest

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, "cafe", "Café", "un", "##able", "play", "##ing", "!", "中", "国", "the", "The", "##s"]
TEXTS = ["The café!", "unable playings", "中国 café", "xyz \u0000\ufffd the\tthe", "naïve, Ünable"]


def published(folder, **settings):
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    return folder


def pieces(tokenizer, text):
    (encoding,) = tokenizer.encode_batch([text], max_length=99)
    return tokenizer.tokens(encoding.ids)


def test_pieces_by_hand(tmp_path):
    uncased = EncoderTokenizer.open(published(tmp_path))
    assert pieces(uncased, "The café!") == ["[CLS]", "the", "cafe", "!", "[SEP]"]
    assert pieces(uncased, "unable playings 中国") == [
        "[CLS]", "un", "##able", "play", "##ing", "##s", "中", "国", "[SEP]",
    ]  # fmt: skip
    cased = EncoderTokenizer.open(published(tmp_path, do_lower_case=False))
    assert pieces(cased, "The café Café") == ["[CLS]", "The", "[UNK]", "Café", "[SEP]"]
    assert EncoderTokenizer.open(tmp_path / "vocab.txt").mask == 4


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"tokenize_chinese_chars": False}])
def test_parity(tmp_path, settings):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    ours = EncoderTokenizer.open(published(tmp_path, **settings))
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), **({"do_lower_case": True} | settings))
    for text in TEXTS:
        assert pieces(ours, text) == theirs.convert_ids_to_tokens(theirs(text)["input_ids"]), text
    pair = ours.encode_batch([("the café", "unable!")], max_length=99)[0]
    expected = theirs("the café", "unable!")
    assert pair.ids == expected["input_ids"]
    assert pair.type_ids == expected["token_type_ids"]


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_trained_and_kept(kind):
    texts = ["the cat sees a big dog", "a dog sees the cats", "Ünder the bigger tree"] * 3
    tokenizer = getattr(EncoderTokenizer, kind)(texts, 300)
    kept = EncoderTokenizer.from_files(tokenizer.with_labels(["no", "yes"], pairs=True).files())
    assert kept.labels == ("no", "yes")
    assert kept.settings == {"pairs": True}
    assert kept.files() == EncoderTokenizer.from_files(kept.files()).files()
    for text in texts:
        (ids,) = kept.encode([text])
        assert ids == tokenizer.encode([text])[0]
        lowered = "under the bigger tree" if kind == "wordpiece" else text
        assert kept.decode([ids])[0].strip() == (lowered if "Ünder" in text else text)
    single, pair = kept.encode_batch(["the cat", ("the cat", "a dog")], max_length=99)
    assert single.ids[0] == pair.ids[0] == kept.begin
    assert single.ids[-1] == pair.ids[-1] == kept.separator
    # RoBERTa has two separators between the texts, and one type.
    assert pair.ids.count(kept.separator) == (2 if kind == "wordpiece" else 3)
    assert max(pair.type_ids) == (1 if kind == "wordpiece" else 0)
    assert kept.pad == (0 if kind == "wordpiece" else 1)


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_the_same_texts_give_the_same_vocabulary(kind):
    """Pieces of the same count are many here; a hash table's order must not decide between them."""
    rng = np.random.default_rng(0)
    words = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("", "rst", "ns")]
    texts = [" ".join(rng.choice(words, size=n)) for n in rng.integers(3, 90, 60)]
    made = [getattr(EncoderTokenizer, kind)(texts, 280).files()["tokenizer.json"] for _ in range(4)]
    assert len(set(made)) == 1
    assert EncoderTokenizer.wordpiece(texts, 120).vocab_size == 120


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_a_piece_that_continues_a_word(kind):
    tokenizer = getattr(EncoderTokenizer, kind)(["unbelievable things happen"] * 2, 280)
    continues = np.array(tokenizer.continues_word())
    (ids,) = tokenizer.encode(["happen unbelievableness things"])
    begins = (~continues[ids]).sum()
    # The first word of a text has no space before it, so that byte-level BPE says "continues".
    assert begins == (3 if kind == "wordpiece" else 2)
    assert not continues[tokenizer.special_ids()].any()


def test_vocabularies_that_do_not_fit(tmp_path):
    with pytest.raises(UserError, match="a vocabulary of 50 cannot hold the characters"):
        EncoderTokenizer.wordpiece(["a"], 50)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"vocab\.txt: the vocabulary has no token \[PAD\]"):
        EncoderTokenizer.open(tmp_path)
    with pytest.raises(UserError, match="holds neither"):
        EncoderTokenizer.open(tmp_path / "..").open(tmp_path.parent / "none")
    tokenizer = EncoderTokenizer.open(published(tmp_path))
    tokenizer.check_fits(17)
    with pytest.raises(UserError, match="ids up to 16 and the model a vocabulary of 16"):
        tokenizer.check_fits(16)
