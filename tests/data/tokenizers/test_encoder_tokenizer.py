"""Tokenizers of encoders against pieces by hand and against `transformers`."""

import concurrent.futures
import itertools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
    folder = published(tmp_path, do_lower_case=False)
    cased = EncoderTokenizer.open(folder)
    for tokenizer in (cased, EncoderTokenizer.open(folder / "vocab.txt")):
        assert pieces(tokenizer, "The café Café") == ["[CLS]", "The", "[UNK]", "Café", "[SEP]"]
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
    assert pair.ids.tolist() == expected["input_ids"]
    assert pair.types.tolist() == expected["token_type_ids"]


def test_tokens_that_continue_a_word(tmp_path):
    ours = EncoderTokenizer.open(published(tmp_path))
    assert [VOCABULARY[i] for i in np.flatnonzero(ours.continues_word())] == ["##able", "##ing", "##s"]
    # In a byte-level vocabulary "##" is an ordinary token.
    byte_pairs = EncoderTokenizer.byte_pairs(["## heading", "## unheading", "## heading on"] * 9, 300)
    ids = byte_pairs.encode(["## un"])[0]
    tokens = dict(zip(byte_pairs.tokens(ids), np.array(byte_pairs.continues_word())[ids].tolist(), strict=True))
    assert {"##", "n"} & {token for token, continues in tokens.items() if continues}
    assert not any(continues for token, continues in tokens.items() if token.startswith("\u0120"))


