"""Images of every format from folders, archives, arrays and TensorFlow Datasets, and their errors."""

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

from transformer_jax.data.corpora import images
from transformer_jax.data.corpora.image_archives import splits_of
from transformer_jax.data.corpora.image_files import decode, image_array
from transformer_jax.data.corpora.image_sets import ImageSet, stratified
from transformer_jax.data.corpora.images import digits, open_images
from transformer_jax.errors import UserError
from transformer_jax.pretrained.tensor_files import ArrayFile


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def picture(number=0, size=(5, 4)):
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(256, size=(size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Return a folder of two classes of three images each, with files that are not images."""
    for number in range(6):
        path = tmp_path / "set" / "train" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number)))
    (tmp_path / "set" / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "set" / "train" / "cat" / ".hidden.png").write_text("no image")
    return tmp_path / "set"


def archives(folder: pathlib.Path) -> dict[str, str]:
    """Write the folder as archives of every format."""
    paths = {}
    for ending, mode in ((".tar", "w"), (".tar.gz", "w:gz"), (".tar.xz", "w:xz")):
        path = folder.parent / f"set{ending}"
        with tarfile.open(path, mode) as file:
            file.add(folder / "train", "train")
        paths[ending] = str(path)
    with zipfile.ZipFile(folder.parent / "set.zip", "w") as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, path.relative_to(folder).as_posix())
    return paths | {".zip": str(folder.parent / "set.zip")}


def test_a_folder_and_its_archives_hold_the_same_images(folder):
    for source in (str(folder), *archives(folder).values()):
        image_set = open_images(source)
        assert image_set.classes == ("cat", "dog")
        assert len(image_set) == 6
        by_name = {name.rpartition("/")[2]: n for n, name in enumerate(image_set.names)}
        for number in range(6):
            index = by_name[f"{number}.png"]
            assert image_set.labels[index] == number % 2
            np.testing.assert_array_equal(image_set[index], np.asarray(picture(number)))


def test_folders_inside_class_folders(folder):
    """Images in nested folders belong to the class folder at the top."""
    (folder / "train" / "cat").rename(folder / "train" / "old")
    (folder / "train" / "cat").mkdir()
    (folder / "train" / "old").rename(folder / "train" / "cat" / "2026")
    image_set = open_images(str(folder))
    assert image_set.classes == ("cat", "dog")
    assert [image_set.classes[n] for n in image_set.labels] == ["cat"] * 3 + ["dog"] * 3


def test_images_in_a_class_folder_and_in_nested_folders(folder):
    (folder / "train" / "cat" / "2026").mkdir()
    (folder / "train" / "cat" / "0.png").rename(folder / "train" / "cat" / "2026" / "0.png")
    for hidden in (".ipynb_checkpoints", "@eaDir"):
        (folder / "train" / hidden).mkdir()
        (folder / "train" / hidden / "copy.png").write_bytes(encoded(picture()))
    image_set = open_images(str(folder))
    assert (image_set.classes, len(image_set)) == (("cat", "dog"), 6)
    (folder / "train" / "alone.png").write_bytes(encoded(picture()))
    with pytest.raises(UserError, match=r"train/alone\.png is not in a class folder"):
        open_images(str(folder))


def test_class_folders_with_images_one_level_deeper(folder):
    """A class folder must have images, a folder inside a class need not; `@home` is a class."""
    for name in ("cat", "dog"):
        (folder / "train" / name / "images").mkdir()
        for path in (folder / "train" / name).glob("[0-9].png"):
            path.rename(path.parent / "images" / path.name)
    (folder / "train" / "cat" / "old").mkdir()
    (folder / "train" / ".git" / "objects").mkdir(parents=True)
    (folder / "train" / "@home").mkdir()
    (folder / "train" / "@home" / "0.png").write_bytes(encoded(picture()))
    for source in (str(folder), *archives(folder).values()):
        assert open_images(source).classes == ("@home", "cat", "dog")
    (folder / "train" / "fish" / "images").mkdir(parents=True)
    for source in (str(folder), *archives(folder).values()):
        with pytest.raises(UserError, match="the class folder 'train/fish' has no images"):
            open_images(source)


@pytest.mark.parametrize(
    ("first", "second"),
    [("train/1_cat", "test/2_dog"), ("train/cat/2026/1", "test/cat/2026/2"), ("cat/train/1", "cat/test/2")],
)
def test_two_splits_in_one_folder_are_refused(tmp_path, first, second):
    for number, name in enumerate((first, second)):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(picture(number)))
    with pytest.raises(UserError, match=r"has folders of several splits \(test, train\)"):
        open_images(str(tmp_path))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_links_in_a_tar(tmp_path, mode):
    """A hard link is an image like any other; a symbolic link is refused."""
    path = tmp_path / "set.tar"
    content = encoded(picture(3))

    def write(name, target, link_type):
        with tarfile.open(path, mode) as file:
            for image_name in ("a/0.png", "b/0.png"):
                member = tarfile.TarInfo(image_name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            link = tarfile.TarInfo(name)
            link.linkname, link.type = target, link_type
            file.addfile(link)

    write("c/0.png", "a/0.png", tarfile.LNKTYPE)
    image_set = open_images(str(path))
    assert image_set.classes == ("a", "b", "c")
    np.testing.assert_array_equal(image_set[2], np.asarray(picture(3)))
    write("c/0.png", "../a/0.png", tarfile.SYMTYPE)
    with pytest.raises(UserError, match=r"c/0\.png is a link to \.\./a/0\.png"):
        open_images(str(path))


def test_a_name_that_is_not_utf_8(tmp_path):
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as file:
        for name in ("caf\xe9/0.png", "tea/0.png"):
            file.addfile(tarfile.TarInfo(name))
    with pytest.raises(UserError, match="is not UTF-8: rename it"):
        open_images(str(path))


def test_photos_named_by_timestamp_have_no_classes(tmp_path):
    for second in range(10, 14):
        (tmp_path / f"20260704_1530{second}.jpg").write_bytes(encoded(picture(second), "JPEG"))
    assert open_images(str(tmp_path), labeled=False).classes == ("",)


def test_classes_from_numbered_file_names(tmp_path):
    (tmp_path / "true").mkdir()
    for number, name in enumerate(("dog", "cat", "dog")):
        (tmp_path / "true" / f"{number:05}_{name}.png").write_bytes(encoded(picture(number)))
    image_set = open_images(str(tmp_path / "true"), classes=("bird", "cat", "dog"))
    assert image_set.labels.tolist() == [2, 1, 2]
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
    image_set = open_images(path)
    assert image_set[1].shape == (6, 5, 3)
    np.testing.assert_array_equal(image_set[1][..., 2], pixels[1])
    with pytest.raises(UserError, match="the class '2' was not in training"):
        open_images(path, split="test", classes=image_set.classes)
    np.savez(path, x_train=pixels, y_train=[0, 1, 2, 0], x_test=pixels[:2], y_test=[2, 0])
    test = open_images(path, split="test", classes=open_images(path).classes)
    assert (test.classes, test.labels.tolist()) == (("0", "1", "2"), [2, 0])
    for arrays, message in (
        (dict(images=pixels.astype(float), labels=[0] * 4), "it must be uint8"),
        (dict(images=pixels, labels=[0, 1]), "4 images and 2 labels"),
        (dict(images=pixels, labels=[0, 1, 2, -1]), "labels from -1 to 2"),
        (dict(images=pixels, labels=[0, 1, 10**9, 1]), "3 different labels from 0 to 1000000000"),
        (dict(images=pixels, labels=[0, 1, 3, 1]), "3 different labels from 0 to 3: number the classes"),
        (dict(images=pixels, labels=[0, 1, 2, 3], classes=["a", "b"]), "but there are 2 classes"),
        (dict(images=pixels, labels=[0.0, 1.0, 2.0, 3.0]), "labels must be numbers of classes"),
        (dict(pixels=pixels), "images must be `images` and `labels`"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=message):
            open_images(path)


def test_digits_need_no_download_and_are_stratified():
    train, test = digits()
    assert (len(train), len(test)) == (1_438, 359)
    assert train[0].shape == (8, 8, 3)
    counts = np.bincount(test.labels) / (np.bincount(train.labels) + np.bincount(test.labels))
    np.testing.assert_allclose(counts, 0.2, atol=0.01)
    assert not set(train.names) & set(test.names)
    assert digits()[1].names == test.names
    image_set = images.ImageSet("set", ["a", "b", "c"], np.array([0, 1, 1]), ("x", "y"), [b""] * 3)
    with pytest.raises(UserError, match="the class 'x' has one image"):
        stratified(image_set, 0.5)
    image_set = images.ImageSet("set", list("abcd"), np.array([0, 0, 1, 1]), ("x", "y"), [b""] * 4)
    assert all(sorted(part.labels) == [0, 1] for part in stratified(image_set, 0.9)), "each class in both parts"


def test_every_image_format_becomes_rgb():
    image = picture(size=(6, 5))
    array = np.asarray(image)
    grey = np.asarray(image.convert("L"))
    assert decode(encoded(image), "a")[1] == ""
    pixels, conversion = decode(encoded(image.convert("L")), "a")
    assert conversion == "gray"
    np.testing.assert_array_equal(pixels, np.repeat(grey[..., None], 3, axis=2))
    # A transparent pixel becomes white, whatever its color.
    transparent = image.convert("RGBA")
    transparent.putpixel((0, 0), (1, 2, 3, 0))
    pixels, conversion = decode(encoded(transparent), "a")
    assert conversion == "alpha"
    assert pixels[0, 0].tolist() == [255, 255, 255]
    np.testing.assert_array_equal(pixels[1], array[1])
    pixels, conversion = decode(encoded(image.convert("CMYK"), "TIFF"), "a")
    assert (conversion, pixels.shape) == ("CMYK", (5, 6, 3))
    np.testing.assert_allclose(pixels.astype(int), array.astype(int), atol=2)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    pixels, conversion = decode(encoded(deep), "a")
    assert conversion == "16-bit"
    np.testing.assert_array_equal(pixels[..., 0], grey)
    fractions = Image.fromarray(grey.astype(np.float32) / 255)
    np.testing.assert_array_equal(decode(encoded(fractions, "TIFF"), "a")[0][..., 0], grey)
    frames = encoded(image.convert("P"), "GIF", save_all=True, append_images=[picture(3, (6, 5)).convert("P")])
    pixels, conversion = decode(frames, "a")
    assert (conversion, pixels.shape) == ("animated", (5, 6, 3))


def png(depth, row, extra=b""):
    """Return a file of one row of RGB pixels, because Pillow cannot write 16-bit or transparent colors."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", len(row) * 8 // depth // 3, 1, depth, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header), extra and chunk(*extra), chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + b"".join((*chunks, chunk(b"IEND", b"")))


def test_16_bit_and_transparent_colors_are_reported():
    pixels, conversion = decode(png(16, struct.pack(">6H", 65_535, 0, 32_768, 257, 514, 771)), "a")
    assert (conversion, pixels.tolist()) == ("16-bit", [[[255, 0, 128], [1, 2, 3]]])
    transparent = (b"tRNS", struct.pack(">3H", 10, 20, 30))
    pixels, conversion = decode(png(8, bytes([10, 20, 30, 1, 2, 3]), transparent), "a")
    assert (conversion, pixels.tolist()) == ("alpha", [[[255, 255, 255], [1, 2, 3]]])


def test_the_exif_orientation_is_applied():
    image = picture(size=(6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    pixels, _ = decode(encoded(image, exif=exif), "a")
    np.testing.assert_array_equal(pixels, np.rot90(np.asarray(image), -1))


def test_undecodable_files_are_refused(monkeypatch):
    content = encoded(picture(size=(64, 64)))
    for damaged, message in (
        (b"", "an empty file is not an image"),
        (b"GIF89a is none", "not a readable image"),
        (content[: len(content) // 2], "the file is truncated or damaged"),
        (encoded(picture(size=(64, 64)), "JPEG")[:300], "not a readable image"),
    ):
        with pytest.raises(UserError, match=f"x.png: .*{message}"):
            decode(damaged, "x.png")
    monkeypatch.setenv("TRANSFORMER_JAX_MAX_PIXELS", "4000")
    with pytest.raises(
        UserError,
        match="more pixels than the limit of 4,000; set TRANSFORMER_JAX_MAX_PIXELS",
    ):
        decode(content, "x.png")


def test_a_decompression_bomb_is_refused():
    bomb = encoded(Image.new("1", (14_000, 14_000)))
    assert len(bomb) < 200_000
    with pytest.raises(UserError, match="more pixels than the limit of 100,000,000"):
        decode(bomb, "bomb.png")


def test_images_from_paths_and_arrays(tmp_path):
    array = np.asarray(picture())
    picture().save(tmp_path / "a.png")
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), picture(), array):
        np.testing.assert_array_equal(image_array(image), array)
    assert image_array(array[..., 0]).shape == (4, 5, 3)
    assert image_array(array[..., :1]).shape == (4, 5, 3)
    for image, message in (
        (array.astype(float), "an array of float64: convert it to uint8"),
        (array[None], r"has the shape \(1, 4, 5, 3\)"),
        (tmp_path / "none.png", "none.png: cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            image_array(image)


def test_unusable_folders_and_archives_are_refused(folder, tmp_path):
    def refused(path, message):
        with pytest.raises(UserError, match=message):
            open_images(str(path))

    refused(tmp_path / "nothing", "no such folder or archive")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no images; their names must end in")
    (folder / "train" / "fish").mkdir()
    refused(folder, "the class folder 'train/fish' has no images")
    refused(archives(folder)[".tar.xz"], "the class folder 'train/fish' has no images")
    refused(archives(folder)[".zip"], "the class folder 'train/fish' has no images")
    (folder / "train" / "fish" / "notes.txt").write_text("no image")
    refused(folder, "the class folder 'train/fish' has no images")
    (folder / "train" / "fish" / "notes.txt").unlink()
    (folder / "train" / "fish").rmdir()
    (folder / "stray.png").write_bytes(encoded(picture()))
    refused(folder, "stray.png is not in a class folder")
    (folder / "stray.png").unlink()
    (folder / "train" / "cover.png").write_bytes(encoded(picture()))
    refused(folder, "train/cover.png is not in a class folder")
    (folder / "train" / "cover.png").unlink()
    (folder / "train" / "@eaDir").mkdir()
    assert open_images(str(folder)).classes == ("cat", "dog")
    (folder / "train" / "@eaDir").rmdir()
    (tmp_path / "empty.npz").write_bytes(b"")
    refused(tmp_path / "empty.npz", "not a readable .npz file")
    with pytest.raises(UserError, match=r"not a readable \.npz file"):
        splits_of(str(tmp_path / "empty.npz"))
    with (tmp_path / "alone.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    refused(tmp_path / "alone.npz", "not a readable .npz file")
    with pytest.raises(UserError, match=r"alone\.npz: cannot be read"):
        ArrayFile(tmp_path / "alone.npz")
    (folder / "test" / "cat").mkdir(parents=True)
    (folder / "test" / "cat" / "0.png").write_bytes(encoded(picture()))
    refused(folder, r"has folders of several splits \(test, train\)")
    archive = tmp_path / "broken.tar.xz"
    archive.write_bytes(pathlib.Path(archives(folder)[".tar.xz"]).read_bytes()[:200])
    refused(archive, "not a readable archive")
    (tmp_path / "text.zip").write_text("no archive")
    refused(tmp_path / "text.zip", "not a readable archive")
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
    image_set = open_images(str(folder / "test"), classes=("cat", "dog"))
    assert image_set.labels.tolist() == [1]
    with pytest.raises(UserError, match="all images are in one folder"):
        open_images(str(folder / "test"))


def test_a_label_without_a_class_is_refused():
    pixels = np.zeros((2, 3, 3, 3), np.uint8)
    with pytest.raises(UserError, match="set: labels from -1 to 1, but there are 2 classes"):
        images.ImageSet("set", ["a", "b"], np.array([-1, 1]), ["no", "yes"], pixels)


def test_a_zip_file_is_opened_once_and_can_be_pickled(folder, monkeypatch):
    image_set = open_images(archives(folder)[".zip"])
    opened = []
    zip_file = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda *a: opened.append(a) or zip_file(*a))
    expected = [image_set[n] for n in range(6)]
    assert len(opened) == 1
    source = pickle.loads(pickle.dumps(image_set.source))
    for number, image in enumerate(expected):
        np.testing.assert_array_equal(decode(source[number], "")[0], image)


def test_damaged_and_too_large_members_are_refused(folder, monkeypatch):
    path = pathlib.Path(archives(folder)[".zip"])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("cat/a.png", "dog/b.png"):
            file.writestr(name, encoded(picture(size=(50, 40))))
        start = file.getinfo("dog/b.png").header_offset + 30 + len("dog/b.png")
    content = bytearray(path.read_bytes())
    content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)
    image_set = open_images(str(path))
    assert image_set[0].shape == (40, 50, 3)
    with pytest.raises(UserError, match=r"dog/b\.png: cannot be read"):
        image_set[1]
    monkeypatch.setenv("TRANSFORMER_JAX_MAX_IMAGE_BYTES", "100")
    for archive in archives(folder).values():
        with pytest.raises(UserError, match=r"png: the size in bytes [\d,]+ is above the limit of 100;"):
            open_images(archive)


def test_a_damaged_member_is_named(folder):
    (folder / "train" / "dog" / "1.png").write_bytes(b"")
    for archive in archives(folder).values():
        image_set = open_images(archive)
        number = next(n for n, name in enumerate(image_set.names) if name.endswith("dog/1.png"))
        with pytest.raises(UserError, match=r"dog/1.png: an empty file"):
            image_set[number]


def test_image_sets_of_tfds(tmp_path):
    from tests.data.corpora.tfds_sets import ToyDigits, ToyReviews, write_sets

    folder = str(write_sets(tmp_path, (ToyReviews,)))
    # The set is not on disk; it is prepared, and its arrays are written without TensorFlow.
    assert ToyDigits.name == "toy_digits"
    image_set = open_images("tfds:toy_digits", split="train", data_dir=folder)
    assert image_set.classes == ("dark", "light")
    assert len(image_set) == 12
    for number in range(12):
        assert image_set[number].shape == (8, 8, 3)
        assert image_set[number][0, 0].tolist() == [40 + 100 * image_set.labels[number]] * 3
    with pytest.raises(UserError, match="has the features label, text, but needs an image and a label"):
        open_images("tfds:toy_reviews", data_dir=folder)
    with pytest.raises(UserError, match="has no split 'dev'"):
        open_images("tfds:toy_digits", split="dev", data_dir=folder)


def test_different_sets_have_different_fingerprints(folder):
    image_set = open_images(str(folder))
    before = image_set.fingerprint()
    assert before == open_images(str(folder)).fingerprint()
    assert before != image_set.select(np.arange(5)).fingerprint()
    (folder / "train" / "dog" / "1.png").write_bytes(encoded(picture(9)))
    assert before != open_images(str(folder)).fingerprint()


def test_converted_images_are_counted(folder):
    (folder / "train" / "dog" / "1.png").write_bytes(encoded(picture().convert("L")))
    image_set = open_images(str(folder))
    assert (image_set.expected_conversions(6), image_set.expected_conversions(1)) == ({"gray": 1}, {})
    assert image_set.converted == {}, "nothing was decode"
    for number in (*range(6), *range(6)):
        image_set[number]
    assert image_set.converted == {"gray": 1}
    arrays = ImageSet("set", ["a", "b"], np.zeros(2), ["one"], np.zeros((2, 4, 4, 1), np.uint8))
    assert (arrays[0].shape, arrays.converted) == ((4, 4, 3), {"gray": 1})
    assert arrays.expected_conversions(2) == {"gray": 2}


def test_a_file_that_is_too_large_is_not_read(folder, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_JAX_MAX_IMAGE_BYTES", "10")
    with pytest.raises(UserError, match=r"the size in bytes [\d,]+ is above the limit of 10;"):
        open_images(str(folder))[0]
    with pytest.raises(UserError, match=r"the size in bytes [\d,]+ is above the limit of 10;"):
        image_array(folder / "train" / "cat" / "0.png")
