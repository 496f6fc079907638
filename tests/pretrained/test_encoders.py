"""Published text encoders against `transformers` on PyTorch, read and written, and two real trained models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import transformer_jax
from tests.cases import others_soak
from tests.pretrained.test_parity import noisy
from transformer_jax import pretrained
from transformer_jax.data.corpora.tables import read_table
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import number_scores
from transformer_jax.models.encoders.bert import Bert, BertClassifier, BertConfig, BertMaskedLM, BertTagger
from transformer_jax.models.encoders.distilbert import DistilBertClassifier, DistilBertConfig, DistilBertReader
from transformer_jax.models.encoders.electra import ElectraConfig, ElectraDiscriminator
from transformer_jax.models.encoders.roberta import RobertaConfig, RobertaMaskedLM, RobertaTagger
from transformer_jax.models.registry import MODELS, module_of
from transformer_jax.parameter_names import named_leaves
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.sentence_modules import dense_layers, sentence_settings

V, T = 97, 11
LENGTHS = (11, 4, 7)
SIZES = dict(vocab_size=V, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=37,
             max_position_embeddings=19)  # fmt: skip
DISTIL = dict(vocab_size=V, dim=24, n_layers=3, n_heads=3, hidden_dim=37, max_position_embeddings=19)
CHANGES = {
    "BertModel": dict(hidden_act="gelu_new", layer_norm_eps=1e-3),
    "BertForMaskedLM": dict(hidden_act="relu"),
    "BertForSequenceClassification": dict(num_labels=5),
    "BertForTokenClassification": dict(num_labels=5, type_vocab_size=3),
    "RobertaForSequenceClassification": dict(num_labels=1),
    "RobertaForMaskedLM": dict(pad_token_id=3),
    "ElectraForMaskedLM": dict(embedding_size=16),
    "ElectraForPreTraining": dict(embedding_size=24),
    "DistilBertForMaskedLM": dict(activation="relu"),
}
ENCODERS = [f for name in ("bert", "roberta", "electra", "distilbert") for f in FAMILIES[name]]


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    return pytest.importorskip("transformers", reason="parity needs transformers")


@pytest.fixture(scope="module")
def tokenizer():
    words = [chr(97 + a) + chr(97 + b) for a in range(20) for b in range(20)]
    return EncoderTokenizer.wordpiece([" ".join(words)], 100).with_labels(())


def small_tokenizer(classes=(), pad=0):
    """Build a tokenizer with fewer tokens than V and this padding id."""
    from tokenizers import Tokenizer, models
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    tokens = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    tokens.insert(pad, "[PAD]")
    tokenizer = Tokenizer(models.WordPiece({name: n for n, name in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    return EncoderTokenizer(tokenizer, labels=classes)


def their_output(model, tokens, types, mask):
    import torch

    inputs = dict(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long())
    if types is not None:
        inputs["token_type_ids"] = torch.tensor(types)
    with torch.no_grad():
        output = model(**inputs)
    return [x.numpy() for x in output.to_tuple() if hasattr(x, "numpy")]


def our_output(model, architecture, tokens, types, mask):
    options = dict(types=None if types is None else jnp.asarray(types), mask=jnp.asarray(mask))
    if architecture in ("BertForPreTraining",):
        states = model.hidden_states(jnp.asarray(tokens), **options)
        return [model.logits(states), model.sentence_logits(states[:, 0])]
    output = model(jnp.asarray(tokens), **options)
    if architecture.endswith("QuestionAnswering"):
        return [output[..., 0], output[..., 1]]
    if architecture.endswith("Model") and model.pooler is not None:
        return [output, model.pooled(output[:, 0])]
    return [output]


@pytest.mark.long
@pytest.mark.parametrize(
    "family", others_soak(ENCODERS, *ENCODERS[::3]), ids=lambda family: family.architecture
)
def test_an_encoder_is_read_and_written(transformers, family, tmp_path, rng):
    """The inputs have padding and token types; `transformers` reads what we write."""
    name = family.architecture
    sizes = DISTIL if family.model_type == "distilbert" else SIZES
    config_class = getattr(transformers, name.split("For")[0].removesuffix("Model") + "Config")
    config = config_class(**(sizes | CHANGES.get(name, {})))
    config.architectures = [name]
    torch_model = noisy(getattr(transformers, name)(config))
    torch_model.save_pretrained(tmp_path / "theirs")
    pad = config.pad_token_id
    small_tokenizer(pad=pad).save(tmp_path / "theirs/tokenizer.json")
    mask = np.arange(T) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, rng.integers(5, V, mask.shape), pad)
    types = None
    if getattr(config, "type_vocab_size", 0) > 1:
        types = (np.arange(T) >= 3).astype(int) * mask

    model, processor = pretrained.load(tmp_path / "theirs")
    assert isinstance(model, family.module)
    expected = their_output(torch_model, tokens, types, mask)
    outputs = our_output(model, name, tokens, types, mask)
    assert len(expected) == len(outputs)
    for reference, output in zip(expected, outputs, strict=True):
        output = np.asarray(output)
        if reference.ndim > 1 and reference.shape[:2] == mask.shape:
            reference, output = reference[mask], output[mask]
        np.testing.assert_allclose(output, reference, atol=1e-4)

    pretrained.save(tmp_path / "ours", model, processor)
    reloaded, report = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not [key for key in report["missing_keys"] if "position_ids" not in key]
    assert not report["unexpected_keys"]
    for reference, output in zip(expected, their_output(reloaded.eval(), tokens, types, mask), strict=True):
        np.testing.assert_allclose(output, reference, atol=1e-6)
    reread, _ = pretrained.load(tmp_path / "ours")
    for path, leaf in named_leaves(model).items():
        np.testing.assert_array_equal(leaf, named_leaves(reread)[path], err_msg=path)


PUBLISHED = [
    ("bert", "tiny", 4_385_920), ("bert", "mini", 11_170_560), ("bert", "small", 28_763_648),
    ("bert", "base", 109_482_240), ("bert", "large", 335_141_888), ("roberta", "base", 124_645_632),
    ("roberta", "large", 355_359_744), ("electra", "base", 108_891_648), ("electra", "large", 334_092_288),
    ("distilbert", "base", 66_362_880), ("longformer", "base", 148_659_456),
    ("longformer", "large", 434_600_960),
]  # fmt: skip


@pytest.mark.parametrize(("name", "preset", "count"), PUBLISHED)
def test_presets_have_the_published_numbers_of_parameters(name, preset, count):
    """Those of BertModel, RobertaModel and LongformerModel with a pooler, ElectraModel, DistilBertModel."""
    entry = MODELS["encoder"][name]
    config = entry.preset(preset, **({"pooler": True} if name in ("roberta", "longformer") else {}))
    assert jax.eval_shape(lambda: entry.module(config, rngs=nnx.Rngs(0))).parameter_count == count


def test_electra_small_has_the_published_number_of_parameters():
    """The published 13.5 million include the discriminator's dense layer and head."""
    config = ElectraConfig.preset("small")
    model = jax.eval_shape(lambda: ElectraDiscriminator(config, rngs=nnx.Rngs(0)))
    assert model.parameter_count == 13_548_800 + 257


