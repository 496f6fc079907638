"""Training, resuming, sharding, loading and use of contrastive and captioning runs."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.cases import others_soak
from transformer_jax import tasks
from transformer_jax.data.corpora.scenes import scenes
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.plotting.captions import plot_captions
from transformer_jax.plotting.image_page import ImagePage
from transformer_jax.tasks.multimodal.captioning import CaptioningTask
from transformer_jax.tasks.multimodal.contrastive import ContrastiveTask
from transformer_jax.training import plan
from transformer_jax.training.execution import Execution
from transformer_jax.training.metrics import read_metrics

STEPS = 12
SIZES = dict(
    width=24, layers=2, heads=2, feed_forward=32, patch_size=8, batch_size=16, steps=STEPS, evaluate_every=6,
    save_every=3, learning_rate=3e-3, warmup=2,
)  # fmt: skip
TEXT = dict(text_width=16, text_layers=1, text_heads=2, text_feed_forward=32, embedding_width=12)
CASES = {
    "clip": ("contrastive", TEXT),
    "siglip": (
        "contrastive",
        TEXT | dict(model="siglip", pooling="attention", text_pooling="last", text_bias=True),
    ),
    "captioner": (
        "captioning",
        dict(decoder_width=16, decoder_layers=1, decoder_heads=2, decoder_feed_forward=32, decoder_dropout=0.1),
    ),
}


def config_of(case, **changes):
    task, values = CASES[case]
    return tasks.configure(task, "drawn", **(SIZES | values | changes))


def train(config, folder, mesh=None):
    return tasks.train(config, folder, execution=Execution(mesh=mesh))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a case once and returns its folder and results."""
    root, results = tmp_path_factory.mktemp("runs"), {}

    def train_once(case):
        if case not in results:
            results[case] = train(config_of(case), root / case)
        return root / case, results[case]

    return train_once


class Halt(Exception):
    """End a run after its first steps."""


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def images(count):
    test = scenes()[2]
    return [test.images[n] for n in range(count)]


RECALLS = {f"{d}_recall_at_{k}" for d in ("image_to_text", "text_to_image") for k in (1, 5, 10)}


@pytest.mark.parametrize("case", others_soak(CASES, "clip", "captioner"))
def test_it_is_trained(case, trained):
    folder, results = trained(case)
    expected = RECALLS if case != "captioner" else {"bleu1", "bleu4", "cider", "cider_shuffled"}
    assert expected <= set(results)
    assert all(np.isfinite(results[name]) for name in expected)
    assert losses(folder)[-1] < losses(folder)[0]
    assert json.loads((folder / "results.json").read_text())["test_images"] == 192


@pytest.mark.long
@pytest.mark.parametrize("case", others_soak(CASES, "captioner"))
def test_it_is_resumed_bit_for_bit(case, trained, tmp_path, monkeypatch):
    folder, results = trained(case)

    def halt(*_):
        raise Halt

    with monkeypatch.context() as patched:
        for kind in (ContrastiveTask, CaptioningTask):
            patched.setattr(kind, "validate", halt)
        with pytest.raises(Halt):
            train(config_of(case), tmp_path / "run")
    again = train(config_of(case), tmp_path / "run")
    expected, resumed = (named_leaves(tasks.load(path).model) for path in (folder, tmp_path / "run"))
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    measured = {name: value for name, value in results.items() if "second" not in name}
    assert measured == {name: again[name] for name in measured}


@pytest.mark.long
@pytest.mark.parametrize("case", others_soak(CASES, "clip", "captioner"))
def test_eight_devices_learn_the_same(case, trained, tmp_path):
    """The contrastive loss compares the pairs of all devices."""
    train(config_of(case), tmp_path / "run", mesh="data=2,fsdp=2,tensor=2")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(trained(case)[0]), rtol=2e-3)


def test_micro_batches_of_captions_learn_the_same(trained, tmp_path):
    changes = dict(decoder_dropout=0.0, steps=6)
    train(config_of("captioner", accumulation=2, **changes), tmp_path / "two")
    train(config_of("captioner", **changes), tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-3)


def test_micro_batches_of_a_contrastive_loss_are_refused(tmp_path):
    with pytest.raises(UserError, match="`accumulation` 2"):
        train(config_of("clip", accumulation=2), tmp_path / "run")


@pytest.mark.parametrize("case", CASES)
def test_it_is_planned(case):
    lines = dict(plan.describe(tasks.TASKS[CASES[case][0]], config_of(case), "data=2,tensor=2"))
    assert lines["work"].endswith("in total")


