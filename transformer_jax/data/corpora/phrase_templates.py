"""What the phrases of the embedded corpus are made of: CLDR's dates, quantities, money and names.

A template draws its values without knowing a locale and renders them in any. Where two values would
read the same in the source language but not in the target, one of them is left out, so that a source
text has one translation.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import babel
from babel import dates, localedata, numbers, units

from transformer_jax.data.corpora.normalisation import normalise

_FIRST_DAY = datetime.date(1950, 1, 1).toordinal()
_LAST_DAY = datetime.date(2049, 12, 31).toordinal()


@dataclasses.dataclass(frozen=True)
class Template:
    """A kind of phrase.

    Attributes:
      name: what it is called in reports.
      weight: relative frequency among the phrases drawn.
      atoms: the names it can be filled with (territory codes, units ...); empty where it has none.
      draw: `(rng, atom or None) -> values`; an atom fixes the name, None leaves it to chance.
      render: `(values, locale) -> text`.
    """

    name: str
    weight: float
    atoms: tuple[str, ...]
    draw: Callable[[random.Random, str | None], Any]
    render: Callable[[Any, babel.Locale], str]


# --- values ------------------------------------------------------------


def _number(rng: random.Random) -> float:
    """A quantity as people write them: mostly small, sometimes grouped, sometimes with decimals."""
    digits = rng.choice((1, 1, 2, 2, 3, 4, 5, 6))
    whole = rng.randrange(10 ** (digits - 1), 10**digits)
    if digits <= 4 and rng.random() < 0.3:
        return whole + rng.randrange(1, 10) / 10
    return whole


def _day(rng: random.Random) -> datetime.date:
    return datetime.date.fromordinal(rng.randint(_FIRST_DAY, _LAST_DAY))


def _moment(rng: random.Random) -> datetime.datetime:
    clock = datetime.time(rng.randrange(24), rng.randrange(60), rng.randrange(60))
    return datetime.datetime.combine(_day(rng), clock)


def _months_apart(rng: random.Random) -> tuple[datetime.date, datetime.date]:
    start = _day(rng)
    return start, start + datetime.timedelta(days=rng.randint(1, 90))


# Largest count of each unit that CLDR's relative times do not round into the next one.
_LARGEST_COUNT = {"second": 44, "minute": 44, "hour": 20, "day": 5, "week": 3, "month": 9, "year": 99}
_SECONDS_OF_UNIT = dict(dates.TIMEDELTA_UNITS)


def _time_span(rng: random.Random, unit: str | None) -> datetime.timedelta:
    unit = unit or rng.choice(tuple(_LARGEST_COUNT))
    return datetime.timedelta(seconds=rng.randint(1, _LARGEST_COUNT[unit]) * _SECONDS_OF_UNIT[unit])


def _round_number(rng: random.Random) -> int:
    # Two significant digits survive every language's grouping (thousand, 万, lakh), so that the
    # compact form loses nothing that another language would show.
    return rng.randrange(10, 100) * 10 ** rng.randrange(3, 8)


# --- templates ------------------------------------------------------------


def _without_names(draw: Callable[[random.Random], Any]) -> Callable[[random.Random, str | None], Any]:
    return lambda rng, atom: draw(rng)


def _date_templates(source: babel.Locale) -> Iterator[Template]:
    # "May" is both the long and the short name: May 5 would have two translations.
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
    spans = tuple(_LARGEST_COUNT)
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


def _unambiguous(atoms: Sequence[str], texts: Callable[[str], set[str]], taken: set[str]) -> tuple[str, ...]:
    """Atoms none of whose source texts is another's; adds theirs to `taken`."""
    kept = []
    for atom in atoms:
        shown = {normalise(text) for text in texts(atom)}
        if not shown & taken:
            taken |= shown
            kept.append(atom)
    return tuple(kept)


def _quantity_templates(source: babel.Locale, target: babel.Locale) -> Iterator[Template]:
    both = [u for u in source._data["unit_patterns"] if u in target._data["unit_patterns"]]
    taken = {normalise(numbers.format_percent(n / 100, locale=source)) for n in _PROBES}
    for length, weights in (("long", {"duration": 3, "quantity": 7}), ("short", {"quantity": 5})):

        def render(v, loc, length=length):
            text = units.format_unit(v[0], v[1], length, locale=loc)
            # Babel shows the identifier of a unit that the locale cannot name.
            if v[1] in text:
                raise LookupError(f"{loc} has no name for {v[1]}")
            return text

        available = [
            u for u in both if all(works(render, (n, u), loc) for loc in (source, target) for n in _PROBES)
        ]
        named = _unambiguous(
            available, lambda u, render=render: {render((n, u), source) for n in _PROBES}, taken
        )
        for name, weight in weights.items():
            atoms = tuple(u for u in named if u.startswith("duration-") == (name == "duration"))
            yield Template(f"{name}-{length}", weight, atoms, _counted(atoms), render)

    speeds = tuple(u for u in ("length-kilometer", "length-meter", "length-mile") if u in both)
    yield Template(
        "speed",
        1,
        speeds,
        _counted(speeds),
        lambda v, loc: units.format_compound_unit(v[0], v[1], denominator_unit="duration-hour", locale=loc),
    )


def _money_templates(source: babel.Locale, target: babel.Locale) -> Iterator[Template]:
    current = {c for t in source.territories if len(t) == 2 for c in numbers.get_territory_currencies(t)}
    both = sorted(c for c in current if c in source.currencies and c in target.currencies)
    by_name = _unambiguous(both, lambda c: {source.currencies[c]}, set())
    by_symbol = _unambiguous(both, lambda c: {numbers.get_currency_symbol(c, source)}, set())

    def counted(atoms: Sequence[str]) -> Callable[[random.Random, str | None], tuple[float, str]]:
        def draw(rng: random.Random, atom: str | None) -> tuple[float, str]:
            currency = atom or rng.choice(atoms)
            amount = _number(rng) if rng.random() < 0.6 else rng.randrange(100, 1_000_000) / 100
            # What the rendering would round away must not choose the plural form.
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
    taken: set[str] = set()
    territories = _unambiguous(
        sorted(t for t in source.territories if len(t) == 2 and t in target.territories),
        lambda t: {source.territories[t]},
        taken,
    )
    # The languages that CLDR itself is written in, not the long tail of ISO 639.
    spoken = {name.split("_")[0] for name in localedata.locale_identifiers()}
    languages = _unambiguous(
        sorted(c for c in source.languages if c in spoken and c in target.languages),
        lambda c: {source.languages[c]},
        taken,
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


# Counts that bring out the plural forms of a unit.
_PROBES = (1, 2, 5, 11, 100)


def works(render: Callable[[Any, babel.Locale], str], values: Any, locale: babel.Locale) -> bool:
    """Whether CLDR has what the template needs in this locale (some locales lack some styles)."""
    try:
        return bool(render(values, locale))
    except (LookupError, ValueError, units.UnknownUnitError):
        return False


def simple_templates(source: babel.Locale, target: babel.Locale) -> list[Template]:
    """The templates that both locales have."""
    candidates = [
        *_date_templates(source),
        *_quantity_templates(source, target),
        *_money_templates(source, target),
        *_name_templates(source, target),
    ]
    probe = random.Random(0)
    kept = []
    for template in candidates:
        try:
            tried = [template.draw(probe, atom) for atom in template.atoms[:1] or (None,)]
        except IndexError:  # a template of names, none of which the locale has
            continue
        if all(works(template.render, values, locale) for values in tried for locale in (source, target)):
            kept.append(template)
    return kept