@pytest.mark.filterwarnings("default:.* were truncated")  # one text exceeds the folder's limit
def test_vectors_of_a_real_sentence_encoder(shared):
    """The embeddings of eight texts by all-MiniLM-L6-v2 equal torch's."""
    record = json.loads((shared / "weights/minilm-l6-v2/expected.json").read_text())
    run = transformer_jax.load(shared / "weights/minilm-l6-v2")
    embeddings = run.embed([example["text"] for example in record["examples"]])
    assert embeddings.dtype == np.float32
    expected = np.array([example["embedding"] for example in record["examples"]])
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)


@pytest.mark.long
def test_sentence_similarity_equals_torch(shared):
    """Spearman's correlation on the development set of STS-B equals torch's."""
    table = read_table(str(shared / "data/tasks/stsb/dev.tsv.gz"), ("sentence1", "sentence2", "score"))
    run = transformer_jax.load(shared / "weights/minilm-l6-v2")
    first, second = (run.embed(table.columns[name]) for name in ("sentence1", "sentence2"))
    scores = dict(number_scores((first * second).sum(axis=1), [float(x) for x in table.columns["score"]]))
    assert round(scores["spearman"], 2) == 86.72


@pytest.mark.long
def test_logits_of_a_real_roberta(shared):
    record = json.loads((shared / "weights/sapiens-vl/expected.json").read_text())
    model, tokenizer = pretrained.load(shared / "weights/sapiens-vl")
    for example in record["examples"]:
        (encoded,) = tokenizer.encode_batch([example["text"]], max_length=128)
        assert encoded.ids.tolist() == example["input_ids"]
        np.testing.assert_allclose(model(jnp.array([encoded.ids]))[0], example["logits"], atol=1e-4)


