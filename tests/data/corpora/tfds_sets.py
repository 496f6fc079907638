"""Small TFDS sets, written to a folder by real builders without TensorFlow."""

import contextlib
import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

GERMAN = {
    "a red dog": "ein roter hund",
    "the dog sees": "der hund sieht",
    "a cat": "eine katze",
    "ähm": "äh, ja",
}
SENTENCES = list(GERMAN)


def numbered_pair(number):
    """Return the English and the German sentence of a number."""
    english = f"{SENTENCES[number % 4]} {number}"
    return english, f"{GERMAN[SENTENCES[number % 4]]} {number}"


class _Toy(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    SIZES = (("train", 300), ("validation", 12), ("test", 12))

    def _split_generators(self, manager):
        starts = {"train": 0, "validation": 1000, "test": 2000}
        return {name: self._generate_examples(starts[name], size) for name, size in self.SIZES}

    def _generate_examples(self, start, size):
        for number in range(start, start + size):
            yield number, self._example(number)


class ToyPairs(_Toy):
    """German and English pairs; training pair 7 lacks its German."""

    def _info(self):
        features = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("de", "en"), homepage="http://toy.invalid/"
        )

    def _example(self, number):
        english, german = numbered_pair(number)
        return {"en": english, "de": "" if number == 7 else german}


class ToyTalks(_Toy):
    """Sentences of a talk in up to three languages, with the name of the talk."""

    def _info(self):
        languages = ("de", "en", "pt-br")
        features = {
            "name": tfds.features.Text(),
            "translations": tfds.features.TranslationVariableLanguages(languages=languages),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        english, german = numbered_pair(number)
        translations = {"en": english, "de": german} if number % 2 else {"en": english, "pt-br": "olá"}
        return {"name": str(number), "translations": translations}


class ToyLabels(_Toy):
    """English texts with a label and without a translation."""

    def _info(self):
        features = tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _example(self, number):
        return {"text": numbered_pair(number)[0], "label": number}


class ToyReviews(_Toy):
    """Texts with a class; each contains a line break."""

    SIZES = (("train", 24), ("validation", 8))

    def _info(self):
        features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=["neg", "pos"])}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        return {"text": f"a film\nnumber {number} is {('bad', 'good')[number % 2]}", "label": number % 2}


class ToyTags(_Toy):
    """Words with two types of tags and the language of each word."""

    SIZES = (("train", 24), ("validation", 8))

    def _info(self):
        def tags(*names):
            return tfds.features.Sequence(tfds.features.ClassLabel(names=names))

        features = {
            "langs": tfds.features.Sequence(tfds.features.Text()),
            "tokens": tfds.features.Sequence(tfds.features.Text()),
            "ner": tags("O", "B-PER", "B-LOC"),
            "pos": tags("N", "V"),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        tags = {"ner": ["B-PER", "O", "B-LOC"], "pos": ["N", "V", "N"]}
        return {"langs": ["en"] * 3, "tokens": ["Anna", "sees", "New York"], **tags}


class ToySimilarity(_Toy):
    """Pairs of texts with a score, named `label` and -1 in the test split like that of STS-B in GLUE."""

    SIZES = (("train", 24), ("validation", 8), ("test", 8))

    def _info(self):
        features = {
            "sentence1": tfds.features.Text(),
            "sentence2": tfds.features.Text(),
            "label": tfds.features.Scalar(np.float32),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        score = -1.0 if number >= 2000 else number % 4 + 0.5
        return {"sentence1": "a dog", "sentence2": f"dog {number}", "label": score}


class ToyEntailment(_Toy):
    """Pairs with a class as in SNLI; every third and all of the test split are unlabeled (-1)."""

    SIZES = (("train", 24), ("test", 8))

    def _info(self):
        features = {
            "premise": tfds.features.Text(),
            "hypothesis": tfds.features.Text(),
            "label": tfds.features.ClassLabel(names=["yes", "no"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        label = -1 if number >= 1000 or number % 3 == 0 else number % 2
        return {"premise": f"dog {number}", "hypothesis": "a dog", "label": label}


class ToyQuestions(_Toy):
    """Questions as in SQuAD; every third has no answer, and validation question 1001 a wrong one."""

    SIZES = (("train", 24), ("validation", 8))

    def _info(self):
        answers = tfds.features.Sequence({"text": tfds.features.Text(), "answer_start": np.int32})
        features = {
            "id": tfds.features.Text(),
            "context": tfds.features.Text(),
            "question": tfds.features.Text(),
            "answers": answers,
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        context = f"the film number {number} is good"
        start = context.index("good") - (number == 1001)
        answers = [] if number % 3 == 0 else [{"text": "good", "answer_start": start}]
        return {"id": f"q{number}", "context": context, "question": "how is it?", "answers": answers}


class ToyDigits(_Toy):
    """Images of one shade of grey with a label."""

    SIZES = (("train", 12), ("test", 6))

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(8, 8, 1)),
            "label": tfds.features.ClassLabel(names=["dark", "light"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        label = number % 2
        return {"image": np.full((8, 8, 1), 40 + 100 * label, np.uint8), "label": label}


class ToyScenes(_Toy):
    """Images of one shade of grey with captions as in COCO; image 5 has none."""

    SIZES = (("train", 12), ("test", 6))

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(8, 8, 3)),
            "captions": tfds.features.Sequence({"id": np.int64, "text": tfds.features.Text()}),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        texts = [] if number == 5 else [f"shade {number}", f"a picture\nof grey {number}"]
        captions = [{"id": number, "text": text} for text in texts]
        return {"image": Image.new("RGB", (8, 8), (number % 256,) * 3), "captions": captions}


class ToySpeech(_Toy):
    """Tones of 8 kHz with a digit and the name of a speaker; recording 1 is nearly silent."""

    SIZES = (("train", 12), ("test", 6))

    def _info(self):
        features = {
            "audio": tfds.features.Audio(sample_rate=8_000, dtype=np.int64),
            "label": tfds.features.ClassLabel(num_classes=10),
            "speaker": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        loudness = 1 if number == 1 else 8_192
        tone = np.round(loudness * np.sin(np.arange(800) * 0.3)).astype(np.int64)
        return {"audio": tone, "label": number % 10, "speaker": ("ann", "bob")[number % 2]}


TRANSLATION_SETS = (ToyPairs, ToyTalks, ToyLabels)
LABELED_SETS = (ToyReviews, ToyTags, ToySimilarity, ToyEntailment, ToyQuestions)


def write_sets(folder, builders=TRANSLATION_SETS):
    """Prepare the sets in a folder, with three shards per split."""
    options = tfds.download.DownloadConfig(num_shards=3)
    for builder_class in builders:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            builder = builder_class(data_dir=str(folder), file_format="array_record")
            builder.download_and_prepare(download_config=options)
    return folder
