"""Random folders of tokenizers encode as in `transformers`, or are refused in one line."""

import functools
import json
import random
import warnings

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.cases import others_soak
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

CORPUS = [
    "the cat sat on the mat, and Anna didn't run in 2010!", "Ünïted naïve café 東京 é",
    "a dog  runs\tin the park", "some more words live here", "e\u0301 İstanbul ΣΑΣ ﬁne",
] * 8  # fmt: skip
TEXTS = [
    *CORPUS[:5], "", " ", " leading and trailing ", "two\nlines\r\nhere", "[E1] the cat covid19 [E1]",
    "x<x>y <x> z", "the\u200bcat\u00a0sat", "covid19covid19", "[e1] [CLS] cat [SEP] </s> <s>",
    "THE unseen 漢字 🙂",
]  # fmt: skip
PAIRS = [("the cat", "Anna runs"), ("", "a dog"), ("[E1] é", "covid19 in 2010")]


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    module = pytest.importorskip("transformers", reason="parity needs transformers")
    module.logging.set_verbosity_error()
    return module


@functools.cache
def vocabulary(kind):
    """Train a small vocabulary and return its tokenizer's JSON."""
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    elif kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=340, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )  # fmt: skip
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        ])  # fmt: skip
        special = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()
        ])  # fmt: skip
        tokenizer.decoder = decoders.Metaspace()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    if kind == "metaspace":  # bytes are pieces, no added tokens
        state["added_tokens"] = state["added_tokens"][:3]
    return json.dumps(state)


PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Vocabulary, model type and classes of each form; None names no class.
FORMS = {
    "bert": ("wordpiece", "bert", ["BertTokenizer", "BertTokenizerFast", *PLAIN, None]),
    "distilbert": ("wordpiece", "distilbert", ["DistilBertTokenizer", "BertTokenizer", *PLAIN, None]),
    "electra": ("wordpiece", "electra", ["ElectraTokenizerFast", "ElectraTokenizer", None]),
    "roberta": ("byte_level", "roberta", ["RobertaTokenizer", "RobertaTokenizerFast", *PLAIN, None]),
    "gpt2": ("byte_level", "gpt2", ["GPT2Tokenizer", "GPT2TokenizerFast", *PLAIN, None]),
    "llama": ("metaspace", "llama", ["LlamaTokenizer", "LlamaTokenizerFast", *PLAIN, None]),
    "llama3": ("byte_level", "llama", ["LlamaTokenizerFast", "GPT2Tokenizer", *PLAIN]),
    "multilingual": ("unigram", "bert", ["XLMRobertaTokenizer", "XLMRobertaTokenizerFast", *PLAIN]),
    "unknown": ("wordpiece", "bert", ["BertweetTokenizer", "MyTokenizer", "CamembertTokenizer"]),
}