def byte_level(folder):
    """Write the files of a small tokenizer in the published format of RoBERTa and return the tokenizer."""
    tokenizer = EncoderTokenizer.byte_pairs(["a good film about bees", "good films, good bees"] * 3, 300)
    model = json.loads(tokenizer.files()["tokenizer.json"])["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return tokenizer


def test_a_byte_level_mask_absorbs_the_preceding_space(tmp_path):
    trained = byte_level(tmp_path)
    with pytest.warns(UserWarning, match="no file describes <mask>: it includes the space before it"):
        opened = EncoderTokenizer.open(tmp_path)
    for tokenizer in (trained, opened):
        assert pieces(tokenizer, "a good <mask> about") == ["<s>", "a", "Ġgood", "<mask>", "Ġabout", "</s>"]


def test_byte_level_words_start_with_a_space(tmp_path):
    tokenizer = byte_level(tmp_path)
    for _ in range(2):  # encoding words does not change how texts are encoded
        (encoding,) = tokenizer.encode_batch([["good", "bees"]], max_length=9, words=True)
        assert tokenizer.tokens(encoding.ids) == ["<s>", "Ġgood", "Ġbees", "</s>"]
        assert encoding.words.tolist() == [-1, 0, 1, -1]
        assert pieces(tokenizer, "good bees") == ["<s>", "good", "Ġbees", "</s>"]


def test_words_and_texts_are_encoded_concurrently(tmp_path):
    tokenizer = byte_level(tmp_path)

    def encode(words):
        text = ["good", "bees"] if words else "good bees"
        return [tokenizer.encode_batch([text], max_length=9, words=words)[0].ids.tolist() for _ in range(50)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(encode, [True, False] * 4))
    assert all(output == outputs[n % 2] for n, output in enumerate(outputs))
    assert pieces(tokenizer, "good bees") == ["<s>", "good", "Ġbees", "</s>"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*no file describes <mask>")
def test_byte_level_parity(tmp_path):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    byte_level(tmp_path)
    ours = EncoderTokenizer.open(tmp_path)
    # The mask token as in the published folders.
    options = dict(mask_token=transformers.AddedToken("<mask>", lstrip=True, special=True))
    theirs = transformers.RobertaTokenizer.from_pretrained(str(tmp_path), add_prefix_space=False, **options)
    for text in ["a good film", "good <mask>, bees", " about  films", "naïve 中"]:
        assert pieces(ours, text) == theirs.convert_ids_to_tokens(theirs(text)["input_ids"]), text
    spaced = transformers.RobertaTokenizer.from_pretrained(str(tmp_path), add_prefix_space=True, **options)
    words = ["good", "films", ",", "bees"]
    (encoding,) = ours.encode_batch([words], max_length=99, words=True)
    assert encoding.ids.tolist() == spaced(words, is_split_into_words=True)["input_ids"]


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_training_and_saving(kind):
    texts = ["the cat sees a big dog", "a dog sees the cats", "Ünder the bigger tree"] * 3
    tokenizer = getattr(EncoderTokenizer, kind)(texts, 300)
    loaded = EncoderTokenizer.from_files(tokenizer.with_labels(["no", "yes"], pairs=True).files())
    assert loaded.labels == ("no", "yes")
    assert loaded.settings == {"pairs": True}
    assert loaded.files() == EncoderTokenizer.from_files(loaded.files()).files()
    for text in texts:
        (ids,) = loaded.encode([text])
        assert ids == tokenizer.encode([text])[0]
        uncased = "under the bigger tree" if kind == "wordpiece" else text
        assert loaded.decode([ids])[0].strip() == (uncased if "Ünder" in text else text)
    single, pair = loaded.encode_batch(["the cat", ("the cat", "a dog")], max_length=99)
    assert single.ids[0] == pair.ids[0] == loaded.begin
    assert single.ids[-1] == pair.ids[-1] == loaded.separator
    # RoBERTa puts two separators between the texts and has a single type.
    assert pair.ids.tolist().count(loaded.separator) == (2 if kind == "wordpiece" else 3)
    assert pair.types.max() == (1 if kind == "wordpiece" else 0)
    assert loaded.pad == (0 if kind == "wordpiece" else 1)


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_the_same_texts_give_the_same_vocabulary(kind):
    """The order of a hash table must not break ties among the many pieces of equal count."""
    rng = np.random.default_rng(0)
    words = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("", "rst", "ns")]
    texts = [" ".join(rng.choice(words, size=n)) for n in rng.integers(3, 90, 60)]
    files = [getattr(EncoderTokenizer, kind)(texts, 280).files()["tokenizer.json"] for _ in range(4)]
    assert len(set(files)) == 1
    assert EncoderTokenizer.wordpiece(texts, 120).vocab_size == 120


@pytest.mark.parametrize("kind", ["wordpiece", "byte_pairs"])
def test_continuing_pieces_of_a_trained_vocabulary(kind):
    tokenizer = getattr(EncoderTokenizer, kind)(["unbelievable things happen"] * 2, 280)
    continues = np.array(tokenizer.continues_word())
    (ids,) = tokenizer.encode(["happen unbelievableness things"])
    begins = (~continues[ids]).sum()
    # The first word of a text has no space before it and therefore counts as continuing in byte-level BPE.
    assert begins == (3 if kind == "wordpiece" else 2)
    assert not continues[tokenizer.special_ids()].any()


def test_invalid_vocabularies(tmp_path):
    with pytest.raises(UserError, match="a vocabulary of 50 cannot hold the characters"):
        EncoderTokenizer.wordpiece(["a"], 50)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"vocab\.txt: the vocabulary lacks the unknown token '\[UNK\]'"):
        EncoderTokenizer.open(tmp_path)
    with pytest.raises(UserError, match=r"PreTrainedTokenizer needs tokenizer\.json, which"):
        EncoderTokenizer.open(tmp_path / "..").open(tmp_path.parent / "none")
    folder = published(tmp_path)
    tokenizer = EncoderTokenizer.open(folder)
    tokenizer.check_fits(17)
    with pytest.raises(UserError, match="ids up to 16 and the model a vocabulary of 16"):
        tokenizer.check_fits(16)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: expected object, got array"):
        EncoderTokenizer.open(folder)


def test_words_of_sentencepiece_begin_with_a_space(tmp_path):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(["the unhappy cat walks in the park"] * 20, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = EncoderTokenizer.open(tmp_path)
    continues = opened.continues_word()
    encoding = tokenizer.encode("the cat walks", add_special_tokens=False)
    starts = [word != before for before, word in itertools.pairwise([None, *encoding.word_ids])]
    assert [not continues[number] for number in encoding.ids] == starts
    assert not any(continues[number] for number in opened.special_ids())


def test_a_vocabulary_that_does_not_mark_words_has_no_whole_words(tmp_path):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match="whole-word masking needs a vocabulary whose pieces show where"):
        EncoderTokenizer(tokenizer).continues_word()


def test_windows_of_a_tokenizer_with_shifted_offsets(tmp_path):
    """A pre-tokenizer that adds spaces between words shifts the offsets of the library."""
    text = "Anna lives in Oslo, Norway. The café is 🙂 good."
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Punctuation(),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([text] * 20, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    (windows,) = EncoderTokenizer(tokenizer).windows([("Where?", text)], max_length=22, stride=4)
    assert len(windows) > 1
    for window in windows:
        for number, sequence, (start, end) in zip(window.ids, window.sequences, window.offsets, strict=True):
            piece = tokenizer.id_to_token(int(number)).replace("\u0120", "")
            if sequence == 1 and piece.isascii():
                assert text[start:end] == piece
