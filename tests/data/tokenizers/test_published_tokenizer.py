"""Folders of tokenizers by hand; `tests/pretrained/test_random_tokenizers.py` compares random ones."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.data.tokenizers.published_tokenizer import read_published_tokenizer
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, "the", "cat", "anna", "Anna", "é", "e", "runs", "co", "##vid"]


@pytest.fixture
def folder(tmp_path):
    """Write BERT's files: a vocabulary, and a config with lower case."""
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    write(tmp_path, tokenizer_class="BertTokenizer", do_lower_case=True)
    return tmp_path


def write(folder, name="tokenizer_config.json", **values):
    (folder / name).write_text(json.dumps(values))


def write_json(folder, **changes):
    """Write `tokenizer.json` of an uncased BERT with other parts."""
    tokenizer = Tokenizer(models.WordPiece({t: n for n, t in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()) | changes))


def pieces(folder, text):
    tokenizer = EncoderTokenizer.open(folder)
    (encoding,) = tokenizer.encode_batch([text], max_length=99)
    return tokenizer.tokens(encoding.ids)[1:-1]


ADDED = {"[E1]": len(VOCABULARY), "covid": len(VOCABULARY) + 1}


# Tokens that `transformers` 5 does not make special are normalized as the text is.
def test_added_tokens_beside_a_vocabulary(folder):
    write(folder, "added_tokens.json", **ADDED)
    write(folder, "special_tokens_map.json", additional_special_tokens=["[E1]"])
    assert pieces(folder, "[E1] the covid [E1]") == ["[e1]", "the", "covid", "[e1]"]
    assert EncoderTokenizer.open(folder).vocab_size == len(VOCABULARY) + 2


def test_added_tokens_of_the_config_beside_a_tokenizer_file(folder):
    write_json(folder)
    decoder = {str(number): {"content": token, "special": False} for token, number in ADDED.items()}
    write(folder, tokenizer_class="BertTokenizer", added_tokens_decoder=decoder)
    assert pieces(folder, "[E1] the covid [E1]") == ["[e1]", "the", "covid", "[e1]"]
    decoder["99"] = decoder.pop(str(ADDED["covid"]))
    write(folder, tokenizer_class="BertTokenizer", added_tokens_decoder=decoder)
    with pytest.raises(UserError, match='tokens give "covid" the id 99, but the vocabulary gives it 15'):
        EncoderTokenizer.open(folder)


def test_the_options_of_the_class_come_before_the_tokenizer_file(folder):
    write_json(folder)
    write(folder, tokenizer_class="BertTokenizer", do_lower_case=False, strip_accents=False)
    with pytest.warns(
        UserWarning, match="split text differently: BertTokenizer is followed, not tokenizer.json"
    ):
        assert pieces(folder, "Anna é runs") == ["Anna", "é", "runs"]
    write(folder, tokenizer_class="PreTrainedTokenizerFast", do_lower_case=False, cls_token="[CLS]")
    assert EncoderTokenizer.open(folder).tokens(EncoderTokenizer.open(folder).encode(["Anna é"])[0]) == [
        "anna",
        "e",
    ]


def test_another_kind_of_splitting_comes_before_the_class(folder):
    write_json(folder, pre_tokenizer={"type": "Whitespace"})
    with pytest.warns(
        UserWarning, match="split text differently: tokenizer.json is followed, not BertTokenizer"
    ):
        EncoderTokenizer.open(folder)


def test_special_tokens_with_other_names(folder):
    lines = (folder / "vocab.txt").read_text().replace("[CLS]", "<start>").replace("[SEP]", "<end>")
    (folder / "vocab.txt").write_text(lines)
    write(folder, "special_tokens_map.json", cls_token="<start>", sep_token={"content": "<end>"})
    tokenizer = EncoderTokenizer.open(folder)
    (encoding,) = tokenizer.encode_batch(["the cat"], max_length=9)
    assert tokenizer.tokens(encoding.ids) == ["<start>", "the", "cat", "<end>"]
    assert tokenizer.names["begin"] == "<start>"


