"""The commands classify_images and self_distill as users run them, and their one-line errors."""

import io
import json
import re
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.commands.in_process import call, error_line, json_lines, succeed
from transformer_jax import load
from transformer_jax.commands import classify_images, self_distill
from transformer_jax.data.corpora.images import digits

STEPS = ("--batch-size", 8, "--steps", 4, "--save-every", 4, "--evaluate-every", 4, "--optimizer", "adam")
SIZES = ("--preset", "mini", "--width", 16, "--layers", 1, "--heads", 2, "--feed-forward", 16)
VIT = (*SIZES, "--convolutions", 0, "--pooling", "class", *STEPS)


def write_digits(folder, classes=("one", "two"), count=6):
    """Write images of digits, one subfolder per class, and return the folder."""
    images, _ = digits()
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for n in np.flatnonzero(images.labels == number)[:count]:
            Image.fromarray(images[n]).save(folder / name / f"{n}.png")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("images") / "set")


@pytest.fixture(scope="module")
def training(data, tmp_path_factory):
    """Train a run, and return its folder and the completed command."""
    folder = tmp_path_factory.mktemp("runs") / "classes"
    return folder, succeed(classify_images, *VIT, "--data", data, "--test", data, "--run-dir", folder)


@pytest.fixture(scope="module")
def run(training):
    return training[0]


def test_a_run_has_its_results_and_pictures(run):
    results = json.loads((run / "results.json").read_text())
    assert {"top1", "top5", "parameters", "images_per_second", "calibration_error"} <= set(results)
    assert results["top5"] == 100
    assert np.sum(results["confusion"]["set"]) == 12
    assert (run / "confusion_set.png").stat().st_size > 3_000


def test_images_are_classified(run, data, tmp_path):
    files = sorted(map(str, data.rglob("*.png")))[:3]
    outputs = json_lines(classify_images, "--run-dir", run, "--images", *files)
    assert [output["file"] for output in outputs] == files
    trained = load(run)
    # The processor of the second run resizes images to 16 pixels, although its model has size 8.
    resized_run = tmp_path / "larger"
    shutil.copytree(run, resized_run)
    settings = resized_run / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"height": 8', '"height": 16').replace(": 8\n", ": 16\n"))
    description = json.loads((resized_run / "config.json").read_text())
    description |= {"files": list(description["files"]), "sha256": ""}  # without digests, as in older runs
    (resized_run / "config.json").write_text(json.dumps(description))
    for folder, size, pixels in ((run, None, 8), (run, 16, 16), (resized_run, None, 16), (resized_run, 0, 8)):
        size_flags = () if size is None else ("--size", size)
        outputs = json_lines(classify_images, "--run-dir", folder, *size_flags, "--images", *files)
        trained = trained.at_size(pixels)
        for output, expected in zip(outputs, trained.classify(files), strict=True):
            assert output["label"] == expected.label
            assert output["probability"] == pytest.approx(expected.probabilities[expected.label], abs=1e-5)
    negative = ("--run-dir", run, "--size", -8, "--images", *files)
    assert "--size -8 is below 0" in error_line(classify_images, *negative)
    maps, page = tmp_path / "maps.png", tmp_path / "page.html"
    completed = call(
        classify_images.main, "--run-dir", run, "--images", *files, "--plot-attention", maps, "--html", page
    )
    assert completed.stdout.startswith(f"{files[0]}: ")
    assert maps.stat().st_size > 5_000
    assert "const DATA = {" in page.read_text()


def test_images_of_other_modes_are_converted(run, tmp_path):
    images, _ = digits()
    image = Image.fromarray(images[0])
    for mode, name in (("L", "a.png"), ("RGBA", "b.png"), ("CMYK", "c.jpg"), ("P", "d.gif")):
        image.convert(mode).save(tmp_path / name)
    Image.fromarray(images[0][..., 0].astype(np.uint16) * 256).save(tmp_path / "e.png")
    files = sorted(map(str, tmp_path.iterdir()))
    completed = call(classify_images.main, "--run-dir", run, "--images", *files, "--json")
    assert len(completed.stdout.splitlines()) == 5, completed.stderr
    notes = [line.partition(": ")[2] for line in completed.stderr.splitlines() if "converted" in line]
    assert notes == [f"{mode}, converted to RGB" for mode in ("gray", "alpha", "CMYK", "P", "16-bit")]


