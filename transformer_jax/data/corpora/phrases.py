"""The embedded corpus: parallel phrases from Unicode CLDR through Babel, without a download.

A phrase is a *template* (a date in long style, an amount of money, a list of countries) filled with *values* (a
day, 1,234.50 and CHF, three territories) and rendered in the source and the target locale. CLDR's rules render
both sides, so that word order, plural forms, digit grouping and month names are correct in each language.
Phrases are drawn with a seed, in any number.

The split of a phrase is determined by a hash of its normalized source text, so that training, validation and
test phrases are always disjoint.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import babel
from babel import lists, localedata

from transformer_jax.data.corpora import phrase_templates
from transformer_jax.data.corpora.normalization import normalize_text, plain_spaces
from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.data.corpora.phrase_templates import Template
from transformer_jax.errors import UserError

SPLITS = ("train", "valid", "test")

# One source text in 10 belongs to validation and one to test.
_HASH_BUCKETS = 10

# Maximum characters of a source text, because combinations of lists could be arbitrarily long.
_MAX_LENGTH = 64


# Maximum draws for one name; only a name longer than a phrase exhausts them.
_TRIES = 1_000


def split_of(source: str) -> str:
    """Return the split of a source text, a function of its normalized form."""
    digest = hashlib.blake2b(normalize_text(source).encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % _HASH_BUCKETS
    return {0: "test", 1: "valid"}.get(bucket, "train")


def parse_locale(name: str) -> babel.Locale:
    """Return the CLDR locale of a name ("de", "pt_BR", "zh_Hant").

    Raises:
      UserError: Babel has no such locale.
    """
    try:
        return babel.Locale.parse(name)
    except (ValueError, TypeError, babel.UnknownLocaleError):
        known = localedata.locale_identifiers()
        matches = difflib.get_close_matches(name, known, n=3) or ["de", "fr", "ja"]
        raise UserError(
            f"unknown locale {name!r}: Babel knows {len(known)} locales; did you mean {', '.join(matches)}?"
        ) from None


# Templates whose phrases form lists.
_LISTED = ("territory", "language", "quantity-long", "duration-long", "money-named", "date-yMMMM", "speed")

# Connections of two phrases by signs that all languages share.
_CONNECTORS = ("{}: {}", "{} ({})", "{} – {}", "{} / {}")


class PhraseBook:
    """Phrases in two locales.

    Args:
      source: Name of the source locale in Babel.
      target: Name of the target locale.

    Raises:
      UserError: A locale is unknown, both are the same, or CLDR has too little data for one.
    """

    def __init__(self, source: str = "en", target: str = "de"):
        self.source, self.target = parse_locale(source), parse_locale(target)
        if self.source == self.target:
            raise UserError(f"phrases:{source}-{target} translates {source!r} into itself; name two locales")
        self._simple = phrase_templates.simple_templates(self.source, self.target)
        self._cumulative_weights = list(itertools.accumulate(t.weight for t in self._simple))
        self._listed = [t for t in self._simple if t.name in _LISTED]
        self._list_styles = [
            style
            for style in ("standard", "or", "unit")
            if all(
                phrase_templates.works(
                    lambda n, loc, style=style: lists.format_list(["x"] * n, style, loc), n, locale
                )
                for n in (2, 3, 4)
                for locale in (self.source, self.target)
            )
        ]
        if not (self._listed and self._list_styles):
            raise UserError(
                f"CLDR has too little data in {source!r} or {target!r} for this corpus ({len(self._simple)} "
                "templates, no lists): choose a locale with more data, such as de, fr or ja"
            )
        self._nested = [
            Template("list", 0.16, (), self._draw_list, self._render_list),
            Template("combination", 0.16, (), self._draw_combination, self._render_combination),
        ]

    @property
    def templates(self) -> list[Template]:
        """All templates that both locales support, nested templates last."""
        return [*self._simple, *self._nested]

    def _draw_simple(self, rng: random.Random) -> tuple[Template, Any]:
        template = rng.choices(self._simple, cum_weights=self._cumulative_weights)[0]
        return template, template.draw(rng, None)

    def _draw_list(self, rng: random.Random, _: str | None) -> tuple:
        # The items of a list have the same template.
        template = rng.choice(self._listed)
        first = template.draw(rng, None)
        rest = [template.draw(rng, None) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
        return rng.choice(self._list_styles), template, (first, *rest)

    @staticmethod
    def _render_list(values: tuple, locale: babel.Locale) -> str:
        style, template, items = values
        return lists.format_list([template.render(v, locale) for v in items], style, locale)

    def _draw_combination(self, rng: random.Random, _: str | None) -> tuple:
        parts: list[tuple[Template, Any]] = []
        while len(parts) < 2:
            in_list = rng.random() < 0.1
            part = (self._nested[0], self._draw_list(rng, None)) if in_list else self._draw_simple(rng)
            # The two phrases have different templates.
            if part[0].name not in {template.name for template, _ in parts}:
                parts.append(part)
        return rng.choice(_CONNECTORS), tuple(parts)

    @staticmethod
    def _render_combination(values: tuple, locale: babel.Locale) -> str:
        connector, parts = values
        return connector.format(*(template.render(v, locale) for template, v in parts))

    def _source(self, template: Template, values: Any) -> str:
        return plain_spaces(template.render(values, self.source))

    def _target(self, template: Template, values: Any) -> str:
        return plain_spaces(template.render(values, self.target))

    def _random_phrase(self, rng: random.Random) -> tuple[Template, Any]:
        position = rng.random()
        for template in self._nested:
            if position < template.weight:
                return template, template.draw(rng, None)
            position -= template.weight
        return self._draw_simple(rng)

    def _one_of_each_atom(self, rng: random.Random) -> Iterator[tuple[Template, Any]]:
        """Yield a training phrase for every name that phrases can contain."""
        for template in self._simple:
            for atom in template.atoms:
                phrase = template, template.draw(rng, atom)
                for _ in range(_TRIES):
                    source = self._source(*phrase)
                    if split_of(source) == "train" and len(source) <= _MAX_LENGTH:
                        break
                    if template.name in ("territory", "language"):
                        # A bare name has a single text and split, so it is combined with a variable phrase.
                        pair = ((template, atom), self._draw_simple(rng))
                        phrase = self._nested[1], (_CONNECTORS[0], pair)
                    else:
                        phrase = template, template.draw(rng, atom)
                yield phrase

    def draw(self, split: str, count: int, seed: int = 0) -> list[Pair]:
        """Draw distinct phrases of one split.

        Args:
          split: "train", "valid" or "test".
          count: Number of phrases. A larger number starts with the phrases of a smaller one, except for
            "train", which is shuffled.
          seed: Seed of the phrases.

        Returns:
          `count` pairs with distinct normalized sources. "train" contains each atom at least once.

        Raises:
          UserError: The split is unknown, or the training count is below the number of atoms.
        """
        if split not in SPLITS:
            raise UserError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        rng = random.Random(f"{seed}/{split}/{self.source}/{self.target}")
        drawn: dict[str, Pair] = {}

        def keep(template: Template, values: Any) -> None:
            source = self._source(template, values)
            # Most draws for the small splits end here, before the target is rendered.
            is_new = len(source) <= _MAX_LENGTH and normalize_text(source) not in drawn
            if is_new and split_of(source) == split:
                drawn[normalize_text(source)] = Pair(source, self._target(template, values))

        if split == "train":
            for phrase in self._one_of_each_atom(rng):
                keep(*phrase)
            if count < len(drawn):
                raise UserError(
                    f"{count} training phrases cannot contain all {len(drawn)} names of the corpus: "
                    f"use at least {len(drawn)}"
                )
        while len(drawn) < count:
            keep(*self._random_phrase(rng))
        pairs = list(drawn.values())
        if split == "train":
            rng.shuffle(pairs)
        return pairs
