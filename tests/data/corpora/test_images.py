"""Images of every kind from folders, archives, arrays and TensorFlow Datasets, and what cannot be read."""

import io
import pathlib
import pickle
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from transformer_jax.data.corpora import image_files, images
from transformer_jax.data.corpora.image_archives import splits_of
from transformer_jax.data.corpora.image_files import decoded, image_array
from transformer_jax.data.corpora.image_sets import ImageSet, stratified
from transformer_jax.data.corpora.images import digits, open_images
from transformer_jax.errors import UserError
from transformer_jax.pretrained.tensor_files import ArrayFile


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(number=0, size=(5, 4)):
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(256, size=(size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Two classes of three images each, with files that are none."""
    for number in range(6):
        path = tmp_path / "set" / "train" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number)))
    (tmp_path / "set" / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "set" / "train" / "cat" / ".hidden.png").write_text("no image")
    return tmp_path / "set"


def archives(folder: pathlib.Path) -> dict[str, str]:
    """The folder as archives of every kind."""
    found = {}
    for ending, mode in ((".tar", "w"), (".tar.gz", "w:gz"), (".tar.xz", "w:xz")):
        path = folder.parent / f"set{ending}"
        with tarfile.open(path, mode) as file:
            file.add(folder / "train", "train")
        found[ending] = str(path)
    with zipfile.ZipFile(folder.parent / "set.zip", "w") as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, path.relative_to(folder).as_posix())
    return found | {".zip": str(folder.parent / "set.zip")}


def test_a_folder_and_archives_hold_the_same(folder):
    for place in (str(folder), *archives(folder).values()):
        found = open_images(place)
        assert found.classes == ("cat", "dog")
        assert len(found) == 6
        by_name = {name.rpartition("/")[2]: n for n, name in enumerate(found.names)}
        for number in range(6):
            own = by_name[f"{number}.png"]
            assert found.labels[own] == number % 2
            np.testing.assert_array_equal(found[own], np.asarray(picture(number)))


def test_folders_inside_class_folders(folder):
    """Belong to their class, however deep."""
    (folder / "train" / "cat").rename(folder / "train" / "old")
    (folder / "train" / "cat").mkdir()
    (folder / "train" / "old").rename(folder / "train" / "cat" / "2026")
    found = open_images(str(folder))
    assert found.classes == ("cat", "dog")
    assert [found.classes[n] for n in found.labels] == ["cat"] * 3 + ["dog"] * 3


def test_images_in_a_class_folder_and_in_folders_inside(folder):
    (folder / "train" / "cat" / "2026").mkdir()
    (folder / "train" / "cat" / "0.png").rename(folder / "train" / "cat" / "2026" / "0.png")
    for hidden in (".ipynb_checkpoints", "@eaDir"):
        (folder / "train" / hidden).mkdir()
        (folder / "train" / hidden / "copy.png").write_bytes(encoded(picture()))
    found = open_images(str(folder))
    assert (found.classes, len(found)) == (("cat", "dog"), 6)
    (folder / "train" / "alone.png").write_bytes(encoded(picture()))
    with pytest.raises(UserError, match=r"train/alone\.png lies beside the class folders"):
        open_images(str(folder))


def test_class_folders_whose_images_lie_one_deeper(folder):
    """A folder beside the classes must have images, one inside a class need not; `@home` is a class."""
    for name in ("cat", "dog"):
        (folder / "train" / name / "images").mkdir()
        for path in (folder / "train" / name).glob("[0-9].png"):
            path.rename(path.parent / "images" / path.name)
    (folder / "train" / "cat" / "old").mkdir()
    (folder / "train" / ".git" / "objects").mkdir(parents=True)
    (folder / "train" / "@home").mkdir()
    (folder / "train" / "@home" / "0.png").write_bytes(encoded(picture()))
    for place in (str(folder), *archives(folder).values()):
        assert open_images(place).classes == ("@home", "cat", "dog")
    (folder / "train" / "fish" / "images").mkdir(parents=True)
    for place in (str(folder), *archives(folder).values()):
        with pytest.raises(UserError, match="the class folder 'train/fish' has no images"):
            open_images(place)


@pytest.mark.parametrize(
    ("first", "second"),
    [("train/1_cat", "test/2_dog"), ("train/cat/2026/1", "test/cat/2026/2"), ("cat/train/1", "cat/test/2")],
)
def test_splits_side_by_side_are_no_classes(tmp_path, first, second):
    for number, name in enumerate((first, second)):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(picture(number)))
    with pytest.raises(UserError, match="holds test, train side by side"):
        open_images(str(tmp_path))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_links_in_a_tar(tmp_path, mode):
    """A second name of a file is an image too; what points elsewhere is refused."""
    path = tmp_path / "set.tar"
    content = encoded(picture(3))

    def written(*links):
        with tarfile.open(path, mode) as file:
            for name in ("a/0.png", "b/0.png"):
                own = tarfile.TarInfo(name)
                own.size = len(content)
                file.addfile(own, io.BytesIO(content))
            for name, target, kind in links:
                own = tarfile.TarInfo(name)
                own.linkname, own.type = target, kind
                file.addfile(own)

    written(("c/0.png", "a/0.png", tarfile.LNKTYPE))
    found = open_images(str(path))
    assert found.classes == ("a", "b", "c")
    np.testing.assert_array_equal(found[2], np.asarray(picture(3)))
    written(("c/0.png", "../a/0.png", tarfile.SYMTYPE))
    with pytest.raises(UserError, match=r"c/0\.png is a link to \.\./a/0\.png"):
        open_images(str(path))


def test_a_name_that_is_no_utf_8(tmp_path):
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as file:
        for name in ("caf\xe9/0.png", "tea/0.png"):
            file.addfile(tarfile.TarInfo(name))
    with pytest.raises(UserError, match="is not UTF-8: rename it"):
        open_images(str(path))


def test_photos_named_by_their_time_have_no_classes(tmp_path):
    for second in range(10, 14):
        (tmp_path / f"20260704_1530{second}.jpg").write_bytes(encoded(picture(second), "JPEG"))
    assert open_images(str(tmp_path), labelled=False).classes == ("",)


def test_classes_of_numbered_names_and_of_training(tmp_path):
    (tmp_path / "true").mkdir()
    for number, name in enumerate(("dog", "cat", "dog")):
        (tmp_path / "true" / f"{number:05}_{name}.png").write_bytes(encoded(picture(number)))
    found = open_images(str(tmp_path / "true"), classes=("bird", "cat", "dog"))
    assert found.labels.tolist() == [2, 1, 2]
    with pytest.raises(UserError, match="the class 'dog' was not in training, which has bird, cat"):
        open_images(str(tmp_path / "true"), classes=("bird", "cat"))
    (tmp_path / "true" / "other.png").write_bytes(encoded(picture()))
    with pytest.raises(UserError, match="all images are in one folder; classes need a folder each"):
        open_images(str(tmp_path / "true"))


def test_arrays(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(4, 6, 5), dtype=np.uint8)
    path = str(tmp_path / "set.npz")
    np.savez(path, x_train=pixels, y_train=[0, 1, 1, 0], x_test=pixels[:2], y_test=[1, 2])
    assert splits_of(path) == ("train", "test")
    found = open_images(path)
    assert found[1].shape == (6, 5, 3)
    np.testing.assert_array_equal(found[1][..., 2], pixels[1])
    with pytest.raises(UserError, match="the class '2' was not in training"):
        open_images(path, split="test", classes=found.classes)
    np.savez(path, x_train=pixels, y_train=[0, 1, 2, 0], x_test=pixels[:2], y_test=[2, 0])
    test = open_images(path, split="test", classes=open_images(path).classes)
    assert (test.classes, test.labels.tolist()) == (("0", "1", "2"), [2, 0])
    for changes, message in (
        (dict(images=pixels.astype(float), labels=[0] * 4), "give uint8"),
        (dict(images=pixels, labels=[0, 1]), "4 images and 2 labels"),
        (dict(images=pixels, labels=[0, 1, 2, -1]), "labels from -1 to 2"),
        (dict(images=pixels, labels=[0, 1, 10**9, 1]), "labels from 0 to 1000000000, of which there are 3"),
        (dict(images=pixels, labels=[0, 1, 3, 1]), "each has an image"),
        (dict(images=pixels, labels=[0, 1, 2, 3], classes=["a", "b"]), "where there are 2 classes"),
        (dict(images=pixels, labels=[0.0, 1.0, 2.0, 3.0]), "labels are numbers of classes"),
        (dict(pixels=pixels), "images are `images` and `labels`"),
    ):
        np.savez(path, **changes)
        with pytest.raises(UserError, match=message):
            open_images(path)


def test_digits_need_no_download_and_are_split_by_class():
    train, test = digits()
    assert (len(train), len(test)) == (1_438, 359)
    assert train[0].shape == (8, 8, 3)
    counts = np.bincount(test.labels) / (np.bincount(train.labels) + np.bincount(test.labels))
    np.testing.assert_allclose(counts, 0.2, atol=0.01)
    assert not set(train.names) & set(test.names)
    assert digits()[1].names == test.names
    one = images.ImageSet("set", ["a", "b", "c"], np.array([0, 1, 1]), ("x", "y"), [b""] * 3)
    with pytest.raises(UserError, match="the class 'x' has one image"):
        stratified(one, 0.5)
    few = images.ImageSet("set", list("abcd"), np.array([0, 0, 1, 1]), ("x", "y"), [b""] * 4)
    assert all(sorted(own.labels) == [0, 1] for own in stratified(few, 0.9)), "each class in both"


def test_every_kind_of_image_becomes_rgb():
    image = picture(size=(6, 5))
    array = np.asarray(image)
    grey = np.asarray(image.convert("L"))
    assert decoded(encoded(image), "a")[1] == ""
    found, kind = decoded(encoded(image.convert("L")), "a")
    assert kind == "grey"
    np.testing.assert_array_equal(found, np.repeat(grey[..., None], 3, axis=2))
    # A transparent pixel is white, whatever it hides.
    own = image.convert("RGBA")
    own.putpixel((0, 0), (1, 2, 3, 0))
    found, kind = decoded(encoded(own), "a")
    assert kind == "alpha"
    assert found[0, 0].tolist() == [255, 255, 255]
    np.testing.assert_array_equal(found[1], array[1])
    found, kind = decoded(encoded(image.convert("CMYK"), "TIFF"), "a")
    assert (kind, found.shape) == ("CMYK", (5, 6, 3))
    np.testing.assert_allclose(found.astype(int), array.astype(int), atol=2)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    found, kind = decoded(encoded(deep), "a")
    assert kind == "16-bit"
    np.testing.assert_array_equal(found[..., 0], grey)
    share = Image.fromarray(grey.astype(np.float32) / 255)
    np.testing.assert_array_equal(decoded(encoded(share, "TIFF"), "a")[0][..., 0], grey)
    frames = encoded(image.convert("P"), "GIF", save_all=True, append_images=[picture(3, (6, 5)).convert("P")])
    found, kind = decoded(frames, "a")
    assert (kind, found.shape) == ("animated", (5, 6, 3))


def png(depth, row, extra=b""):
    """A file of one row of RGB pixels; Pillow writes neither 16 bits a channel nor a transparent colour."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(row) * 8 // depth // 3, 1, depth, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), extra and chunk(*extra), chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + b"".join((*parts, chunk(b"IEND", b"")))


def test_colours_of_16_bits_and_a_transparent_colour_are_counted():
    found, kind = decoded(png(16, struct.pack(">6H", 65_535, 0, 32_768, 257, 514, 771)), "a")
    assert (kind, found.tolist()) == ("16-bit", [[[255, 0, 128], [1, 2, 3]]])
    transparent = (b"tRNS", struct.pack(">3H", 10, 20, 30))
    found, kind = decoded(png(8, bytes([10, 20, 30, 1, 2, 3]), transparent), "a")
    assert (kind, found.tolist()) == ("alpha", [[[255, 255, 255], [1, 2, 3]]])


def test_orientation_of_a_camera_is_applied():
    image = picture(size=(6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    found, _ = decoded(encoded(image, exif=exif), "a")
    np.testing.assert_array_equal(found, np.rot90(np.asarray(image), -1))


def test_what_cannot_be_decoded(monkeypatch):
    whole = encoded(picture(size=(64, 64)))
    for content, message in (
        (b"", "a file of no bytes is no image"),
        (b"GIF89a is none", "no image that can be read"),
        (whole[: len(whole) // 2], "the file is cut short or damaged"),
        (encoded(picture(size=(64, 64)), "JPEG")[:300], "no image that can be read"),
    ):
        with pytest.raises(UserError, match=f"x.png: .*{message}"):
            decoded(content, "x.png")
    monkeypatch.setattr(image_files, "LARGEST", 4_000)
    with pytest.raises(UserError, match="more than the 4,000 pixels that are decoded"):
        decoded(whole, "x.png")


def test_a_bomb_is_refused_before_it_is_decoded():
    bomb = encoded(Image.new("1", (14_000, 14_000)))
    assert len(bomb) < 200_000
    with pytest.raises(UserError, match="more than the 100,000,000 pixels"):
        decoded(bomb, "bomb.png")


def test_images_that_users_give(tmp_path):
    array = np.asarray(picture())
    picture().save(tmp_path / "a.png")
    for given in (tmp_path / "a.png", str(tmp_path / "a.png"), picture(), array):
        np.testing.assert_array_equal(image_array(given), array)
    assert image_array(array[..., 0]).shape == (4, 5, 3)
    assert image_array(array[..., :1]).shape == (4, 5, 3)
    for given, message in (
        (array.astype(float), "an array of float64: give uint8"),
        (array[None], r"has the shape \(1, 4, 5, 3\)"),
        (tmp_path / "none.png", "none.png: cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            image_array(given)


def test_folders_and_archives_that_cannot_be_used(folder, tmp_path):
    def refused(place, message):
        with pytest.raises(UserError, match=message):
            open_images(str(place))

    refused(tmp_path / "nothing", "no such folder or archive of images")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no images; their names end in")
    (folder / "train" / "fish").mkdir()
    refused(folder, "the class folder 'train/fish' has no images")
    refused(archives(folder)[".tar.xz"], "the class folder 'train/fish' has no images")
    refused(archives(folder)[".zip"], "the class folder 'train/fish' has no images")
    (folder / "train" / "fish" / "notes.txt").write_text("no image")
    refused(folder, "the class folder 'train/fish' has no images")
    (folder / "train" / "fish" / "notes.txt").unlink()
    (folder / "train" / "fish").rmdir()
    (folder / "stray.png").write_bytes(encoded(picture()))
    refused(folder, "stray.png lies beside the class folders")
    (folder / "stray.png").unlink()
    (folder / "train" / "cover.png").write_bytes(encoded(picture()))
    refused(folder, "train/cover.png lies beside the class folders")
    (folder / "train" / "cover.png").unlink()
    (folder / "train" / "@eaDir").mkdir()
    assert open_images(str(folder)).classes == ("cat", "dog")
    (folder / "train" / "@eaDir").rmdir()
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(tmp_path / "empty.npz", "no .npz file that can be read")
    with pytest.raises(UserError, match=r"no \.npz file that can be read"):
        splits_of(str(tmp_path / "empty.npz"))
    with (tmp_path / "alone.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    refused(tmp_path / "alone.npz", "no .npz file that can be read")
    with pytest.raises(UserError, match=r"alone\.npz: cannot be read"):
        ArrayFile(tmp_path / "alone.npz")
    (folder / "test" / "cat").mkdir(parents=True)
    (folder / "test" / "cat" / "0.png").write_bytes(encoded(picture()))
    refused(folder, "holds test, train side by side")
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(pathlib.Path(archives(folder)[".tar.xz"]).read_bytes()[:200])
    refused(broken, "no archive that can be read")
    (tmp_path / "text.zip").write_text("no archive")
    refused(tmp_path / "text.zip", "no archive that can be read")
    for name in ("../outside/a.png", "/root/a.png", "a/../../b/c.png"):
        with tarfile.open(tmp_path / "out.tar", "w") as file:
            file.addfile(tarfile.TarInfo(name))
        refused(tmp_path / "out.tar", "leads out of the archive")
        with zipfile.ZipFile(tmp_path / "out.zip", "w") as file:
            file.writestr(name, b"")
        refused(tmp_path / "out.zip", "leads out of the archive")


def test_a_test_set_may_have_one_class(folder):
    (folder / "test" / "dog").mkdir(parents=True)
    (folder / "test" / "dog" / "0.png").write_bytes(encoded(picture()))
    found = open_images(str(folder / "test"), classes=("cat", "dog"))
    assert found.labels.tolist() == [1]
    with pytest.raises(UserError, match="all images are in one folder"):
        open_images(str(folder / "test"))


def test_labels_of_no_class_are_refused():
    pixels = np.zeros((2, 3, 3, 3), np.uint8)
    with pytest.raises(UserError, match="set: labels from -1 to 1, where there are 2 classes"):
        images.ImageSet("set", ["a", "b"], np.array([-1, 1]), ["no", "yes"], pixels)


def test_a_zip_file_is_opened_once_and_read_by_other_processes(folder, monkeypatch):
    found = open_images(archives(folder)[".zip"])
    opened = []
    plain = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *a: opened.append(a) or plain(*a))
    expected = [found[n] for n in range(6)]
    assert len(opened) == 1
    again = pickle.loads(pickle.dumps(found.source))
    for number, own in enumerate(expected):
        np.testing.assert_array_equal(decoded(again[number], "")[0], own)


def test_members_that_are_damaged_or_too_large(folder, monkeypatch):
    path = pathlib.Path(archives(folder)[".zip"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("cat/a.png", "dog/b.png"):
            file.writestr(name, encoded(picture(size=(50, 40))))
        begin = file.getinfo("dog/b.png").header_offset + 30 + len("dog/b.png")
    content = bytearray(path.read_bytes())
    content[begin : begin + 200] = b"\xff" * 200
    path.write_bytes(content)
    found = open_images(str(path))
    assert found[0].shape == (40, 50, 3)
    with pytest.raises(UserError, match=r"dog/b\.png: cannot be read"):
        found[1]
    monkeypatch.setattr(image_files, "LARGEST_FILE", 100)
    for place in archives(folder).values():
        with pytest.raises(UserError, match=r"png: [\d,]+ bytes, more than the 100"):
            open_images(place)


def test_a_damaged_member_is_named(folder):
    (folder / "train" / "dog" / "1.png").write_bytes(b"")
    for place in archives(folder).values():
        found = open_images(place)
        number = next(n for n, name in enumerate(found.names) if name.endswith("dog/1.png"))
        with pytest.raises(UserError, match=r"dog/1.png: a file of no bytes"):
            found[number]


def test_sets_of_tfds(tmp_path):
    from tests.data.corpora.tfds_sets import ToyDigits, ToyReviews, write_sets

    folder = str(write_sets(tmp_path, (ToyReviews,)))
    # Not on disk: it is prepared, its arrays written without TensorFlow.
    assert ToyDigits.name == "toy_digits"
    found = open_images("tfds:toy_digits", split="train", data_dir=folder)
    assert found.classes == ("dark", "light")
    assert len(found) == 12
    for number in range(12):
        assert found[number].shape == (8, 8, 3)
        assert found[number][0, 0].tolist() == [40 + 100 * found.labels[number]] * 3
    with pytest.raises(UserError, match="has the features label, text: no image with a label"):
        open_images("tfds:toy_reviews", data_dir=folder)
    with pytest.raises(UserError, match="has no split 'dev'"):
        open_images("tfds:toy_digits", split="dev", data_dir=folder)


def test_fingerprints_tell_sets_apart(folder):
    first = open_images(str(folder))
    before = first.fingerprint()
    assert before == open_images(str(folder)).fingerprint()
    assert before != first.some(np.arange(5)).fingerprint()
    (folder / "train" / "dog" / "1.png").write_bytes(encoded(picture(9)))
    assert before != open_images(str(folder)).fingerprint()


def test_converted_images_are_counted(folder):
    (folder / "train" / "dog" / "1.png").write_bytes(encoded(picture().convert("L")))
    found = open_images(str(folder))
    assert (found.kinds(6), found.kinds(1)) == ({"grey": 1}, {})
    assert found.converted == {}, "nothing was decoded"
    for number in (*range(6), *range(6)):
        found[number]
    assert found.converted == {"grey": 1}
    arrays = ImageSet("set", ["a", "b"], np.zeros(2), ["one"], np.zeros((2, 4, 4, 1), np.uint8))
    assert (arrays[0].shape, arrays.converted) == ((4, 4, 3), {"grey": 1})
    assert arrays.kinds(2) == {"grey": 2}


def test_a_file_that_is_too_large_is_not_read(folder, monkeypatch):
    (one,) = (folder / "train" / "cat").glob("0.png")
    monkeypatch.setattr(image_files, "LARGEST_FILE", 10)
    with pytest.raises(UserError, match="bytes, more than the 10 of"):
        open_images(str(folder))[0]
    with pytest.raises(UserError, match="bytes, more than the 10 of"):
        image_array(one)
