"""The interactive page in a real browser."""

import pathlib

import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.plotting.attention_page import AttentionPage
from transformer_jax.plotting.page import check_writable

QUERIES, KEYS = ["vor", "3", "</script><b>", "שלום"], ["3", " weeks", "ago", "日本語", "x" * 60]


def maps(rng):
    cross = rng.dirichlet(np.full(5, 0.3), (2, 3, 4))
    own = np.tri(4)[None, None] / np.arange(1, 5)[:, None]
    return {
        "decoder/cross_attention": (cross, QUERIES, KEYS),
        "decoder/self_attention": (own, QUERIES, QUERIES),
    }


def test_what_fits_nothing(rng):
    with pytest.raises(ValueError, match="no attention to show"):
        AttentionPage({})
    with pytest.raises(ValueError, match=r"a: weights \(1, 1, 2, 2\) are not \(L, H, 1, 2\)"):
        AttentionPage({"a": (np.ones((1, 1, 2, 2)), ["x"], ["y", "z"])})


def test_weights_of_any_dtype(rng):
    weights = np.eye(2, dtype=np.float16)[None, None]
    half, whole = (AttentionPage({"a": (weights.astype(kind), "xy", "xy")}).html for kind in ("f2", "f4"))
    assert half == whole


def test_where_no_page_can_be_written(tmp_path):
    for path in ("", tmp_path, tmp_path / "none" / "a.html"):
        with pytest.raises(UserError, match="no file can be written there"):
            check_writable(path)
    check_writable(tmp_path / "a.html")
    page = AttentionPage({"a": (np.eye(2)[None, None], ["x", "\ud800"], "xy")})
    with pytest.raises(UserError, match="the page cannot be written"):
        page.save(tmp_path / "a.html")
    with pytest.raises(UserError, match="25,000,000 attention weights are too many"):
        AttentionPage({"a": (np.broadcast_to(np.float32(0), (1, 1, 5_000, 5_000)), "x" * 5_000, "y" * 5_000)})


def test_a_cell_shows_the_page(rng):
    shown = AttentionPage(maps(rng), title='a "title" & more')._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert shown.count('"') == 6, "what stands in the attribute is escaped"


@pytest.fixture
def page(browser, tmp_path, rng):
    """The saved page, in a browser without a network; errors of its script fail the test."""
    given = maps(rng)
    AttentionPage(given, title="vor 3 Wochen").save(tmp_path / "page.html")
    context = browser.new_context(viewport={"width": 900, "height": 700}, offline=True)
    tab, errors, asked = context.new_page(), [], []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((tmp_path / "page.html").as_uri())
    yield tab, given
    assert errors == []
    assert [pathlib.Path(url).name for url in asked] == ["page.html"], "it loads nothing else"
    context.close()


def lines(tab):
    """(query, key, head, opacity) of the links that are drawn."""
    return {
        (one["query"], one["key"], one["head"]): one["opacity"]
        for one in tab.eval_on_selector_all(
            "#lines line",
            "all => all.map(l => ({query: +l.dataset.query, key: +l.dataset.key, head: +l.dataset.head,"
            " opacity: +l.getAttribute('stroke-opacity')}))",
        )
    }


@pytest.mark.long
def test_hovering_a_token_highlights_its_links(page):
    tab, given = page
    weights = given["decoder/cross_attention"][0]
    assert tab.locator("#queries .token").all_inner_texts() == QUERIES
    assert tab.locator("#keys .token").all_inner_texts() == KEYS
    tab.locator("#queries .token").nth(1).hover()
    drawn = lines(tab)
    expected = {
        (1, key, head): weights[0, head, 1, key]
        for head in range(3)
        for key in range(5)
        if weights[0, head, 1, key] >= 0.02
    }
    assert drawn.keys() == expected.keys()
    for link, opacity in drawn.items():
        assert opacity == pytest.approx(expected[link], abs=1e-4)
    assert "chosen" in tab.locator("#queries .token").nth(1).get_attribute("class")
    best = int(weights[0, :, 1].mean(axis=0).argmax())
    assert f"“{KEYS[best]}” {weights[0, :, 1].mean(axis=0)[best]:.2f}" in tab.inner_text("#said")
    tab.locator("#keys .token").nth(2).hover()
    assert {key for _, key, _ in lines(tab)} == {2}
    assert tab.locator("#queries .token.chosen").count() == 0


@pytest.mark.long
def test_layers_heads_and_kinds_are_chosen(page):
    tab, given = page
    weights = given["decoder/cross_attention"][0]
    assert tab.locator("#layers button").all_inner_texts() == ["0", "1"]
    assert tab.locator("#heads button").all_inner_texts()[:3] == ["0", "1", "2"]
    tab.locator("#layers button").nth(1).click()
    tab.locator("#heads button").nth(0).click()  # away
    tab.locator("#heads button").nth(2).click()
    tab.locator("#queries .token").nth(0).hover()
    drawn = lines(tab)
    assert {head for _, _, head in drawn} == {1}
    for (query, key, head), opacity in drawn.items():
        assert opacity == pytest.approx(weights[1, head, query, key], abs=1e-4)
    tab.locator("#kinds button").nth(1).click()
    assert tab.locator("#layers button").count() == 1
    assert tab.locator("#keys .token").all_inner_texts() == QUERIES
    tab.locator("#queries .token").nth(2).hover()
    assert {key for _, key, _ in lines(tab)} == {0, 1, 2}


@pytest.mark.long
def test_keys_and_clicks(page):
    """The keyboard reaches every token; a click keeps a token when the mouse goes on."""
    tab, _ = page
    tab.locator("#queries .token").nth(3).focus()
    assert {query for query, _, _ in lines(tab)} == {3}
    tab.locator("#queries .token").nth(0).click()
    tab.locator("#keys .token").nth(4).hover()
    assert {query for query, _, _ in lines(tab)} == {0}