def test_images_and_texts_are_compared(trained):
    run = tasks.load(trained("clip")[0])
    pictures, texts = images(5), ["a red circle above a blue star", "an orange square", "the sky"]
    similarity = run.similarity(pictures, texts)
    assert similarity.shape == (5, 3)
    np.testing.assert_allclose(similarity, run.embed_images(pictures) @ run.embed_texts(texts).T, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(run.embed_texts(texts), axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(run.embed_texts(texts[1:2])[0], run.embed_texts(texts)[1], atol=1e-5)
    assert run.attention_maps(pictures[0]).grid == (4, 4)


def test_classes_are_named_by_words(trained):
    run = tasks.load(trained("clip")[0])
    pictures, labels = images(4), ["red circle", "blue square", "green star"]
    predictions = run.classify(pictures, labels, templates=["a {}", "there is a {}"])
    vectors = sum(
        run.embed_texts([t.replace("{}", label) for label in labels]) for t in ("a {}", "there is a {}")
    )
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    logits = run.embed_images(pictures) @ vectors.T * float(run.model.scale)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for prediction, row in zip(predictions, shares, strict=True):
        assert list(prediction.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-4)
        assert prediction.label == labels[row.argmax()]
    for labels, templates, message in (
        (["one"], ["{}"], "two or more labels"),
        ("red", ["{}"], "two or more labels"),
        (["red", " "], ["{}"], "label 2 is empty"),
        (["red", "blue", "red"], ["{}"], "label 'red' is listed twice"),
        (["a", "b"], ["a photo"], "each needs {} in the place of the label"),
        (["a", "b"], "{}", "each needs {}"),
    ):
        with pytest.raises(UserError, match=message):
            run.classify(pictures, labels, templates=templates)
    for texts, message in (([], "one or more texts"), ("a", "a list"), (["a", " "], "text 2 is empty")):
        with pytest.raises(UserError, match=message):
            run.embed_texts(texts)


def test_captions_and_the_patches_of_their_words(trained, tmp_path):
    run = tasks.load(trained("captioner")[0])
    pictures = images(3)
    captions = run.caption(pictures)
    assert len(captions) == 3
    assert all(isinstance(caption, str) for caption in captions)
    assert run.caption(pictures[:1], beam_size=1) == [run.align(pictures[0], beam_size=1).text]
    alignment = run.align(pictures[0])
    assert alignment.text == captions[0]
    T = len(alignment.tokens)
    assert alignment.weights.shape == (1, 2, T, 17)
    np.testing.assert_allclose(alignment.weights.sum(axis=-1), 1, atol=1e-5)
    assert alignment.maps().shape == (T, 4, 4)
    with pytest.raises(UserError, match="layer 1 of 1"):
        alignment.maps(1)
    plot_captions([alignment], path=tmp_path / "words.png")
    with Image.open(tmp_path / "words.png") as picture:
        assert picture.size[0] > 500
    page = ImagePage.of_caption(alignment, title=alignment.text).html
    words = alignment.by_word()
    assert " ".join(words.tokens).split() == "".join(alignment.tokens).split()
    np.testing.assert_allclose(words.weights.sum(axis=-1), 1, atol=1e-5)
    assert json.dumps(words.tokens, ensure_ascii=False).replace("<", "\\u003c") in page
    with pytest.raises(UserError, match="`beam_size` 0 is below 1"):
        run.caption(pictures, beam_size=0)
    for value, message in (([], "one or more"), ("a.png", "a list"), (pictures[0], "a list")):
        with pytest.raises(UserError, match=message):
            run.caption(value)


def test_beams_follow_the_words_of_a_caption(trained):
    """The weights of a beam are those of the model for its tokens, although beams change places."""
    run = tasks.load(trained("captioner")[0])
    alignment = run.align(images(1)[0], beam_size=4)
    ids = [run.processor.start, *alignment.ids[:-1]]
    pixels = run.normalize(alignment.pixels[None])
    _, weights = run.model(pixels, np.array([ids], np.int32), return_weights=True)
    np.testing.assert_allclose(alignment.weights, weights[0], atol=1e-5)


def test_a_captioner_starts_from_encoders_and_decoders(trained, tmp_path):
    """The image encoder of a CLIP run is copied, and frozen; the rest is trained."""
    folder, _ = trained("clip")
    changes = dict(batch_size=8, steps=2, evaluate_every=2, save_every=2, max_caption_length=16)
    decoder = dict(decoder_width=16, decoder_layers=1, decoder_heads=2, decoder_feed_forward=32)
    config = tasks.configure(
        "captioning", "pairs", encoder=str(folder), freeze_encoder=True, **changes, **decoder, vocab_size=300
    )
    assert (config.model.width, config.model.patch_size, config.trainable) == (24, 8, "(?!encoder/).*")
    train(config, tmp_path / "run")
    source, copied = tasks.load(folder).encoder, tasks.load(tmp_path / "run").encoder
    for name, leaf in named_leaves(source).items():
        np.testing.assert_array_equal(leaf, named_leaves(copied)[name], err_msg=name)
    text = tmp_path / "text.txt"
    text.write_text("a red circle above a blue star\n" * 200)
    language = tasks.configure(
        "language_modeling", "text", text=(str(text),), model="gpt", width=16, layers=1, heads=2, kv_heads=2,
        feed_forward=32, vocab_size=300, context=64, steps=1, batch_size=4,
    )  # fmt: skip
    train(language, tmp_path / "gpt")
    config = tasks.configure(
        "captioning", "pairs", encoder=str(folder), decoder=str(tmp_path / "gpt"), **changes
    )
    assert config.model.decoder_width == 16
    alone = tasks.configure("captioning", "pairs", decoder=str(tmp_path / "gpt"))
    assert (alone.model.decoder_width, [start.into for start in alone.start]) == (16, ["decoder"])
    train(config.with_values(learning_rate=0.0), tmp_path / "both")
    gpt = named_leaves(tasks.load(tmp_path / "gpt").model)
    both = named_leaves(tasks.load(tmp_path / "both").model.decoder)
    for name, leaf in gpt.items():
        size = both[name].shape[0]
        np.testing.assert_array_equal(leaf[:size] if "positions" in name else leaf, both[name], err_msg=name)
    assert set(both) - set(gpt) == {name for name in both if "cross_attention" in name}


def test_parts_without_a_config_are_started(trained, tmp_path):
    folder, _ = trained("captioner")
    start = (f"{folder},part=projection,into=projection",)
    train(config_of("captioner", start=start, steps=1, learning_rate=0.0), tmp_path / "run")
    expected, copied = (tasks.load(path).model.projection.kernel[...] for path in (folder, tmp_path / "run"))
    np.testing.assert_array_equal(copied, expected)


def test_a_folder_that_would_not_be_used_is_refused(trained, tmp_path):
    clip, captioner = (str(trained(case)[0]) for case in ("clip", "captioner"))
    for changes, message in (
        (dict(encoder=clip), r"`encoder` .* has no effect with the recipe drawn"),
        (dict(decoder="gpt"), "`decoder` gpt has no effect with the recipe drawn"),
        (
            dict(encoder=clip, freeze_encoder=True, start=(f"{clip},into=encoder",)),
            "`freeze_encoder` has no effect",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(config_of("captioner", **changes), tmp_path / "run")
    config = tasks.configure("captioning", "fine_tune", start=(captioner,), batch_size=8, steps=1)
    with pytest.raises(UserError, match=r"`encoder` .* has no effect with the recipe fine_tune"):
        train(config.with_values(encoder=clip), tmp_path / "run")


def test_a_complete_model_is_fine_tuned(trained, tmp_path):
    for case in ("clip", "captioner"):
        folder, _ = trained(case)
        config = tasks.configure(
            CASES[case][0], "fine_tune", start=(str(folder),), batch_size=8, steps=1, learning_rate=0.0
        )
        train(config, tmp_path / case)
        expected = named_leaves(tasks.load(folder).model)
        for name, leaf in named_leaves(tasks.load(tmp_path / case).model).items():
            np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "clip",
            dict(batch_size=1),
            "`batch_size` 1: each image is compared with the other texts of its batch",
        ),
        ("clip", dict(batch_size=1_000), "`batch_size` 1000 exceeds the 672 training images"),
        (
            "captioner",
            dict(max_caption_length=40),
            "`max_caption_length` 40 is above the model's `max_length` 32",
        ),
        ("captioner", dict(freeze_encoder=True), "`freeze_encoder` needs a trained `encoder`"),
        ("clip", dict(valid=("a", "b")), "`valid` and `test` need `data`"),
        ("clip", dict(crop=0.0), "`crop` 0.0 must be above 0"),
    ],
)
def test_values_that_cannot_be(case, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(config_of(case, **changes), tmp_path / "run")
