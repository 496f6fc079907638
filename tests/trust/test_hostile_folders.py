"""Published folders with damaged or contradictory files: one line of error, never a wrong model."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.trust.folders import change_json, change_tensor, write_bert, write_llama, write_vit
from transformer_jax import pretrained
from transformer_jax.errors import UserError

WRITERS = {"llama": write_llama, "bert": write_bert, "vit": write_vit}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


def refused(folder, message):
    with pytest.raises(UserError, match=message) as error:
        pretrained.load(folder)
    assert "\n" not in str(error.value)


CONFIGS = [
    ("llama", dict(hidden_size="16"), r'hidden_size "16": expected int, got str'),
    ("llama", dict(num_hidden_layers=10**9), "`layers` 1,000,000,000 is above the limit of 2,000; set TRANS"),
    ("llama", dict(num_hidden_layers=0), "num_hidden_layers 0: expected int >= 1"),
    ("llama", dict(num_attention_heads=None), "num_attention_heads null: expected int"),
    ("llama", dict(num_key_value_heads=[1]), r"num_key_value_heads \[1\]: expected int"),
    ("llama", dict(rms_norm_eps=-1e-5), "rms_norm_eps -1e-05: expected float > 0.0"),
    ("llama", dict(rms_norm_eps=float("nan")), 'rms_norm_eps "NaN": expected float'),
    ("llama", dict(rope_parameters={"rope_theta": 0}), "rope_theta 0: expected float > 0.0"),
    ("llama", dict(rope_parameters=7), "rope_parameters 7: expected object"),
    ("llama", dict(rope_scaling={"type": "linear"}), "factor of rope scaling linear is missing"),
    ("llama", dict(rope_scaling={"rope_type": "warp"}), 'rope_type "warp": known are default, linear'),
    ("llama", dict(tie_word_embeddings="false"), 'tie_word_embeddings "false": expected bool'),
    ("llama", dict(vocab_size=10**12), "`vocab_size` 1,000,000,000,000 is above the limit"),
    ("llama", dict(model_type=["llama"]), r'model_type \["llama"\]: expected str'),
    ("llama", dict(architectures="LlamaForCausalLM"), 'architectures "LlamaForCausalLM": expected array'),
    ("llama", dict(eos_token_id="</s>"), 'eos_token_id "</s>": expected'),
    ("bert", dict(hidden_act="sine"), 'hidden_act "sine": known are gelu, gelu_new'),
    ("bert", dict(hidden_dropout_prob=1.5), "hidden_dropout_prob 1.5: expected float < 1.0"),
    ("bert", dict(layer_norm_eps=0), "layer_norm_eps 0: expected float > 0.0"),
    (
        "bert",
        dict(id2label={"0": "a", "2": "b"}),
        "id2label has the key '2': its keys must be",
    ),
    ("bert", dict(id2label={"-1": "a", "0": "b"}), "id2label has the key '-1'"),
    ("bert", dict(id2label={"0": None, "1": "b"}), "id2label .*null"),
    ("bert", dict(id2label=["a", "b"]), "id2label .*expected object"),
    ("bert", dict(id2label={}, num_labels=10**10), "num_labels 10,000,000,000 is above the limit"),
    ("bert", dict(problem_type="ranking"), 'problem_type "ranking": known are multi_label_classification'),
    ("bert", dict(type_vocab_size=-1), "type_vocab_size -1: expected int >= 0"),
    ("vit", dict(image_size=[224, 224]), r"image_size \[224, 224\]: expected int"),
    ("vit", dict(patch_size=3), "image_size 8 must be a multiple of patch_size 3"),
    ("vit", dict(image_size=10**6), "`image_size` 1,000,000 is above the limit of 16,384"),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONFIGS)
def test_a_config_is_typed_and_bounded(copy, family, changes, message):
    folder = copy(family)
    change_json(folder / "config.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, r"config\.json: not JSON \(nested too deeply\)"),
        (b'{"model_type": "llama", ', "config.json: not JSON"),
        (b"\xff\xfe{", "config.json: not JSON"),
        (b"[1]", "config.json: expected object, got array"),
    ],
)
def test_a_config_that_is_no_object(copy, content, message):
    folder = copy("llama")
    (folder / "config.json").write_bytes(content)
    refused(folder, message)


def test_a_config_that_never_ends(copy):
    folder = copy("llama")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "config.json: not a regular file")


PROCESSORS = [
    (dict(size="48"), 'size "48": expected'),
    (dict(size={"height": 8, "width": 9}), "is not a square"),
    (dict(size={"height": 10**6, "width": 10**6}), "the size 1,000,000 is above the limit of 16,384"),
    (dict(image_mean=[float("nan")] * 3), r'image_mean\[0\] "NaN": expected float'),
    (dict(image_std=[float("inf")] * 3), r'image_std\[0\] "Infinity": expected float'),
    (dict(image_std=[0, 1, 1]), "positive deviations"),
    (dict(do_normalize="no"), 'do_normalize "no": expected bool'),
    (dict(resample=99), "resample 99 is not one of 0, 1, 2, 3"),
]


@pytest.mark.parametrize(("changes", "message"), PROCESSORS)
def test_an_image_processor_is_typed_and_bounded(copy, changes, message):
    folder = copy("vit")
    change_json(folder / "preprocessor_config.json", **changes)
    refused(folder, message)


def test_weights_that_are_not_finite(copy):
    folder = copy("llama")
    change_tensor(folder, "model.norm.weight", 3, np.nan)
    refused(folder, "model.norm.weight has NaN or infinite values; `allow_nonfinite` loads it all the same")
    model, _ = pretrained.load(folder, allow_nonfinite=True)
    assert np.isnan(model.norm.scale[3])
    folder = copy("bert")
    change_tensor(folder, "bert.embeddings.word_embeddings.weight", 5, -np.inf)
    refused(folder, "word_embeddings.weight has NaN or infinite values")


def sharded(folder, **file_of):
    """Store each tensor in the named file, others in `rest`, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    groups = {}
    for name, tensor in tensors.items():
        file = next((file for part, file in file_of.items() if part in name), "rest")
        groups.setdefault(f"{file}.safetensors", {})[name] = tensor
    for file, group in groups.items():
        save_file(group, folder / file)
    index = {"weight_map": {name: file for file, group in groups.items() for name in group}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index["weight_map"]


def test_a_tensor_in_two_files(copy):
    folder = copy("llama")
    weight_map = sharded(folder, embed="one")
    rest = load_file(folder / "rest.safetensors")
    save_file(
        rest | {"model.embed_tokens.weight": np.zeros((270, 16), np.float32)}, folder / "rest.safetensors"
    )
    assert weight_map["model.embed_tokens.weight"] == "one.safetensors"
    refused(folder, "model.embed_tokens.weight is stored twice, also as .*one.safetensors")


def test_an_index_that_leaves_its_folder_or_names_the_wrong_file(copy, tmp_path):
    folder = copy("llama")
    weight_map = sharded(folder, embed="one")
    shutil.copy(folder / "one.safetensors", tmp_path / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    for file in ("../one.safetensors", str(tmp_path / "one.safetensors"), "a/../../one.safetensors"):
        index.write_text(json.dumps({"weight_map": weight_map | {"model.embed_tokens.weight": file}}))
        refused(folder, "leads out of")
    index.write_text(json.dumps({"weight_map": weight_map | {"model.embed_tokens.weight": "rest.safetensors"}}))
    refused(folder, "names tensors that no file holds: model.embed_tokens.weight in rest.safetensors")
    for content in ({"weight_map": []}, {"weight_map": {"model.norm.weight": 3}}, [], {}):
        index.write_text(json.dumps(content))
        refused(folder, "model.safetensors.index.json: ")


def test_both_names_of_a_norm(copy):
    folder = copy("bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors["bert.embeddings.LayerNorm.weight"] * 2
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "stored twice, also as bert.embeddings.LayerNorm")


def test_a_tied_model_with_two_tables_is_not_tied(copy):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    change_json(folder / "config.json", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="lm_head.weight differs from model.embed_tokens.weight"):
        model, _ = pretrained.load(folder)
    np.testing.assert_array_equal(model.unembedding.table.embedding[:266], tensors["lm_head.weight"][:266])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert pretrained.load(folder)[0].unembedding is None


def test_a_tied_table_under_the_heads_name(copy):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    change_json(folder / "config.json", tie_word_embeddings=True)
    table = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = table
    save_file(tensors, folder / "model.safetensors")
    model, _ = pretrained.load(folder)
    np.testing.assert_array_equal(model.embedding.table.embedding[: len(table)], table)


def test_a_single_file_comes_before_an_index(copy):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.warns(UserWarning, match="model.safetensors is read, and the files of"):
        model, _ = pretrained.load(folder)
    np.testing.assert_array_equal(model.norm.scale, tensors["model.norm.weight"])


def change_tokenizer(folder, change):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


TOKENIZERS = [
    ("llama", lambda c: c["model"]["vocab"].update({"zz": 5}), 'the id 5 of "zz" is that of'),
    ("llama", lambda c: c["model"].update(vocab={}), "not a tokenizer file"),
    ("llama", lambda c: c["added_tokens"][0].update(id=77), "has the ids 0 and 77"),
    ("llama", lambda c: c.update(model=None), "not a tokenizer file"),
    ("bert", lambda c: c["model"].update(unk_token="[NONE]"), 'lacks the unknown token "\\[NONE\\]"'),
    (
        "bert",
        lambda c: c["post_processor"]["special_tokens"]["[CLS]"].update(ids=[999]),
        'its template adds "\\[CLS\\]" with the id 999, which no token has',
    ),
    (
        "llama",
        lambda c: c.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}),
        "not a tokenizer file",
    ),
]


@pytest.mark.parametrize(("family", "change", "message"), TOKENIZERS)
def test_a_damaged_tokenizer(copy, family, change, message):
    folder = copy(family)
    change_tokenizer(folder, change)
    refused(folder, message)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "a"], "a word piece is listed twice"),
        (["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a"], r"lacks the unknown token '\[UNK\]'"),
        ([], "lacks the unknown token"),
    ],
)
def test_a_damaged_vocabulary(copy, lines, message):
    folder = copy("bert")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))
    change_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    refused(folder, message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [{"type": "models.Transformer", "path": "../other"}], "leads out of"),
        ("modules.json", {"type": 1}, "modules.json: expected array"),
        ("modules.json", [{"type": None, "path": ""}], r"\[0\].type null: expected str"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length 0: expected float >= 3"),
        ("sentence_bert_config.json", {"max_seq_length": float("nan")}, 'max_seq_length "NaN"'),
        ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling_mode 3: expected"),
    ],
)
def test_settings_of_sentence_transformers(copy, file, content, message):
    folder = copy("bert")
    modules = [
        {"type": f"models.{kind}", "path": path}
        for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    pretrained.load(folder)
    (folder / file).write_text(json.dumps(content))
    refused(folder, message)
