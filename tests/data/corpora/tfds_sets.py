"""Real TFDS sets, written to a folder by real builders, without TensorFlow."""

import contextlib
import io

import numpy as np
import tensorflow_datasets as tfds

GERMAN = {
    "a red dog": "ein roter hund",
    "the dog sees": "der hund sieht",
    "a cat": "eine katze",
    "ähm": "äh, ja",
}
SENTENCES = list(GERMAN)


def _pair(number):
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
    """German and English; training pair 7 lacks its German."""

    def _info(self):
        features = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("de", "en"), homepage="http://toy.invalid/"
        )

    def _example(self, number):
        english, german = _pair(number)
        return {"en": english, "de": "" if number == 7 else german}


class ToyTalks(_Toy):
    """Examples of a talk in up to three languages, beside its name."""

    def _info(self):
        languages = ("de", "en", "pt-br")
        features = {
            "name": tfds.features.Text(),
            "translations": tfds.features.TranslationVariableLanguages(languages=languages),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example(self, number):
        english, german = _pair(number)
        translations = {"en": english, "de": german} if number % 2 else {"en": english, "pt-br": "olá"}
        return {"name": str(number), "translations": translations}


class ToyLabels(_Toy):
    """English texts with a label, and no translation."""

    def _info(self):
        features = tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _example(self, number):
        return {"text": _pair(number)[0], "label": number}


def write_sets(folder):
    """Prepares the three sets under a folder, in three shards a split."""
    options = tfds.download.DownloadConfig(num_shards=3)
    for kind in (ToyPairs, ToyTalks, ToyLabels):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            builder = kind(data_dir=str(folder), file_format="array_record")
            builder.download_and_prepare(download_config=options)
    return folder