def test_old_names_and_buffers_are_read(tmp_path, shared):
    """The file has TensorFlow's gamma and beta, a buffer of positions, and no pooler."""
    source = shared / "weights/minilm-l6-v2"
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
           for n, x in tensors.items()}  # fmt: skip
    assert old.keys() != tensors.keys()
    old = {f"bert.{name}": x for name, x in old.items() if not name.startswith("pooler")}
    old["bert.embeddings.position_ids"] = np.arange(512, dtype=np.float32)
    safetensors.numpy.save_file(old, tmp_path / "model.safetensors")
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    plain, tokenizer = pretrained.load(source)
    model, from_vocabulary = pretrained.load(tmp_path)
    assert model.pooler is None
    tokens = jnp.arange(5, 20)[None]
    np.testing.assert_array_equal(model(tokens), plain(tokens))
    texts = ["Déjà vu, it's 北京 naïve!", "unaffable"]
    encoded = [
        [e.ids.tolist() for e in t.encode_batch(texts, max_length=64)] for t in (tokenizer, from_vocabulary)
    ]
    assert encoded[0] == encoded[1]


@pytest.mark.parametrize(
    ("module", "config", "prefix"),
    [
        (BertMaskedLM, BertConfig, "bert."),
        (BertTagger, BertConfig, "bert."),
        (RobertaMaskedLM, RobertaConfig, "roberta."),
        (RobertaTagger, RobertaConfig, "roberta."),
    ],
)
def test_an_unused_pooler_is_ignored(tmp_path, module, config, prefix):
    """Older checkpoints contain it, and BERT's taggers the next-sentence head too."""
    extra = {} if config is RobertaConfig else {"pooler": False}
    model_config = config.preset(
        "mini", 7, width=24, layers=1, heads=3, feed_forward=37, max_length=19, classes=2, **extra
    )
    model = module(model_config, rngs=nnx.Rngs(0))
    pretrained.save(tmp_path, model, small_tokenizer(("x", "y"), pad=getattr(model_config, "padding_id", 0)))
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors[f"{prefix}pooler.dense.weight"] = np.ones((24, 24), np.float32)
    tensors[f"{prefix}pooler.dense.bias"] = np.ones(24, np.float32)
    if module is BertTagger:
        tensors["cls.seq_relationship.weight"] = np.ones((2, 24), np.float32)
        tensors["cls.seq_relationship.bias"] = np.ones(2, np.float32)
    safetensors.numpy.save_file(tensors, path)
    loaded, _ = pretrained.load(tmp_path)
    for (name, expected), (_, leaf) in zip(
        named_leaves(model).items(), named_leaves(loaded).items(), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected, err_msg=name)


