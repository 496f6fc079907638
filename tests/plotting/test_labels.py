"""Labels of tokens: every script, spaces, long ones."""

import logging

import pytest

from transformer_jax.plotting import labels
from transformer_jax.plotting.labels import families, shown


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("the", "the"),
        (" the", "␣the"),
        ("  ", "␣␣"),
        ("after layer 4", "after layer 4"),
        ("\n", "↵"),
        ("a\tb", "a⇥b"),
        ("\x07", "�"),
        ("שלום", "שלום"),
        ("Donaudampfschifffahrtsgesellschaft", "Donaudamp…llschaft"),
        ("", ""),
    ],
)
def test_labels(token, label):
    assert shown(token) == label
    assert len(shown(token)) <= 18


def test_matplotlibs_own_font_has_most_scripts():
    assert families(["weeks", "Büro", "неделя", "שלום", "مرحبا", "␣↵…"]) == ["DejaVu Sans"]


def test_other_fonts_are_found_by_their_characters(monkeypatch):
    own = labels._characters
    fonts = {"one.ttf": frozenset(map(ord, "日本")), "two.ttf": frozenset(map(ord, "語"))}
    monkeypatch.setattr(labels, "_characters", lambda path, number: fonts.get(path) or own(path, number))
    monkeypatch.setattr(labels, "_listed", lambda: [("One", "one.ttf", 0)])
    monkeypatch.setattr(labels, "_new", lambda: [("Two", "two.ttf", 0)])
    assert families(["日本"]) == ["DejaVu Sans", "One"]
    assert families(["日本語"]) == ["DejaVu Sans", "One", "Two"], "one that came after the others were listed"


def test_a_character_that_no_font_has_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert families(["\U0010fffd"]) == ["DejaVu Sans"]
    assert len(caplog.records) == 1
    assert "no installed font has" in caplog.text