@pytest.mark.long
def test_pretraining_and_probes(data, tmp_path):
    head = ("--prototypes", 11, "--projection-hidden", 8, "--bottleneck", 6)
    for method, model_flags in (("dino", head), ("mae", ("--decoder-width", 8, "--decoder-heads", 2))):
        folder = tmp_path / method
        folders = ("--data", data, "--test", data, "--run-dir", folder)
        succeed(self_distill, "--method", method, *VIT, *model_flags, *folders)
        results = json.loads((folder / "results.json").read_text())
        assert 0 <= results["knn_accuracy"] <= 100
        assert ("teacher_entropy" in results) == (method == "dino")
        assert ("prototype_entropy" in results) == (method == "dino")
        assert {"pixels_knn_accuracy", "untrained_knn_accuracy"} <= set(results)
    start = ("--start-from", tmp_path / "dino", "--data", data, "--test", data)
    succeed(classify_images, *start, "--probe", "knn", "--run-dir", tmp_path / "knn")
    knn = json.loads((tmp_path / "knn" / "results.json").read_text())["knn_accuracy"]
    assert knn == json.loads((tmp_path / "dino" / "results.json").read_text())["knn_accuracy"]
    for path in (write_digits(tmp_path / "grayscale") / "one").glob("*.png"):
        Image.open(path).convert("L").save(path)
    flags = (
        "--start-from",
        tmp_path / "dino",
        "--data",
        tmp_path / "grayscale",
        "--test",
        tmp_path / "grayscale",
    )
    completed = succeed(
        classify_images, *flags, "--probe", "knn", "--size", 16, "--run-dir", tmp_path / "larger"
    )
    assert "converted to RGB: 5 gray" in completed.stdout, "one image of six is held out"
    assert "converted to RGB: 6 gray" in completed.stdout, "the test set"
    assert "2 classes: top5 counts all of them" in completed.stdout
    steps = ("--steps", 4, "--batch-size", 4, "--save-every", 4, "--evaluate-every", 4)
    completed = succeed(classify_images, *start, *steps, "--probe", "linear", "--run-dir", tmp_path / "linear")
    assert "top-1" in completed.stdout


def test_flags_that_contradict_each_other(data, run, tmp_path):
    file = next(data.rglob("*.png"))
    nowhere = tmp_path / "no" / "a.png"
    for flags, message in (
        (("--probe", "knn"), "--probe.*--start"),
        (
            ("--start-from", run, "--recipe", "fine_tune", "--probe", "linear"),
            "--probe linear trains only a classifier",
        ),
        (("--plot-attention", "a.png"), "name them with --images"),
        (("--images", "a.png"), "--run-dir"),
        (("--run-dir", run, "--images", tmp_path / "no.png"), "cannot be read"),
        (("--run-dir", run, "--images", file, "--plot-attention", nowhere), "the picture cannot be written"),
        (("--model", "resnet"), "unknown model 'resnet'.*vit"),
        (("--preset", "mni"), "did you mean mini?"),
        ((*VIT, "--patch-size", 3), "must be a multiple of patch_size 3"),
        ((*VIT, "--size", 9), "--size 9 is no multiple of --patch-size 2"),
        (
            ("--start-from", run, "--data", data, "--probe", "knn", "--size", 9),
            "--size 9 is no multiple of --patch-size 2",
        ),
        (("--start-from", data), "config.json: no such file"),
        (("--randaugment", 1, "--magnitude", 25), "--magnitude 25.0 is above 10"),
    ):
        error = error_line(classify_images, *flags)
        assert re.search(message, error), error
    error = error_line(self_distill, "--method", "simclr")
    assert re.search("unknown method 'simclr'.*dino, mae", error), error


def test_images_that_cannot_be_trained_on(data, tmp_path):
    def check_error(path, message, test=None):
        data_flags = ("--data", path) if test is None else ("--data", path, "--test", test)
        assert message in error_line(classify_images, *VIT, *data_flags, "--run-dir", tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()

    check_error(tmp_path / "none", "no such folder or archive")
    check_error(write_digits(tmp_path / "single", ("one",)), "one folder")
    other_classes = write_digits(tmp_path / "other", ("one", "three"))
    check_error(data, "the class 'three' was not in training", test=other_classes)
    empty = write_digits(tmp_path / "empty")
    (empty / "three").mkdir()
    check_error(empty, "the class folder 'three' has no images")
    damaged = write_digits(tmp_path / "damaged")
    (damaged / "one" / "x.png").write_bytes(b"")
    check_error(damaged, "one/x.png: an empty file is not an image")
    content = next((data / "one").glob("*.png")).read_bytes()
    (damaged / "one" / "x.png").write_bytes(content[: len(content) // 2])
    check_error(damaged, "truncated or damaged")
    bomb = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(bomb, "PNG")
    (damaged / "one" / "x.png").write_bytes(bomb.getvalue())
    check_error(damaged, "more pixels than the limit of 100,000,000")
    with tarfile.open(tmp_path / "out.tar", "w") as file:
        file.addfile(tarfile.TarInfo("../a/b.png"))
    check_error(tmp_path / "out.tar", "leads out of the archive")
    np.savez(tmp_path / "set.npz", images=np.zeros((4, 8, 8, 3), np.uint8), labels=[0, 1, 5, -2])
    check_error(tmp_path / "set.npz", "labels from -2 to 5")


def test_fewer_than_five_classes_are_noted(training):
    assert "2 classes: top5 counts all of them" in training[1].stderr


@pytest.mark.soak
def test_a_start_of_another_size(run, data, tmp_path):
    steps = ("--steps", 2, "--batch-size", 4, "--save-every", 2, "--evaluate-every", 2)
    start = ("--start-from", run, "--data", data)
    succeed(classify_images, *start, "--size", 12, *steps, "--run-dir", tmp_path / "run")
    error = error_line(classify_images, *start, "--patch-size", 4, "--run-dir", tmp_path / "other")
    assert re.search("--start.*patch_size is 2 there, not 4", error), error


@pytest.mark.parametrize("command", [classify_images, self_distill])
def test_help_names_the_flags(command):
    completed = call(command.main, "--help")
    assert completed.returncode == 0
    for flag in ("--data", "--test", "--preset", "--run-dir", "--image-size", "--workers"):
        assert flag in completed.stdout