def test_a_masked_lm_with_pooler_and_next_sentence_head_is_read_completely(tmp_path):
    """bert-base-uncased is published as a masked LM, and classifiers start from its pooler."""
    config = BertConfig.preset("mini", 7, width=24, layers=1, heads=3, feed_forward=37, max_length=19)
    model = BertMaskedLM(config, rngs=nnx.Rngs(0))
    pretrained.save(tmp_path, model, small_tokenizer(("x", "y")))
    path = tmp_path / "config.json"
    hf_config = json.loads(path.read_text())
    assert hf_config["architectures"] == ["BertForPreTraining"]
    path.write_text(json.dumps(hf_config | {"architectures": ["BertForMaskedLM"]}))
    loaded, _ = pretrained.load(tmp_path)
    expected, leaves = named_leaves(model), named_leaves(loaded)
    assert "encoder/pooler/kernel" in expected
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("published_field", "module", "fields"),
    [
        ("classifier_dropout", BertTagger, {"classifier_dropout": 0.3}),
        ("classifier_dropout", RobertaTagger, {"classifier_dropout": 0.3}),
        ("seq_classif_dropout", DistilBertClassifier, {"classifier_dropout": 0.3}),
        ("qa_dropout", DistilBertReader, {"reader_dropout": 0.3}),
    ],
)
def test_dropout_of_a_head_is_read_and_written(tmp_path, published_field, module, fields):
    config_class = {BertTagger: BertConfig, RobertaTagger: RobertaConfig}.get(module, DistilBertConfig)
    sizes = dict(vocab_size=7, width=8, layers=1, heads=2, feed_forward=8, classes=2)
    config = config_class(**sizes, **fields)
    pretrained.save(
        tmp_path,
        module(config, rngs=nnx.Rngs(0)),
        small_tokenizer(("no", "yes"), pad=getattr(config, "padding_id", 0)),
    )
    path = tmp_path / "config.json"
    hf_config = json.loads(path.read_text())
    assert hf_config[published_field] == 0.3
    (field,) = fields
    assert getattr(pretrained.load(tmp_path)[0].config, field) == 0.3
    del hf_config[published_field]
    path.write_text(json.dumps(hf_config))
    # The default of `transformers` for a config without the field.
    expected = {"seq_classif_dropout": 0.2}.get(published_field)  # qa_dropout is 0.1, as `dropout` is
    assert getattr(pretrained.load(tmp_path)[0].config, field) == expected


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        (BertMaskedLM, {}),
        (BertMaskedLM, {"pooler": False}),
        (BertTagger, {"pooler": False, "classes": 2}),
        (ElectraDiscriminator, {"embedding_width": 8, "generator_size": 1.0}),
    ],
)
def test_tensors_determine_the_class_of_a_config_without_architectures(tmp_path, module, fields):
    config_class = ElectraConfig if module is ElectraDiscriminator else BertConfig
    config = config_class(**dict(vocab_size=7, width=8, layers=1, heads=2, feed_forward=8) | fields)
    model = module(config, rngs=nnx.Rngs(0))
    pretrained.save(tmp_path, model, small_tokenizer(("no", "yes"), pad=getattr(config, "padding_id", 0)))
    path = tmp_path / "config.json"
    hf_config = json.loads(path.read_text())
    del hf_config["architectures"]
    path.write_text(json.dumps(hf_config))
    loaded, _ = pretrained.load(tmp_path)
    assert type(loaded) is module
    expected, leaves = named_leaves(model), named_leaves(loaded)
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def test_tensors_that_fit_two_classes_are_refused(tmp_path):
    """BERT's classifier has the tensors of a tagger with an unused pooler."""
    config = BertConfig(vocab_size=7, width=8, layers=1, heads=2, feed_forward=8, classes=2)
    pretrained.save(
        tmp_path,
        BertClassifier(config, rngs=nnx.Rngs(0)),
        small_tokenizer(("no", "yes"), pad=getattr(config, "padding_id", 0)),
    )
    path = tmp_path / "config.json"
    hf_config = json.loads(path.read_text())
    del hf_config["architectures"]
    path.write_text(json.dumps(hf_config))
    message = "the weights fit BertForSequenceClassification or BertForTokenClassification"
    with pytest.raises(UserError, match=message):
        pretrained.load(tmp_path)


def test_an_unknown_head_is_refused(tmp_path, shared):
    source = shared / "weights/minilm-l6-v2"
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["BertForMultipleChoice"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"unknown architecture BertForMultipleChoice: known of bert are BertModel"
    ):
        pretrained.load(tmp_path)


@pytest.mark.parametrize("family", ["bert", "electra", "roberta", "distilbert"])
def test_transformers_encodes_pairs_like_our_tokenizer(transformers, tokenizer, family, tmp_path):
    """The saved tokenizer returns token types if the model has them, and truncates at its limit."""
    sizes = dict(vocab_size=100, width=16, layers=1, heads=2, feed_forward=24, max_length=12, classes=2)
    options = dict(embedding_width=8, generator_size=0.5) if family == "electra" else {}
    config = MODELS["sequence_classifier"][family].config(**sizes, **options)
    run_tokenizer = tokenizer.with_labels(("no", "yes"))
    model = module_of(config, "sequence_classifier")(config, rngs=nnx.Rngs(0))
    pretrained.save(tmp_path / "folder", model, run_tokenizer)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    (ours,) = run_tokenizer.encode_batch([("aa ab", "ac")], max_length=12)
    output = reference("aa ab", "ac")
    assert output["input_ids"] == ours.ids.tolist()
    assert ("token_type_ids" in output) == (family in ("bert", "electra"))
    if "token_type_ids" in output:
        assert output["token_type_ids"] == ours.types.tolist()
    assert len(reference("aa " * 40, truncation=True)["input_ids"]) == 12


