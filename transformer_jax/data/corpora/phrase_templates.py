"""Templates of the embedded corpus: CLDR's dates, quantities, money and names.

A template draws values independent of a locale and renders them in any locale. If two values have the same text
in the source language but not in the target, one of them is excluded, so that each source text has one
translation.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import babel
from babel import dates, localedata, numbers, units

from transformer_jax.data.corpora.normalization import normalize_text

_FIRST_DAY = datetime.date(1950, 1, 1).toordinal()
_LAST_DAY = datetime.date(2049, 12, 31).toordinal()


@dataclasses.dataclass(frozen=True)
class Template:
    """A template of phrases.

    Attributes:
      name: Name in reports.
      weight: Relative frequency among the phrases.
      atoms: Names that phrases can contain (territory codes, units, ...), or ().
      draw: Function `(rng, atom or None) -> values`; None draws a random atom.
      render: Function `(values, locale) -> text`.
    """

    name: str
    weight: float
    atoms: tuple[str, ...]
    draw: Callable[[random.Random, str | None], Any]
    render: Callable[[Any, babel.Locale], str]


# --- values ------------------------------------------------------------


def _number(rng: random.Random) -> float:
    """Draw a typical quantity: mostly small, sometimes with grouped digits or decimals."""
    digits = rng.choice((1, 1, 2, 2, 3, 4, 5, 6))
    integer = rng.randrange(10 ** (digits - 1), 10**digits)
    if digits <= 4 and rng.random() < 0.3:
        return integer + rng.randrange(1, 10) / 10
    return integer


def _day(rng: random.Random) -> datetime.date:
    return datetime.date.fromordinal(rng.randint(_FIRST_DAY, _LAST_DAY))


def _moment(rng: random.Random) -> datetime.datetime:
    clock = datetime.time(rng.randrange(24), rng.randrange(60), rng.randrange(60))
    return datetime.datetime.combine(_day(rng), clock)


def _months_apart(rng: random.Random) -> tuple[datetime.date, datetime.date]:
    start = _day(rng)
    return start, start + datetime.timedelta(days=rng.randint(1, 90))


# Maximum count of each unit that CLDR's relative times do not round to the next unit.
_MAX_COUNT = {"second": 44, "minute": 44, "hour": 20, "day": 5, "week": 3, "month": 9, "year": 99}
_SECONDS_OF_UNIT = dict(dates.TIMEDELTA_UNITS)


def _time_span(rng: random.Random, unit: str | None) -> datetime.timedelta:
    unit = unit or rng.choice(tuple(_MAX_COUNT))
    return datetime.timedelta(seconds=rng.randint(1, _MAX_COUNT[unit]) * _SECONDS_OF_UNIT[unit])


def _round_number(rng: random.Random) -> int:
    # Every language's grouping (thousand, 万, lakh) preserves two significant digits, so that the compact forms
    # of both languages are equal.
    return rng.randrange(10, 100) * 10 ** rng.randrange(3, 8)


# --- templates ------------------------------------------------------------


def _without_names(draw: Callable[[random.Random], Any]) -> Callable[[random.Random, str | None], Any]:
    return lambda rng, atom: draw(rng)


def _date_templates(source: babel.Locale) -> Iterator[Template]:
    # "May" is the long and the short name of a month, so May 5 would have two translations.
    abbreviated = [
        month
        for month in range(1, 13)
        if dates.format_date(datetime.date(2021, month, 5), "medium", source)
        != dates.format_date(datetime.date(2021, month, 5), "long", source)
    ]

    def day_in_abbreviated_month(rng: random.Random) -> datetime.date:
        return _day(rng).replace(month=rng.choice(abbreviated), day=rng.randint(1, 28))

    days = {"medium": day_in_abbreviated_month} if abbreviated else {}
    for style, weight in (("full", 3), ("long", 3), ("medium", 3), ("short", 2)):
        yield Template(
            f"date-{style}",
            weight,
            (),
            _without_names(days.get(style, _day)),
            lambda v, loc, s=style: dates.format_date(v, s, loc),
        )
    for style, weight in (("short", 2), ("medium", 2)):
        yield Template(
            f"time-{style}",
            weight,
            (),
            _without_names(_moment),
            lambda v, loc, s=style: dates.format_time(v.time(), s, locale=loc),
        )
        yield Template(
            f"date-time-{style}",
            weight,
            (),
            _without_names(_moment),
            lambda v, loc, s=style: dates.format_datetime(v, s, locale=loc),
        )
    for skeleton in ("yMMMM", "MMMd", "yMMMEd", "yQQQQ"):
        yield Template(
            f"date-{skeleton}",
            1,
            (),
            _without_names(_day),
            lambda v, loc, s=skeleton: dates.format_skeleton(s, v, locale=loc),
        )
    yield Template(
        "date-range",
        2,
        (),
        _without_names(_months_apart),
        lambda v, loc: dates.format_interval(v[0], v[1], "yMMMd", locale=loc),
    )
    spans = tuple(_MAX_COUNT)
    for name, sign in (("time-to-come", 1), ("time-ago", -1)):
        yield Template(
            name,
            2,
            spans,
            _time_span,
            lambda v, loc, sign=sign: dates.format_timedelta(sign * v, add_direction=True, locale=loc),
        )


def _counted(atoms: Sequence[str]) -> Callable[[random.Random, str | None], tuple[float, str]]:
    return lambda rng, atom: (_number(rng), atom or rng.choice(atoms))


def _unambiguous(atoms: Sequence[str], texts: Callable[[str], set[str]], used: set[str]) -> tuple[str, ...]:
    """Return the atoms whose source texts are not yet in `used`, and add their texts to it."""
    selected = []
    for atom in atoms:
        atom_texts = {normalize_text(text) for text in texts(atom)}
        if not atom_texts & used:
            used |= atom_texts
            selected.append(atom)
    return tuple(selected)


def _quantity_templates(source: babel.Locale, target: babel.Locale) -> Iterator[Template]:
    shared_units = [u for u in source._data["unit_patterns"] if u in target._data["unit_patterns"]]
    used = {normalize_text(numbers.format_percent(n / 100, locale=source)) for n in _PROBES}
    for length, weights in (("long", {"duration": 3, "quantity": 7}), ("short", {"quantity": 5})):

        def render(v, loc, length=length):
            text = units.format_unit(v[0], v[1], length, locale=loc)
            # Babel renders the identifier of a unit without a name in the locale.
            if v[1] in text:
                raise LookupError(f"{loc} has no name for {v[1]}")
            return text

        available = [
            u
            for u in shared_units
            if all(works(render, (n, u), loc) for loc in (source, target) for n in _PROBES)
        ]
        unambiguous = _unambiguous(
            available, lambda u, render=render: {render((n, u), source) for n in _PROBES}, used
        )
        for name, weight in weights.items():
            atoms = tuple(u for u in unambiguous if u.startswith("duration-") == (name == "duration"))
            yield Template(f"{name}-{length}", weight, atoms, _counted(atoms), render)

    speeds = tuple(u for u in ("length-kilometer", "length-meter", "length-mile") if u in shared_units)
    yield Template(
        "speed",
        1,
        speeds,
        _counted(speeds),
        lambda v, loc: units.format_compound_unit(v[0], v[1], denominator_unit="duration-hour", locale=loc),
    )


def _money_templates(source: babel.Locale, target: babel.Locale) -> Iterator[Template]:
    current = {c for t in source.territories if len(t) == 2 for c in numbers.get_territory_currencies(t)}
    shared = sorted(c for c in current if c in source.currencies and c in target.currencies)
    by_name = _unambiguous(shared, lambda c: {source.currencies[c]}, set())
    by_symbol = _unambiguous(shared, lambda c: {numbers.get_currency_symbol(c, source)}, set())

    def counted(atoms: Sequence[str]) -> Callable[[random.Random, str | None], tuple[float, str]]:
        def draw(rng: random.Random, atom: str | None) -> tuple[float, str]:
            currency = atom or rng.choice(atoms)
            amount = _number(rng) if rng.random() < 0.6 else rng.randrange(100, 1_000_000) / 100
            # Rounded here, because digits that rendering rounds away could affect the plural form.
            return round(amount, numbers.get_currency_precision(currency)), currency

        return draw

    yield Template(
        "money-named",
        4,
        by_name,
        counted(by_name),
        lambda v, loc: numbers.format_currency(v[0], v[1], locale=loc, format_type="name"),
    )
    yield Template(
        "money",
        4,
        by_symbol,
        counted(by_symbol),
        lambda v, loc: numbers.format_currency(v[0], v[1], locale=loc),
    )
    yield Template(
        "percentage",
        1,
        (),
        lambda rng, _: rng.randrange(1, 1000) / 1000,
        lambda v, loc: numbers.format_percent(v, locale=loc, decimal_quantization=False),
    )
    yield Template(
        "compact-number",
        1,
        (),
        lambda rng, _: _round_number(rng),
        lambda v, loc: numbers.format_compact_decimal(v, locale=loc, fraction_digits=2),
    )


def _name_templates(source: babel.Locale, target: babel.Locale) -> Iterator[Template]:
    used: set[str] = set()
    territories = _unambiguous(
        sorted(t for t in source.territories if len(t) == 2 and t in target.territories),
        lambda t: {source.territories[t]},
        used,
    )
    # Only languages with a CLDR locale, not all of ISO 639.
    with_locale = {name.split("_")[0] for name in localedata.locale_identifiers()}
    languages = _unambiguous(
        sorted(c for c in source.languages if c in with_locale and c in target.languages),
        lambda c: {source.languages[c]},
        used,
    )
    for name, weight, atoms, table in (
        ("territory", 2, territories, "territories"),
        ("language", 2, languages, "languages"),
    ):
        yield Template(
            name,
            weight,
            atoms,
            lambda rng, atom, atoms=atoms: atom or rng.choice(atoms),
            lambda v, loc, table=table: getattr(loc, table)[v],
        )
    yield Template(
        "language-territory",
        8,
        (),
        lambda rng, _: (rng.choice(languages), rng.choice(territories)),
        # CLDR's pattern for the name of a locale, such as German (Austria).
        lambda v, loc: f"{loc.languages[v[0]]} ({loc.territories[v[1]]})",
    )


# Counts that cover the plural forms of a unit.
_PROBES = (1, 2, 5, 11, 100)


def works(render: Callable[[Any, babel.Locale], str], values: Any, locale: babel.Locale) -> bool:
    """Return whether CLDR has the data of a template in this locale; some locales lack some styles."""
    try:
        return bool(render(values, locale))
    except (LookupError, ValueError, units.UnknownUnitError):
        return False


def simple_templates(source: babel.Locale, target: babel.Locale) -> list[Template]:
    """Return the templates that both locales support."""
    candidates = [
        *_date_templates(source),
        *_quantity_templates(source, target),
        *_money_templates(source, target),
        *_name_templates(source, target),
    ]
    probe = random.Random(0)
    supported = []
    for template in candidates:
        try:
            draws = [template.draw(probe, atom) for atom in template.atoms[:1] or (None,)]
        except IndexError:  # the locale has none of the template's names
            continue
        if all(works(template.render, values, locale) for values in draws for locale in (source, target)):
            supported.append(template)
    return supported
