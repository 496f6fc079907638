"""The commands contrast and caption as users run them, and their one-line errors."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.commands.in_process import call, error_line, json_lines, succeed
from transformer_jax import load
from transformer_jax.commands import caption, contrast
from transformer_jax.data.corpora.scenes import scenes

STEPS = ("--batch-size", 8, "--steps", 2, "--save-every", 2, "--evaluate-every", 2)
VIT = ("--preset", "mini", "--width", 16, "--layers", 1, "--heads", 2, "--feed-forward", 16, "--patch-size", 8)
CLIP = (*VIT, *STEPS, "--text-width", 16, "--text-layers", 1, "--text-heads", 2, "--embedding-width", 8)
CAPTIONER = (*VIT, *STEPS, "--decoder-width", 16, "--decoder-layers", 1, "--decoder-heads", 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a table of scenes beside their images, and return both paths."""
    folder = tmp_path_factory.mktemp("scenes")
    train, _, _ = scenes()
    rows = ["image\tcaption"]
    (folder / "images").mkdir()
    for number in range(20):
        Image.fromarray(train.images[number]).save(folder / "images" / f"{number}.png")
        rows += [f"{number}.png\t{text}" for text in train.captions[number]]
    Image.new("RGB", (8, 8)).save(folder / "images" / "unused.png")
    (folder / "table.tsv").write_text("\n".join(rows) + "\n")
    return folder / "table.tsv", folder / "images"


