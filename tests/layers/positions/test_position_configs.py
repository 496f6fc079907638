"""Positions as values and as text."""

import dataclasses

import pytest

from transformer_jax.layers.positions.configs import (
    SCHEMES,
    Alibi,
    Bucketed,
    Learned,
    NoPositions,
    Rotary,
    Shaw,
    Sinusoidal,
    parse_positions,
)
from transformer_jax.layers.positions.rotary import RotaryScaling

LLAMA = RotaryScaling("llama3", 8.0, original_length=8192, low_factor=2.0)
YARN = RotaryScaling("yarn", 4.0, original_length=4096, beta_fast=16.0, attention_factor=1.25)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Learned(), "learned"),
        (Sinusoidal(), "sinusoidal"),
        (Rotary(), "rotary"),
        (Rotary(500_000.0), "rotary:theta=500000.0"),
        (Rotary(scaling=RotaryScaling("linear", 2.0)), "rotary:scaling=linear,factor=2.0"),
        (
            Rotary(5e5, LLAMA),
            "rotary:theta=500000.0,scaling=llama3,factor=8.0,original_length=8192,low_factor=2.0",
        ),
        (
            Rotary(scaling=YARN),
            "rotary:scaling=yarn,factor=4.0,original_length=4096,beta_fast=16.0,attention_factor=1.25",
        ),
        (Alibi(), "alibi"),
        (Bucketed(), "bucketed"),
        (Bucketed(buckets=16), "bucketed:buckets=16"),
        (Bucketed(8, 11), "bucketed:buckets=8,max_distance=11"),
        (Shaw(limit=4), "shaw:limit=4"),
        (NoPositions(), "none"),
    ],
)
def test_text_and_back(value, text):
    assert str(value) == text
    parsed = parse_positions(text)
    assert (parsed, type(parsed), hash(parsed)) == (value, type(value), hash(value))


def test_every_name():
    assert list(SCHEMES) == ["learned", "sinusoidal", "rotary", "alibi", "bucketed", "shaw", "none"]
    for name, kind in SCHEMES.items():
        assert parse_positions(name) == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        Shaw().limit = 3


@pytest.mark.parametrize("text", ["rotary:theta=500000", "rotary:theta=5e5"])
def test_numbers_in_any_notation(text):
    assert parse_positions(text) == Rotary(500_000.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "up",
            "unknown positions 'up': choose one of learned, sinusoidal, rotary, alibi",
        ),
        ("", "unknown positions '': choose one of learned"),
        ("learned:limit=3", "'learned:limit=3': learned has no field 'limit': it has none"),
        ("shaw:", "'shaw:': shaw has no field '': its fields are limit"),
        ("bucketed:limit=3", "bucketed has no field 'limit': its fields are buckets, max_distance"),
        (
            "rotary:thata=3",
            "rotary has no field 'thata': its fields are theta, scaling, factor",
        ),
        ("shaw:limit=x", "limit='x' is not an integer"),
        ("shaw:limit=1.5", "limit='1.5' is not an integer"),
        ("shaw:limit", "limit='' is not an integer"),
        ("rotary:theta=far", "theta='far' is not a number"),
        ("shaw:limit=3,limit=4", "limit occurs twice"),
        ("shaw:limit=0", "limit=0 must be at least 1"),
        ("rotary:theta=nan", "theta=nan must be above 0"),
        ("rotary:factor=2", "a scaling needs its kind and its factor: scaling=linear,factor=2.0"),
        ("rotary:scaling=linear", "a scaling needs its kind and its factor"),
        ("rotary:scaling=cubic,factor=2", "rotary scaling 'cubic' is not one of linear, llama3, yarn"),
        ("rotary:scaling=linear,factor=nan", "factor of nan is below 1 or not finite"),
        ("rotary:scaling=yarn,factor=2", "'yarn' needs original_length"),
        ("bucketed:buckets=1", "buckets=1 must be at least 2"),
        ("bucketed:max_distance=16", "max_distance=16 must be above half of the buckets, 16"),
    ],
)
def test_errors_name_the_choices(text, message):
    with pytest.raises(ValueError, match=message):
        parse_positions(text)