@pytest.mark.parametrize(
    ("module_config", "expected"),
    [
        ({"pooling_mode": "cls"}, "first"),
        ({"pooling_mode": ["max"]}, "max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": ["mean", "max"]}, None),
        ({"pooling_mode": "lasttoken"}, None),
    ],
)
def test_pooling_of_every_version_of_sentence_transformers(module_config, expected, tmp_path):
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 16, **module_config}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 99}))
    if expected is None:
        with pytest.raises(UserError, match="is not supported"):
            sentence_settings(tmp_path)
        return
    assert sentence_settings(tmp_path) == {"normalize": False, "pooling": expected, "max_length": 99}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    assert sentence_settings(tmp_path)["max_length"] == 64


def write_dense(folder, rng, sizes, module="activation.Tanh", *, bias=True):
    """Write a Dense module of sentence-transformers, and return its weight and bias."""
    inputs, outputs = sizes
    folder.mkdir()
    tensors = {"linear.weight": rng.normal(size=(outputs, inputs)).astype(np.float32)}
    if bias:
        tensors["linear.bias"] = rng.normal(size=outputs).astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    fields = dict(in_features=inputs, out_features=outputs, bias=bias)
    fields["activation_function"] = f"torch.nn.modules.{module}"
    (folder / "config.json").write_text(json.dumps(fields))
    return tensors["linear.weight"], tensors.get("linear.bias", 0.0)


def test_dense_modules_of_a_sentence_encoder(tmp_path, tokenizer, rng):
    folder, texts = tmp_path / "folder", ["aa ab", "ac ad ae af"]
    sizes = dict(layers=1, width=24, heads=3, feed_forward=8, max_length=19)
    config = BertConfig(vocab_size=tokenizer.vocab_size, **sizes)
    plain = EncoderTokenizer.from_files(tokenizer.files())
    plain.settings |= dict(pooling="mean", normalize=False)
    pretrained.save(folder, Bert(config, rngs=nnx.Rngs(0)), plain)
    pooled = transformer_jax.load(folder).embed(texts)
    types = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    paths = ("", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize")
    modules = [{"type": f"x.{t}", "path": path} for t, path in zip(types, paths, strict=True)]
    (folder / "modules.json").write_text(json.dumps(modules))
    first, first_bias = write_dense(folder / "2_Dense", rng, (24, 7))
    second, _ = write_dense(folder / "3_Dense", rng, (7, 5), "linear.Identity", bias=False)
    expected = np.tanh(pooled.astype(np.float64) @ first.T + first_bias) @ second.T
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    run = transformer_jax.load(folder)
    np.testing.assert_allclose(run.embed(texts), expected, atol=1e-5)
    assert run.embed([]).shape == (0, 5)
    pretrained.save(tmp_path / "saved", run.model, run.processor)
    np.testing.assert_array_equal(transformer_jax.load(tmp_path / "saved").embed(texts), run.embed(texts))
    with pytest.raises(UserError, match="Dense modules cannot be trained: start from another folder"):
        transformer_jax.configure("sentence_embedding", "fine_tune", start=str(folder), train=("pairs.tsv",))


@pytest.mark.parametrize(
    ("module", "sizes", "order", "message"),
    [
        ("activation.Softmax", (24, 7), (0, 1, 2), "the activation Softmax is none of Identity, Tanh"),
        ("activation.Tanh", (24, 8), (0, 1, 2), r"expected linear.weight with shape \(7, 24\)"),
        ("activation.Tanh", (24, 7), (0, 2, 1), "the order Transformer, Dense, Pooling is not supported"),
    ],
)
def test_bad_dense_modules(tmp_path, rng, module, sizes, order, message):
    write_dense(tmp_path / "2_Dense", rng, sizes, module)
    config = json.loads((tmp_path / "2_Dense/config.json").read_text()) | {"out_features": 7}
    (tmp_path / "2_Dense/config.json").write_text(json.dumps(config))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    types_and_paths = [modules[n] for n in order]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": t, "path": p} for t, p in types_and_paths]))
    with pytest.raises(UserError, match=message):
        dense_layers(tmp_path)
