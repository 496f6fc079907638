"""Captioned images from tables, and drawn scenes."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.batches.captioned_batches import CaptionedViews
from transformer_jax.data.corpora.captioned_images import open_captioned, read_captioned
from transformer_jax.data.corpora.scenes import captions_of, draw_scene, scenes
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.errors import UserError

ROWS = [("a.png", "A red  field ."), ("sub/b.png", "Grass"), ("a.png", "it is red"), ("c.png", "sky")]
COLORS = {"a.png": (255, 0, 0), "sub/b.png": (0, 255, 0), "c.png": (0, 0, 255), "unused.png": (0, 0, 0)}


def write_images(folder):
    for name, color in COLORS.items():
        file = folder / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 5), color).save(file)
    return folder / "images"


def write_table(folder, rows=ROWS, suffix="tsv", header=("image", "caption")):
    path = folder / f"table.{suffix}"
    if suffix == "jsonl":
        lines = [json.dumps(dict(zip(header, row, strict=True))) for row in rows]
    else:
        separator = "\t" if suffix == "tsv" else ","
        lines = [separator.join(row) for row in (header, *rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_captions_belong_to_their_images(tmp_path, suffix, kind):
    images = write_images(tmp_path)
    if kind == "tar":
        with tarfile.open(tmp_path / "images.tar", "w") as file:
            file.add(images, "inner")
        images = tmp_path / "images.tar"
    # In the archive only the file names are those of the table.
    rows = ROWS if kind == "folder" else [(name.rpartition("/")[2], text) for name, text in ROWS]
    captioned = read_captioned(str(write_table(tmp_path, rows, suffix)), str(images))
    texts = {tuple(captioned.images[n][0, 0]): list(captioned.captions[n]) for n in range(len(captioned))}
    assert texts == {
        (255, 0, 0): ["A red field .", "it is red"],
        (0, 255, 0): ["Grass"],
        (0, 0, 255): ["sky"],
    }
    assert captioned.unused == 1


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([("a.png", " ")], ("image", "caption"), "line 2: the caption of a.png has no letters or digits"),
        ([("a.png", "...")], ("image", "caption"), "line 2: the caption of a.png has no letters or digits"),
        ([("d.png", "a dog")], ("image", "caption"), "line 2: no image 'd.png' in"),
        ([("a.png", "a dog")], ("image", "words"), "no column caption"),
        ([], ("image", "caption"), "a header and no rows"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, rows, header, message):
    images = write_images(tmp_path)
    with pytest.raises(UserError, match=message):
        read_captioned(str(write_table(tmp_path, rows, header=header)), str(images))


def test_lists_of_captions_in_json(tmp_path):
    lines = [{"image": "a.png", "caption": ["one dog", "two dogs"]}, {"image": "c.png", "caption": "sky"}]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, lines)))
    captioned = read_captioned(str(tmp_path / "table.jsonl"), str(write_images(tmp_path)))
    assert [list(texts) for texts in captioned.captions] == [["one dog", "two dogs"], ["sky"]]
    (tmp_path / "table.jsonl").write_text('{"image": "a.png"}')
    with pytest.raises(UserError, match=r"table\.jsonl, line 1"):
        read_captioned(str(tmp_path / "table.jsonl"), str(tmp_path / "images"))


def test_sources_that_are_not_a_table_and_images(tmp_path):
    with pytest.raises(UserError, match="captioned images are a table and a folder or archive"):
        open_captioned(["one.tsv"], split="train")
    with pytest.raises(UserError, match=r"images.npz: the images of an .npz file have no names"):
        read_captioned(str(write_table(tmp_path)), str(tmp_path / "images.npz"))
    with pytest.raises(UserError, match="no such folder or archive"):
        read_captioned(str(write_table(tmp_path)), str(tmp_path / "absent"))


def test_two_images_of_one_name_need_their_paths(tmp_path):
    images = write_images(tmp_path)
    Image.new("RGB", (6, 5)).save(images / "sub" / "a.png")
    assert len(read_captioned(str(write_table(tmp_path)), str(images))) == 3
    with pytest.raises(UserError, match=r"no image 'b\.jpg'"):
        read_captioned(str(write_table(tmp_path, [("b.jpg", "x")])), str(images))


def test_held_out_images_are_others(tmp_path):
    captioned = read_captioned(str(write_table(tmp_path)), str(write_images(tmp_path)))
    train, valid = captioned.hold_out(0.3)
    assert (len(train), len(valid)) == (2, 1)
    assert not set(train.images.names) & set(valid.images.names)
    with pytest.raises(UserError, match="a single image cannot be split"):
        valid.hold_out(0.3)
    assert train.fingerprint() != valid.fingerprint()


def test_scenes_show_what_their_captions_say():
    """The first shape is left of or above the second; its color has the larger share there."""
    rng = np.random.default_rng(0)
    things = (("red", "square"), ("blue", "circle"))
    assert captions_of(things, "beside") == [
        "a red square left of a blue circle",
        "there is a blue circle right of a red square",
        "the red square is left of the blue circle",
    ]
    assert captions_of((("orange", "star"), things[0]), "stacked")[0] == "an orange star above a red square"
    for arrangement in ("beside", "stacked"):
        pixels = draw_scene(things, arrangement, rng).astype(int)
        if arrangement == "stacked":
            pixels = pixels.swapaxes(0, 1)
        redness = (pixels[..., 0] - pixels[..., 2]).sum(axis=0)
        assert redness[:16].sum() > 500
        assert redness[16:].sum() < -500


def test_no_scene_is_in_two_splits():
    splits = scenes()
    names = [set(split.images.names) for split in splits]
    assert [len(split) for split in splits] == [672, 96, 192]
    assert len(set.union(*names)) == 960
    assert scenes(1)[0].fingerprint() != splits[0].fingerprint()


def test_each_epoch_draws_other_captions(rng):
    tokens = np.arange(14)[:, None] * np.ones(3, int)
    views = CaptionedViews(tokens, np.arange(14), [2, 5, 1, 6], captions=3, size=4, augmentation=Augmentation())
    images = np.zeros((4, 4, 4, 3), np.uint8)
    chosen = [views(images, 1, np.random.default_rng(seed)) for seed in range(20)]
    rows = [tuple(view["tokens"][:, 0]) for view in chosen]
    assert {n for row in rows for n in row} == {2, 3, 4, 5, 6}
    assert all(len(set(row)) == 3 for row in rows)
    np.testing.assert_array_equal(chosen[0]["lengths"], chosen[0]["tokens"][:, 0])
    # An image with fewer captions repeats them.
    assert set(views(images, 2, rng)["tokens"][:, 0]) == {7}
    assert sorted(views(images, 0, rng)["tokens"][:, 0])[0] == 0


def make_processor(**options):
    texts = ["a dog runs", "a cat sits on the mat"] * 3
    return ImageTextProcessor.train(ImageProcessor(size=8), texts, 300, **{"max_length": 8} | options)


def test_texts_are_framed_padded_and_truncated():
    processor = make_processor()
    end = processor.end
    short, long = "A  Dog", "a cat sits on the mat a cat sits on the mat"
    encoded = processor.encode([short, long])
    assert encoded.tokens.shape == (2, 8)
    ids = processor.tokenizer.encode(["a dog"])[0]
    assert encoded.tokens[0].tolist() == [*ids, *[end] * (8 - len(ids))]
    assert encoded.lengths.tolist() == [len(ids) + 1, 8]
    assert (encoded.tokens[1, -1], encoded.truncated) == (end, 1)
    generated = processor.encode([short], to_generate=True)
    assert generated.tokens[0, : len(ids) + 2].tolist() == [end, *ids, end]
    with pytest.raises(UserError, match="text 2 is empty"):
        processor.encode(["a", " "])


def test_a_processor_survives_its_files():
    processor = make_processor()
    files = processor.files()
    assert set(files) == set(ImageTextProcessor.FILES)
    again = ImageTextProcessor.from_files(files)
    assert (again.max_length, again.pad, again.lowercase) == (8, processor.pad, True)
    np.testing.assert_array_equal(again.encode(["A dog"]).tokens, processor.encode(["a dog"]).tokens)
    image = Image.new("RGB", (5, 7), (10, 20, 30))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    np.testing.assert_array_equal(again.images.pixels(image), processor.images.pixels(image))
    with pytest.raises(UserError, match=r"image_text.json"):
        ImageTextProcessor.from_files(files | {"image_text.json": b'{"max_length": 1}'})


def test_captions_of_a_tfds_set(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    from tests.data.corpora import tfds_sets

    tfds_sets.write_sets(tmp_path, [tfds_sets.ToyScenes])
    captioned = open_captioned(["tfds:toy_scenes"], split="train", data_dir=str(tmp_path))
    assert len(captioned.images) == len(captioned.captions) == 11
    assert captioned.unused == 1
    for number, captions in enumerate(captioned.captions):
        shade = int(captions[0].removeprefix("shade "))
        assert captions == [f"shade {shade}", f"a picture of grey {shade}"]
        assert (np.asarray(captioned.images[number]) == shade).all()