def test_token_types_are_those_that_the_folder_lists(folder):
    def types():
        (encoding,) = EncoderTokenizer.open(folder).encode_batch([("the", "cat")], max_length=9)
        return encoding.types.tolist()

    assert types() == [0, 0, 0, 1, 1]
    write(folder, tokenizer_class="BertTokenizer", model_input_names=["input_ids", "attention_mask"])
    assert types() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, '"BertJapaneseTokenizer" is not supported; choose'),
        ({"tokenizer_class": "T5TokenizerFast"}, 'class "T5Tokenizer" is not supported'),
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, "auto_map needs Python code of the folder, which is"),
        ({"split_special_tokens": True}, "split_special_tokens is not supported"),
        ({"truncation_side": "left"}, "truncation_side 'left' is not supported"),
        ({"tokenizer_class": "RobertaTokenizer"}, "has a WordPiece model, but the tokenizer class Roberta"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, 'has the key "x", which is no id'),
    ],
)  # fmt: skip
def test_what_is_refused(folder, config, message):
    write_json(folder)
    write(folder, **config)
    with pytest.raises(UserError, match=message) as error:
        EncoderTokenizer.open(folder)
    assert "\n" not in str(error.value)


def test_a_vocabulary_that_the_class_does_not_read(folder):
    write(folder, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(UserError, match=r"vocab\.txt: PreTrainedTokenizer does not read vocab\.txt"):
        EncoderTokenizer.open(folder / "vocab.txt")
    with pytest.raises(UserError, match=r"PreTrainedTokenizer needs tokenizer\.json, which the folder does"):
        EncoderTokenizer.open(folder)


def test_null_is_the_value_that_transformers_makes_of_it(folder):
    write(folder, tokenizer_class="BertTokenizer", do_lower_case=None, strip_accents=None, truncation_side=None)
    assert pieces(folder, "Anna") == ["Anna"]


def test_a_vocabulary_of_sentencepiece_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    write(tmp_path, tokenizer_class="LlamaTokenizer")
    with pytest.raises(
        UserError, match=r"tokenizer\.model: SentencePiece's format is not read: write a tokenizer"
    ):
        TextTokenizer.open(tmp_path)


def test_the_begin_token_that_a_config_asks_for(tmp_path):
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: number for number, token in enumerate([*letters, "<|endoftext|>"])}
    write(tmp_path, "vocab.json", **vocabulary)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write(tmp_path, tokenizer_class="GPT2Tokenizer", add_bos_token=True)
    tokenizer = TextTokenizer.open(tmp_path)
    assert tokenizer.encode_prompts(["a"]) == [[256, vocabulary["a"]]]
    assert tokenizer.ends == (256,)
    write(tmp_path, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    assert TextTokenizer.open(tmp_path).encode(["a"]) == [[vocabulary["Ġ"], vocabulary["a"]]]
    assert (
        read_published_tokenizer(tmp_path, byte_level_class="GPT2Tokenizer").tokens["eos_token"]
        == "<|endoftext|>"
    )


def test_the_reading_of_special_tokens_is_published(tmp_path):
    tokenizer = TextTokenizer.byte_pairs(["a text"], 270)
    tokenizer.special_tokens = "text"
    _, config = tokenizer.published()
    write(tmp_path, **config)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert TextTokenizer.open(tmp_path).special_tokens == "text"


def test_differences_from_the_class_are_reported(folder):
    write_json(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["max_input_chars_per_word"] = 3
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.warns(UserWarning, match="followed for max_input_chars_per_word, which BertTokenizer sets"):
        EncoderTokenizer.open(folder)
    state["model"]["max_input_chars_per_word"] = 100
    state["added_tokens"] = [
        {"id": len(VOCABULARY), "content": "covid", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False}
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))
    write(folder, tokenizer_class="BertTokenizer", added_tokens_decoder={})
    with pytest.warns(UserWarning, match='adds "covid", which added_tokens_decoder lacks: it is kept'):
        assert pieces(folder, "the covid") == ["the", "covid"]


def test_flags_of_an_added_token_are_those_of_the_tokenizer_file(folder):
    write_json(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["added_tokens"] = [
        {"id": len(VOCABULARY), "content": "[E1]", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))
    write(folder, "added_tokens.json", **{"[E1]": len(VOCABULARY)})
    assert pieces(folder, "the [E1]") == ["the", "[E1]"]
    assert "[E1]" not in pieces(folder, "the [e1]")


def test_a_vocabulary_without_an_unknown_token_is_refused(tmp_path):
    for model in (
        models.WordLevel({"<s>": 0, "word": 1}, unk_token="[UNK]"),
        models.Unigram([("a", 0.0)], None),
    ):
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UserError, match="unknown token"):
            TextTokenizer.open(tmp_path)
