"""Tokenizers of language models are lossless and equal the published ones."""

import base64
import itertools

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from transformer_jax.data.tokenizers import tiktoken_file
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

# Texts of these tests contain special tokens.
pytestmark = pytest.mark.filterwarnings("ignore:the text contains")
TEXT = "Hello  World, it's 12345\n\n  naïve 漢字 😀 <|endoftext|>\ttabs\r\nand more"


@pytest.fixture(scope="module")
def trained():
    return TextTokenizer.byte_pairs([TEXT, "some more words, some more words"], 300)


def test_characters():
    tokenizer = TextTokenizer.characters(["ba\n", "ac😀"])
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode(["\nabc😀", ""]) == [[0, 1, 2, 3, 4], []]
    assert tokenizer.decode([[4, 0, 3]]) == ["😀\nc"]
    assert tokenizer.end is None
    assert tokenizer.begin is None
    with pytest.raises(UserError, match=r"lacks 'x' \(U\+0078\), 'y' \(U\+0079\): remove them"):
        tokenizer.encode(["a", "xy"])
    with pytest.raises(UserError, match="lacks 'x'"):
        tokenizer.encode_prompts(["x"])


def test_byte_pairs_are_lossless(trained):
    assert trained.vocab_size <= 300
    assert trained.decode(trained.encode([TEXT, " ", ""]), special=True) == [TEXT, " ", ""]
    assert max(trained.encode([TEXT])[0]) < trained.vocab_size
    tokens = trained.tokens(trained.encode(["some 😀"])[0])
    assert "".join(tokens).startswith("some ")
    assert "\ufffd" in tokens[-1]  # a character split into several tokens


def test_special_tokens_are_read_alike_in_texts_and_prompts(trained):
    tokenizer = TextTokenizer.from_files(trained.files())
    assert tokenizer.end in tokenizer.encode([TEXT])[0]
    assert tokenizer.encode([TEXT]) == tokenizer.encode_prompts([TEXT])
    tokenizer.special_tokens = "text"
    loaded = TextTokenizer.from_files(tokenizer.files())
    assert loaded.special_tokens == "text"
    assert loaded.end not in loaded.encode([TEXT])[0]
    assert loaded.encode([TEXT]) == loaded.encode_prompts([TEXT])
    assert loaded.decode(loaded.encode([TEXT])) == [TEXT]
    with pytest.raises(UserError, match="must be control or text"):
        tokenizer.special_tokens = "word"


def test_end_tokens_of_any_name_survive_in_a_run(tmp_path):
    names = ["[EOS]", "</s>", "<|eot_id|>"]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate([*names, "a"])}, unk_token="a"))
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[EOS]"}'
    )
    opened = TextTokenizer.open(tmp_path)
    assert opened.ends == (0,)
    opened.ends = (1, 2)
    assert TextTokenizer.from_files(opened.files()).ends == (1, 2)
    with pytest.warns(UserWarning, match="assuming the end token .*</s>, and reading special tokens as text"):
        old = TextTokenizer.from_files({"tokenizer.json": opened.files()["tokenizer.json"]})
    assert (old.ends, old.special_tokens) == ((1,), "text")


@pytest.mark.parametrize(
    ("template", "begin"), [("<s> $A </s>", 0), ("$A </s>", None), ("<s> $A", 0), ("$A", None)]
)
def test_a_prompt_does_not_end_with_the_closing_token_of_a_template(tmp_path, template, begin):
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=template, pair=None, special_tokens=[("<s>", 0), ("</s>", 1)]),
    ])  # fmt: skip
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = TextTokenizer.open(tmp_path)
    assert opened.begin == begin
    assert opened.encode_prompts(["a"]) == [[2] if begin is None else [0, 2]]


def test_the_space_before_a_word_is_part_of_its_token(shared):
    """Decoding strips the first space of a text in Llama's tokenizers, and `tokens` must restore it."""
    tokenizer = TextTokenizer.open(shared / "weights/stories260K")
    (ids,) = tokenizer.encode_prompts(["Once upon a girl"])
    assert tokenizer.tokens(ids) == ["<s>", " Once", " upon", " a", " g", "ir", "l"]
    learned = range(259, tokenizer.vocab_size)  # special tokens and bytes come first
    assert len(set(tokenizer.tokens(learned))) == len(learned)


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(UserError, match="a vocabulary of 256 cannot hold"):
        TextTokenizer.byte_pairs(["a"], 256)


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    for loaded in (TextTokenizer.load(tmp_path / "tokenizer.json"), TextTokenizer.open(tmp_path)):
        assert loaded.encode([TEXT]) == trained.encode([TEXT])
        assert loaded.ends == trained.ends == (0,)
    characters = TextTokenizer.characters(["abc"])
    characters.save(tmp_path / "characters.json")
    with pytest.raises(UserError, match="lacks 'x'"):
        TextTokenizer.load(tmp_path / "characters.json").encode(["x"])