def write_folder(folder, seed):
    """Write a random folder and return the name of its form."""
    draw = random.Random(seed)
    form = draw.choice(list(FORMS))
    kind, model_type, classes = FORMS[form]
    state = json.loads(vocabulary(kind))
    config = {}

    def maybe(name, *values):
        if draw.random() < 0.5:
            config[name] = draw.choice(values)

    if (name := draw.choice(classes)) is not None:
        config["tokenizer_class"] = name
    maybe("do_lower_case", True, False)
    maybe("strip_accents", None, True, False)
    maybe("tokenize_chinese_chars", True, False)
    maybe("add_prefix_space", True, False)
    maybe("trim_offsets", True, False)
    if form == "llama":
        maybe("legacy", True, False)
    maybe("add_bos_token", True, False)
    maybe("add_eos_token", True, False)
    maybe(
        "model_input_names", ["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]
    )
    size = len(state["model"]["vocab"])
    added = draw.sample(["[E1]", "covid19", "<x>", "<|im_end|>"], draw.randrange(4))
    special = [name for name in added if draw.random() < 0.5]
    tokens = [
        {
            "id": size + n, "content": content,
            "single_word": draw.random() < 0.2, "lstrip": draw.random() < 0.2,
            "rstrip": draw.random() < 0.2, "normalized": content not in special, "special": content in special,
        }
        for n, content in enumerate(added)
    ]  # fmt: skip
    form_of_added = draw.choice(["tokenizer.json", "added_tokens.json", "added_tokens_decoder"])
    if form_of_added == "tokenizer.json":
        state["added_tokens"] += tokens
    elif form_of_added == "added_tokens.json":
        (folder / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in tokens}))
        if special:
            where = {"additional_special_tokens": special}
            if draw.random() < 0.5:
                (folder / "special_tokens_map.json").write_text(json.dumps(where))
            else:
                config |= where
    else:
        config["added_tokens_decoder"] = {
            str(t["id"]): {name: value for name, value in t.items() if name != "id"}
            for t in [*state["added_tokens"], *tokens]
        }
    if kind in ("byte_level", "metaspace") and model_type in ("gpt2", "llama"):
        maybe("eos_token", "</s>", {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False,
                                    "normalized": False, "single_word": False})  # fmt: skip
        maybe("bos_token", "<s>")
    first, last = ("[CLS]", "[SEP]") if kind == "wordpiece" else ("<s>", "</s>")
    ids = {t["content"]: t["id"] for t in state["added_tokens"]}
    templates = [
        None,
        processors.TemplateProcessing(
            single=f"{first}:0 $A:0 {last}:0", pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
            special_tokens=[(first, ids[first]), (last, ids[last])],
        ),
        processors.BertProcessing((last, ids[last]), (first, ids[first])),
        processors.RobertaProcessing((last, ids[last]), (first, ids[first])),
        processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A $B:1", special_tokens=[(first, ids[first])]
        ),
    ]  # fmt: skip
    template = draw.choice(templates)
    state["post_processor"] = None if template is None else json.loads(template.__getstate__())
    if kind == "wordpiece":
        lowercase = draw.random() < 0.5
        state["normalizer"] = json.loads(normalizers.BertNormalizer(lowercase=lowercase).__getstate__())
    if form in ("llama3", "gpt2") and draw.random() < 0.2:  # SmolLM's splitting of digits
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        state["pre_tokenizer"] = json.loads(pre_tokenizers.Sequence(parts).__getstate__())
    if form == "llama" and draw.random() < 0.2:  # as version 4 of transformers writes it
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        state |= {"normalizer": json.loads(normalizers.Sequence(parts).__getstate__()), "pre_tokenizer": None}
    files = draw.choice([("json",), ("json",), ("vocabulary",), ("json", "vocabulary")])
    if kind in ("metaspace", "unigram") or "Fast" in config.get("tokenizer_class", "") or model_type == "llama":
        files = ("json",)
    if "json" in files:
        (folder / "tokenizer.json").write_text(json.dumps(state))
    if "vocabulary" in files and kind == "wordpiece":
        lines = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
        (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))
    elif "vocabulary" in files:
        (folder / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    if config or draw.random() < 0.5:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return form


def outcome(transformers, folder, form):
    """Return "equal", "refused: ..." or "noted", or raise an AssertionError."""
    is_text = form in ("gpt2", "llama", "llama3")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ours = TextTokenizer.open(folder) if is_text else EncoderTokenizer.open(folder)
        except UserError as error:
            return f"refused: {error}"
    if any("differently: tokenizer.json is followed" in str(w.message) for w in caught):
        return "noted"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if is_text:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            prompts = ours.encode_prompts(TEXTS)
        for text, prompt in zip(TEXTS, prompts, strict=True):
            encoding = theirs(text)
            # A prompt lacks what a template adds after the text.
            sequences = encoding.sequence_ids()
            closing = next((n for n, s in enumerate(reversed(sequences)) if s is not None), 0)
            kept = encoding["input_ids"][: len(sequences) - closing]
            if set(sequences) == {None}:
                kept = kept[: len(prompt)]
            assert prompt == kept, f"{text!r}: {ours.tokens(prompt)} {ours.tokens(kept)}"
        return "equal"
    examples = [*TEXTS, *PAIRS]
    encoded = ours.encode_batch(TEXTS, max_length=99) + ours.encode_batch(PAIRS, max_length=99)
    for text, ours_of_text in zip(examples, encoded, strict=True):
        want = theirs(*([text] if isinstance(text, str) else text))
        ids = ours_of_text.ids.tolist()
        assert ids == want["input_ids"], f"{text!r}: {ours.tokens(ids)} {ours.tokens(want['input_ids'])}"
        if form in ("bert", "electra", "multilingual"):
            types = want.get("token_type_ids", [0] * len(ids))
            assert ours_of_text.types.tolist() == types, f"types of {text!r}"
    return "equal"


@pytest.mark.long
@pytest.mark.parametrize("first", others_soak(range(0, 300, 100), 0))
def test_random_folders_equal_transformers_or_are_refused(transformers, first, tmp_path):
    """A folder whose files contradict each other may differ, with a warning about it."""
    outcomes = []
    for seed in range(first, first + 100):
        (folder := tmp_path / str(seed)).mkdir()
        form = write_folder(folder, seed)
        try:
            outcomes.append(outcome(transformers, folder, form))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {form}: {error}") from None
    assert outcomes.count("equal") >= 50
    assert not any("\n" in text for text in outcomes)
