"""classify_images and self_distill as users run them, and the line that answers each bad input."""

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.commands.in_process import call
from transformer_jax import load
from transformer_jax.commands import classify_images, self_distill
from transformer_jax.data.corpora.images import digits

STEPS = ("--batch-size", 8, "--steps", 4, "--save-every", 4, "--evaluate-every", 4, "--optimizer", "adam")
SIZES = ("--preset", "mini", "--width", 16, "--layers", 1, "--heads", 2, "--feed-forward", 16)
VIT = (*SIZES, "--convolutions", 0, "--pooling", "class", *STEPS)


def written(place, classes=("one", "two"), count=6):
    """A folder of digits with a folder for each class."""
    images, _ = digits()
    for number, name in enumerate(classes):
        own = np.flatnonzero(images.labels == number)[:count]
        (place / name).mkdir(parents=True)
        for n in own:
            Image.fromarray(images[n]).save(place / name / f"{n}.png")
    return place


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return written(tmp_path_factory.mktemp("images") / "set")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "classes"
    ended = call(classify_images.main, *VIT, "--data", data, "--test", data, "--run-dir", folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def one_line(ended, *words):
    assert ended.returncode == 2, ended.stdout + ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_a_run_has_its_results_and_pictures(run):
    results = json.loads((run / "results.json").read_text())
    assert {"top1", "top5", "parameters", "images_per_second", "calibration_error"} <= set(results)
    assert results["top5"] == 100
    assert np.sum(results["confusion"]["set"]) == 12
    assert (run / "confusion_set.png").stat().st_size > 3_000


def test_images_are_classified(run, data, tmp_path):
    files = sorted(map(str, data.rglob("*.png")))[:3]
    ended = call(classify_images.main, "--run-dir", run, "--images", *files, "--json")
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [one["file"] for one in found] == files
    trained = load(run)
    own = tmp_path / "larger"  # a run that reads images in another size than its model's, 8
    shutil.copytree(run, own)
    settings = own / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"height": 8', '"height": 16').replace(": 8\n", ": 16\n"))
    for folder, size, pixels in ((run, None, 8), (run, 16, 16), (own, None, 16), (own, 0, 8)):
        given = () if size is None else ("--size", size)
        ended = call(classify_images.main, "--run-dir", folder, *given, "--images", *files, "--json")
        found = [json.loads(line) for line in ended.stdout.splitlines()]
        trained = trained.at_size(pixels)
        for one, known in zip(found, trained.classify(files), strict=True):
            assert one["label"] == known.label
            assert one["probability"] == pytest.approx(known.probabilities[known.label], abs=1e-5)
    one_line(
        call(classify_images.main, "--run-dir", run, "--size", -8, "--images", *files), "--size -8 is below 0"
    )
    maps, page = tmp_path / "maps.png", tmp_path / "page.html"
    ended = call(
        classify_images.main, "--run-dir", run, "--images", *files, "--plot-attention", maps, "--html", page
    )
    assert ended.stdout.startswith(f"{files[0]}: ")
    assert maps.stat().st_size > 5_000
    assert "const DATA = {" in page.read_text()


def test_other_kinds_of_files_are_converted(run, tmp_path):
    images, _ = digits()
    image = Image.fromarray(images[0])
    for kind, name in (("L", "a.png"), ("RGBA", "b.png"), ("CMYK", "c.jpg"), ("P", "d.gif")):
        image.convert(kind).save(tmp_path / name)
    Image.fromarray(images[0][..., 0].astype(np.uint16) * 256).save(tmp_path / "e.png")
    files = sorted(map(str, tmp_path.iterdir()))
    ended = call(classify_images.main, "--run-dir", run, "--images", *files, "--json")
    assert len(ended.stdout.splitlines()) == 5, ended.stderr
    kinds = [line.partition(": ")[2] for line in ended.stderr.splitlines() if "converted" in line]
    named = ("grey", "alpha", "CMYK", "P", "16-bit")
    assert kinds == [f"{kind}, converted to RGB" for kind in named]


@pytest.mark.long
def test_pretraining_and_probes(data, tmp_path):
    head = ("--prototypes", 11, "--projection-hidden", 8, "--bottleneck", 6)
    for method, own in (("dino", head), ("mae", ("--decoder-width", 8, "--decoder-heads", 2))):
        folder = tmp_path / method
        ended = call(
            self_distill.main,
            "--method",
            method,
            *VIT,
            *own,
            "--data",
            data,
            "--test",
            data,
            "--run-dir",
            folder,
        )
        assert ended.returncode == 0, ended.stderr
        results = json.loads((folder / "results.json").read_text())
        assert 0 <= results["knn_accuracy"] <= 100
        assert ("teacher_entropy" in results) == (method == "dino")
        assert ("prototype_entropy" in results) == (method == "dino")
        assert {"pixels_knn_accuracy", "untrained_knn_accuracy"} <= set(results)
    start = ("--start-from", tmp_path / "dino", "--data", data, "--test", data)
    ended = call(classify_images.main, *start, "--probe", "knn", "--run-dir", tmp_path / "knn")
    assert ended.returncode == 0, ended.stderr
    knn = json.loads((tmp_path / "knn" / "results.json").read_text())["knn_accuracy"]
    assert knn == json.loads((tmp_path / "dino" / "results.json").read_text())["knn_accuracy"]
    for one in (written(tmp_path / "grey") / "one").glob("*.png"):
        Image.open(one).convert("L").save(one)
    grey = ("--start-from", tmp_path / "dino", "--data", tmp_path / "grey", "--test", tmp_path / "grey")
    ended = call(classify_images.main, *grey, "--probe", "knn", "--size", 16, "--run-dir", tmp_path / "larger")
    assert ended.returncode == 0, ended.stderr
    assert "converted to RGB: 5 grey" in ended.stdout, "one of six is held out"
    assert "converted to RGB: 6 grey" in ended.stdout, "of the test set"
    assert "2 classes: top5 counts all of them" in ended.stdout
    steps = ("--steps", 4, "--batch-size", 4, "--save-every", 4, "--evaluate-every", 4)
    ended = call(classify_images.main, *start, *steps, "--probe", "linear", "--run-dir", tmp_path / "linear")
    assert ended.returncode == 0, ended.stderr
    assert "top-1" in ended.stdout


def test_flags_that_contradict_each_other(data, run, tmp_path):
    one_line(call(classify_images.main, "--probe", "knn"), "--probe", "--start")
    both = ("--start-from", run, "--recipe", "fine_tune", "--probe", "linear")
    one_line(call(classify_images.main, *both), "--probe linear trains a classifier alone")
    one_line(call(classify_images.main, "--plot-attention", "a.png"), "name them with --images")
    one_line(call(classify_images.main, "--images", "a.png"), "--run-dir")
    one_line(call(classify_images.main, "--run-dir", run, "--images", tmp_path / "no.png"), "cannot be read")
    file = next(data.rglob("*.png"))
    nowhere = call(
        classify_images.main, "--run-dir", run, "--images", file, "--plot-attention", tmp_path / "no" / "a.png"
    )
    assert nowhere.returncode == 2
    assert "the picture cannot be written" in nowhere.stderr
    one_line(call(classify_images.main, "--model", "resnet"), "unknown model 'resnet'", "vit")
    one_line(call(classify_images.main, "--preset", "mni"), "did you mean mini?")
    one_line(call(self_distill.main, "--method", "simclr"), "unknown method 'simclr'", "dino, mae")
    one_line(call(classify_images.main, *VIT, "--patch-size", 3), "must be a multiple of patch_size 3")
    one_line(call(classify_images.main, *VIT, "--size", 9), "--size 9 is no multiple of --patch-size 2")
    neighbours = call(classify_images.main, "--start-from", run, "--data", data, "--probe", "knn", "--size", 9)
    one_line(neighbours, "--size 9 is no multiple of --patch-size 2")
    one_line(call(classify_images.main, "--start-from", data), "config.json: no such file")
    one_line(call(classify_images.main, "--operations", 1, "--magnitude", 25), "--magnitude 25.0 is above 10")


def test_images_that_cannot_be_trained_on(data, tmp_path):
    def refused(place, *words, test=None):
        named = ("--data", place) if test is None else ("--data", place, "--test", test)
        one_line(call(classify_images.main, *VIT, *named, "--run-dir", tmp_path / "run"), *words)
        assert not (tmp_path / "run" / "config.json").exists()

    refused(tmp_path / "none", "no such folder or archive")
    refused(written(tmp_path / "single", ("one",)), "one folder")
    refused(data, "the class 'three' was not in training", test=written(tmp_path / "other", ("one", "three")))
    empty = written(tmp_path / "empty")
    (empty / "three").mkdir()
    refused(empty, "the class folder 'three' has no images")
    damaged = written(tmp_path / "damaged")
    (damaged / "one" / "x.png").write_bytes(b"")
    refused(damaged, "one/x.png: a file of no bytes")
    whole = (data / "one").glob("*.png").__next__().read_bytes()
    (damaged / "one" / "x.png").write_bytes(whole[: len(whole) // 2])
    refused(damaged, "cut short or damaged")
    bomb = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(bomb, "PNG")
    (damaged / "one" / "x.png").write_bytes(bomb.getvalue())
    refused(damaged, "more than the 100,000,000 pixels")
    with tarfile.open(tmp_path / "out.tar", "w") as file:
        file.addfile(tarfile.TarInfo("../a/b.png"))
    refused(tmp_path / "out.tar", "leads out of the archive")
    np.savez(tmp_path / "set.npz", images=np.zeros((4, 8, 8, 3), np.uint8), labels=[0, 1, 5, -2])
    refused(tmp_path / "set.npz", "labels from -2 to 5")


def test_fewer_classes_than_five_are_said(data, tmp_path):
    ended = call(classify_images.main, *VIT, "--data", data, "--run-dir", tmp_path / "run")
    assert "2 classes: top5 counts all of them" in ended.stderr


@pytest.mark.long
def test_another_size_than_the_starts(run, data, tmp_path):
    steps = ("--steps", 2, "--batch-size", 4, "--save-every", 2, "--evaluate-every", 2)
    start = ("--start-from", run, "--data", data)
    ended = call(classify_images.main, *start, "--size", 12, *steps, "--run-dir", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    ended = call(classify_images.main, *start, "--patch-size", 4, "--run-dir", tmp_path / "other")
    one_line(ended, "--start", "patch_size is 2 there, not 4")


@pytest.mark.parametrize("command", [classify_images, self_distill])
def test_help_names_the_flags(command):
    ended = call(command.main, "--help")
    assert ended.returncode == 0
    for flag in ("--data", "--test", "--preset", "--run-dir", "--image-size", "--workers"):
        assert flag in ended.stdout