def test_cl100k(shared):
    tokenizer = TextTokenizer.open(shared / "data/tokenizers/cl100k_base.tiktoken")
    assert tokenizer.encode(["Once upon a time"]) == [[12805, 5304, 264, 892]]
    # The ids below are from tiktoken's documentation and tests.
    assert tokenizer.encode(["hello world"]) == [[15339, 1917]]
    assert tokenizer.encode(["rer"]) == [[38149]]
    assert tokenizer.encode(["'rer"]) == [[2351, 81]]
    assert tokenizer.encode(["today\n "]) == [[31213, 198, 220]]
    assert tokenizer.encode(["today\n \n"]) == [[31213, 27907]]
    assert tokenizer.encode(["👍"]) == [[9468, 239, 235]]
    assert tokenizer.encode_prompts(["hello <|endoftext|>"]) == [[15339, 220, 100257]]
    assert tokenizer.end == 100_257
    assert tokenizer.decode(tokenizer.encode([TEXT]), special=True) == [TEXT]


def test_a_truncated_tiktoken_file(shared, tmp_path):
    lines = (shared / "data/tokenizers/cl100k_base.tiktoken").read_bytes().splitlines(keepends=True)
    (tmp_path / "cl100k_base.tiktoken").write_bytes(b"".join(lines[:2000]))
    with pytest.raises(UserError, match="2,000 tokens, not 100,256; the file is truncated or damaged"):
        TextTokenizer.open(tmp_path / "cl100k_base.tiktoken")


def test_truncation_and_padding_of_a_published_file_are_ignored(trained, tmp_path):
    trained.save(tmp_path / "plain.json")
    settings = Tokenizer.from_file(str(tmp_path / "plain.json"))
    settings.enable_truncation(4)
    settings.enable_padding(length=8)
    settings.save(str(tmp_path / "tokenizer.json"))
    for loaded in (TextTokenizer.open(tmp_path), TextTokenizer.load(tmp_path / "tokenizer.json")):
        assert loaded.encode([TEXT, "a"]) == trained.encode([TEXT, "a"])
        assert loaded.encode_prompts([TEXT, "a"]) == trained.encode_prompts([TEXT, "a"])
        assert loaded.begin is None


def test_a_vocabulary_of_words_is_not_read_as_characters(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.open(tmp_path).encode(["hello a world"]) == [[1, 2, 0]]


def test_gpt2_files(shared, tmp_path):
    (tmp_path / "vocab.json").write_bytes((shared / "data/tokenizers/gpt2_vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((shared / "data/tokenizers/gpt2_merges.txt").read_bytes())
    tokenizer = TextTokenizer.open(tmp_path)
    assert tokenizer.encode(["hello world"]) == [[31373, 995]]
    assert tokenizer.vocab_size == 50_257
    assert tokenizer.ends == (50_256,)
    assert tokenizer.decode(tokenizer.encode([TEXT]), special=True) == [TEXT]


def test_a_tiktoken_file_merges_like_tiktoken(tmp_path, monkeypatch):
    """The tokens of a small vocabulary equal those of a plain loop that merges by rank."""
    words = [b"ab", b"bc", b"abc", b"aa", b"aab", b"abab"]
    ranks = {bytes([n]): n for n in range(256)} | {word: 256 + n for n, word in enumerate(words)}

    def by_rank(text):
        parts = [bytes([b]) for b in text]
        while True:
            pairs = [(ranks.get(a + b, 10**9), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            if not pairs or min(pairs)[0] == 10**9:
                return [ranks[p] for p in parts]
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    entry = (len(ranks), tiktoken_file._ENCODINGS["gpt2"][1], {})
    monkeypatch.setitem(tiktoken_file._ENCODINGS, "small", entry)
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items()))
    tokenizer = TextTokenizer.open(path)
    for text in ("abc", "aabc", "ababab", "aaab", "cab", "bcabcaab"):
        assert tokenizer.encode([text]) == [by_rank(text.encode())], text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.tiktoken", b"", "unknown encoding 'mine': known are gpt2"),
        ("cl100k_base.tiktoken", b"IQ== 0\n", "255 of the 256 bytes have no token; the file is truncated"),
        ("cl100k_base.tiktoken", b"IQ== 0\n!!! x\n", "line 2: not a token in base64 and its rank"),
        ("tokenizer.json", b"{", "not a tokenizer file"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        TextTokenizer.open(tmp_path / name)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"PreTrainedTokenizer needs tokenizer\.json, which"):
        TextTokenizer.open(tmp_path)
    with pytest.raises(UserError, match="no such tokenizer file"):
        TextTokenizer.open(tmp_path / "none.json")