@pytest.fixture(scope="module")
def clip(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "clip"
    return folder, succeed(contrast, *CLIP, "--data", *data, "--test", *data, "--run-dir", folder)


@pytest.fixture(scope="module")
def captioner(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "captioner"
    return folder, succeed(
        caption, *CAPTIONER, "--data", *data, "--valid", *data, "--test", *data, "--run-dir", folder
    )


def files_of(data, count=3):
    return [str(data[1] / f"{number}.png") for number in range(count)]


def test_contrast_reports_recalls_and_unused_images(clip):
    folder, completed = clip
    results = json.loads((folder / "results.json").read_text())
    names = {f"{d}_recall_at_{k}" for d in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert names <= set(results)
    assert all(0 <= results[name] <= 100 for name in names)
    assert "1 images of" in completed.stderr
    assert "have no caption and are left out" in completed.stderr
    assert "image to text  R@1" in completed.stdout


def test_images_are_classified_and_found(clip, data):
    folder, _ = clip
    files, run = files_of(data), load(clip[0])
    flags = ("--run-dir", folder, "--images", *files)
    outputs = json_lines(contrast, *flags, "--labels", "red circle", "blue star", "--templates", "a {}")
    expected = run.classify(files, ["red circle", "blue star"], templates=["a {}"])
    for output, file, prediction in zip(outputs, files, expected, strict=True):
        assert (output["file"], output["label"]) == (file, prediction.label)
        assert output["probability"] == pytest.approx(prediction.probabilities[prediction.label], abs=1e-5)
    outputs = json_lines(contrast, *flags, "--text", "a red circle")
    similarity = run.similarity(files, ["a red circle"])[:, 0]
    assert [output["file"] for output in outputs] == [files[n] for n in np.argsort(-similarity)]
    assert call(contrast.main, *flags, "--text", "a red circle").stdout.count("\n") == 3


def test_captions_are_printed_and_drawn(captioner, data, tmp_path):
    folder, completed = captioner
    results = json.loads((folder / "results.json").read_text())
    assert {"bleu1", "bleu2", "bleu3", "bleu4", "cider", "cider_shuffled"} <= set(results)
    assert "CIDEr-D" in completed.stdout
    files = files_of(data)
    outputs = json_lines(caption, "--run-dir", folder, "--images", *files)
    assert [output["caption"] for output in outputs] == load(folder).caption(files)
    assert [output["file"] for output in outputs] == files
    words, page = tmp_path / "words.png", tmp_path / "page.html"
    completed = call(
        caption.main, "--run-dir", folder, "--images", *files, "--beam-size", 2, "--plot-attention", words,
        "--html", page,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(f"{files[0]}: ")
    assert words.stat().st_size > 5_000
    assert '"words": [' in page.read_text()


def test_a_captioner_starts_from_the_image_encoder_of_a_clip(clip, data, tmp_path):
    flags = ("--encoder", clip[0], "--freeze-encoder", "--data", *data, *STEPS, "--run-dir", tmp_path / "run")
    completed = succeed(
        caption, *flags, "--decoder-width", 16, "--decoder-layers", 1, "--decoder-heads", 2,
        "--decoder-feed-forward", 16, "--vocab-size", 300,
    )  # fmt: skip
    assert f"starting from {clip[0]}" in completed.stderr
    assert load(tmp_path / "run").model.config.width == 16


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (contrast, ("--images", "--run-dir", "x"), "--images names no image"),
        (caption, ("--run-dir", "x", "--images"), "--images names no image"),
        (contrast, ("--images", "a.png"), "name the trained run with --run-dir"),
        (contrast, ("--images", "a.png", "--run-dir", "x"), "--images needs either --labels"),
        (contrast, ("--labels", "a", "b"), "--labels and --text need --images"),
        (contrast, ("--batch-size", 1), "--batch-size 1: each image is compared with the other texts"),
        (contrast, ("--data", "one.tsv"), "captioned images are a table and a folder or archive"),
        (contrast, ("--data", "one.tsv", "images"), "one.tsv: no such file"),
        (contrast, ("--accumulation", 2), "--accumulation 2"),
        (caption, ("--images", "a.png"), "name the trained run with --run-dir"),
        (caption, ("--plot-attention", "a.png"), "--plot-attention and --html need --images"),
        (
            caption,
            ("--images", "a.png", "--run-dir", "x", "--plot-attention", "absent/words.png"),
            "--plot-attention 'absent/words.png': no file can be written there",
        ),
        (caption, ("--encoder", "absent"), "absent/config.json: no such file"),
        (caption, ("--freeze-encoder",), "--freeze-encoder needs a trained --encoder"),
        (caption, ("--images", "a.png", "--run-dir", "absent"), "absent"),
        (caption, ("--images", "a.png", "--run-dir", "x", "--steps", 3), "--steps has no effect"),
    ],
)
def test_flags_that_cannot_be(command, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_line(command, *flags)


def test_data_that_does_not_fit(data, tmp_path):
    table, images = data
    text = table.read_text()
    for changed, message in (
        (text.replace("3.png\t", "absent.png\t", 1), "no image 'absent.png' in"),
        (text + "3.png\t \n", "the caption of 3.png has no letters or digits"),
        (text.replace("caption", "words", 1), "no column caption"),
    ):
        (tmp_path / "table.tsv").write_text(changed)
        for command, flags in ((contrast, CLIP), (caption, CAPTIONER)):
            line = error_line(
                command, *flags, "--data", tmp_path / "table.tsv", images, "--run-dir", tmp_path / "run"
            )
            assert message in line
    few = error_line(contrast, *CLIP, "--batch-size", 64, "--data", *data, "--run-dir", tmp_path / "few")
    assert "--batch-size 64 exceeds the 18 training images" in few


def test_other_models_and_images_are_refused(clip, captioner, data, tmp_path):
    (file,) = files_of(data, 1)
    assert "holds a Clip, not a captioner" in error_line(caption, "--run-dir", clip[0], "--images", file)
    labels = ("--labels", "a", "b")
    message = error_line(contrast, "--run-dir", captioner[0], "--images", file, *labels)
    assert "holds a Captioner, not a model of images and texts" in message
    assert "two or more labels" in error_line(contrast, "--run-dir", clip[0], "--images", file, "--labels", "a")
    for command, flag, folder, kind in (
        (caption, "start-from", clip[0], "Clip: this needs a model of captioner"),
        (contrast, "start-from", captioner[0], "Captioner: this needs a model of clip, siglip"),
        (caption, "decoder", clip[0], "Clip: this needs a model of gpt"),
    ):
        line = error_line(command, "--data", *data, f"--{flag}", folder, "--run-dir", tmp_path / "new")
        assert f"--{flag.removesuffix('-from')} {folder} holds a {kind}" in line
    (tmp_path / "broken.png").write_bytes(b"no image")
    for command, folder, flags in ((caption, captioner[0], ()), (contrast, clip[0], labels)):
        for name in ("broken.png", "absent.png"):
            line = error_line(command, "--run-dir", folder, "--images", tmp_path / name, *flags)
            assert name in line


def test_long_captions_are_truncated_and_counted(data, tmp_path):
    table = tmp_path / "long.tsv"
    table.write_text(data[0].read_text() + "3.png\t" + "a red circle " * 40 + "\n")
    completed = succeed(contrast, *CLIP, "--data", table, data[1], "--run-dir", tmp_path / "run")
    assert "1 of 55 captions for training are truncated" in completed.stderr
    assert "are truncated to 32 tokens" in completed.stderr
