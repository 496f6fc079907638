import collections
import re

import pytest

from transformer_jax.data.corpora.normalization import normalize_text
from transformer_jax.data.corpora.phrases import SPLITS, PhraseBook, split_of
from transformer_jax.errors import UserError


@pytest.fixture(scope="module")
def book():
    return PhraseBook("en", "de")


@pytest.fixture(scope="module")
def splits(book):
    return {split: book.draw(split, count) for split, count in zip(SPLITS, (6000, 300, 300), strict=True)}


def test_splits_are_disjoint_and_without_duplicates(splits):
    sources = {split: [normalize_text(p.source) for p in pairs] for split, pairs in splits.items()}
    for split, texts in sources.items():
        assert len(set(texts)) == len(texts), split
    assert not set(sources["train"]) & set(sources["valid"])
    assert not set(sources["train"]) & set(sources["test"])
    assert not set(sources["valid"]) & set(sources["test"])


def test_another_seed_draws_from_the_same_split(book):
    train = book.draw("train", 3000, seed=7)
    assert all(split_of(pair.source) == "train" for pair in train)
    assert train != book.draw("train", 3000, seed=8)
    assert train == book.draw("train", 3000, seed=7)


def test_splits_ignore_case_width_and_spaces():
    assert split_of("In 3 weeks") == split_of("in\u00a03  weeks ") == split_of("ＩＮ 3 weeks")


def test_every_atom_occurs_in_training(book, splits):
    """Training phrases contain every name that any phrase can contain, in a form that phrases use."""
    sources = [p.source for p in splits["train"]]
    text = "\n".join(sources)
    for template in book.templates:
        if template.name in ("territory", "language"):
            table = book.source.territories if template.name == "territory" else book.source.languages
            assert all(table[atom] in text for atom in template.atoms)
    by_name = {template.name: template for template in book.templates}
    without_numbers = re.sub(r"[\d.,]+", "", text)
    for name in ("quantity-long", "quantity-short", "duration-long", "money-named"):
        template = by_name[name]
        for atom in template.atoms:
            forms = {
                re.sub(r"[\d.,]+", "", template.render((n, atom), book.source)).strip() for n in (1, 7, 7.5)
            }
            assert any(form in without_numbers for form in forms), atom


def test_too_few_phrases_for_all_names(book):
    with pytest.raises(UserError, match=r"cannot contain all .* names of the corpus: use at least"):
        book.draw("train", 50)


@pytest.mark.parametrize("target", ["de", "fr", "ja", "ru", "ar", "zh_Hant", "pt_BR"])
def test_a_source_has_one_translation(target):
    """Equal source texts have equal targets among all simple phrases of many draws."""
    import random

    book, rng = PhraseBook("en", target), random.Random(0)
    targets = collections.defaultdict(set)
    for _ in range(8000):
        phrase = book._draw_simple(rng)
        targets[normalize_text(book._source(*phrase))].add(book._target(*phrase))
    assert len(targets) > 4000
    assert not {source: t for source, t in targets.items() if len(t) > 1}


def test_names_of_templates(book):
    names = {template.name for template in book.templates}
    for name in (
        "date-full", "date-short", "time-short", "date-time-medium", "date-range", "duration-long",
        "time-ago", "time-to-come", "quantity-long", "quantity-short", "speed", "money", "money-named",
        "percentage", "compact-number", "territory", "language", "list", "combination",
    ):  # fmt: skip
        assert name in names


def test_known_translations():
    import datetime

    book = PhraseBook("en", "de")
    by_name = {template.name: template for template in book.templates}

    def translation(name, values):
        template = by_name[name]
        return book._source(template, values), book._target(template, values)

    assert translation("date-full", datetime.date(2021, 3, 5)) == (
        "Friday, March 5, 2021",
        "Freitag, 5. März 2021",
    )
    assert translation("quantity-long", (1234.5, "length-kilometer")) == (
        "1,234.5 kilometers",
        "1.234,5 Kilometer",
    )
    assert translation("time-ago", datetime.timedelta(weeks=3)) == ("3 weeks ago", "vor 3 Wochen")
    assert translation("money-named", (2.5, "CHF")) == ("2.50 Swiss francs", "2,50 Schweizer Franken")


@pytest.mark.parametrize(("source", "target"), [("en", "xx"), ("tlh", "de"), ("", "de")])
def test_unknown_locales(source, target):
    with pytest.raises(UserError, match=r"unknown locale '.*': Babel knows"):
        PhraseBook(source, target)


@pytest.mark.parametrize("target", ["aa", "vo", "root"])
def test_sparse_locales(target):
    """Locales that lack most names and styles give phrases of what CLDR has."""
    assert len(PhraseBook("en", target).draw("valid", 20)) == 20


def test_equal_source_and_target_locales():
    with pytest.raises(UserError, match="into itself"):
        PhraseBook("en", "en")


def test_unknown_split(book):
    with pytest.raises(UserError, match="unknown split 'dev'"):
        book.draw("dev", 3)
