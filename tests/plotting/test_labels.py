"""Labels of tokens: spaces, control characters, long tokens and fonts for every script."""

import logging

import pytest

from transformer_jax.plotting import labels
from transformer_jax.plotting.labels import font_families, token_label


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
    assert token_label(token) == label
    assert len(token_label(token)) <= 18


def test_the_default_font_covers_most_scripts():
    assert font_families(["weeks", "Büro", "неделя", "שלום", "مرحبا", "␣↵…"]) == ["DejaVu Sans"]


def test_other_fonts_are_found_by_their_characters(monkeypatch):
    original = labels._characters
    fonts = {"one.ttf": frozenset(map(ord, "日本")), "two.ttf": frozenset(map(ord, "語"))}
    monkeypatch.setattr(labels, "_characters", lambda path, number: fonts.get(path) or original(path, number))
    monkeypatch.setattr(labels, "_known_fonts", lambda: [("One", "one.ttf", 0)])
    monkeypatch.setattr(labels, "_new_fonts", lambda: [("Two", "two.ttf", 0)])
    assert font_families(["日本"]) == ["DejaVu Sans", "One"]
    assert font_families(["日本語"]) == ["DejaVu Sans", "One", "Two"], "a font installed later"


def test_a_character_without_a_font_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert font_families(["\U0010fffd"]) == ["DejaVu Sans"]
    assert len(caplog.records) == 1
    assert "no installed font has" in caplog.text
