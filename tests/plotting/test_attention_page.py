"""The interactive page of attention, in a real browser."""

import pathlib

import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.plotting.attention_page import AttentionPage
from transformer_jax.plotting.page import check_writable

QUERIES, KEYS = ["vor", "3", "</script><b>", "שלום"], ["3", " weeks", "ago", "日本語", "x" * 60]


def maps(rng):
    cross = rng.dirichlet(np.full(5, 0.3), (2, 3, 4))
    self_attention = np.tri(4)[None, None] / np.arange(1, 5)[:, None]
    return {
        "decoder/cross_attention": (cross, QUERIES, KEYS),
        "decoder/self_attention": (self_attention, QUERIES, QUERIES),
    }


def test_maps_without_entries_or_with_wrong_shapes_are_refused(rng):
    with pytest.raises(ValueError, match="no attention to show"):
        AttentionPage({})
    with pytest.raises(ValueError, match=r"a: weights \(1, 1, 2, 2\) are not \(L, H, 1, 2\)"):
        AttentionPage({"a": (np.ones((1, 1, 2, 2)), ["x"], ["y", "z"])})


def test_weights_of_any_dtype(rng):
    weights = np.eye(2, dtype=np.float16)[None, None]
    half_page, single_page = (
        AttentionPage({"a": (weights.astype(dtype), "xy", "xy")}).html for dtype in ("f2", "f4")
    )
    assert half_page == single_page


def test_pages_that_cannot_be_written(tmp_path):
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
    html = AttentionPage(maps(rng), title='a "title" & more')._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert html.count('"') == 6, "the content of the attribute is escaped"


@pytest.fixture
def page(browser, tmp_path, rng):
    """Open the saved page in a browser without a network; errors of its script fail the test."""
    page_maps = maps(rng)
    AttentionPage(page_maps, title="vor 3 Wochen").save(tmp_path / "page.html")
    context = browser.new_context(viewport={"width": 900, "height": 700}, offline=True)
    tab, errors, requested_urls = context.new_page(), [], []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("request", lambda request: requested_urls.append(request.url))
    tab.goto((tmp_path / "page.html").as_uri())
    yield tab, page_maps
    assert errors == []
    assert [pathlib.Path(url).name for url in requested_urls] == ["page.html"], "the page loads nothing else"
    context.close()


def drawn_links(tab):
    """Return the opacity of each drawn link by (query, key, head)."""
    return {
        (line["query"], line["key"], line["head"]): line["opacity"]
        for line in tab.eval_on_selector_all(
            "#lines line",
            "all => all.map(l => ({query: +l.dataset.query, key: +l.dataset.key, head: +l.dataset.head,"
            " opacity: +l.getAttribute('stroke-opacity')}))",
        )
    }


@pytest.mark.long
def test_hovering_a_token_highlights_its_links(page):
    tab, page_maps = page
    weights = page_maps["decoder/cross_attention"][0]
    assert tab.locator("#queries .token").all_inner_texts() == QUERIES
    assert tab.locator("#keys .token").all_inner_texts() == KEYS
    tab.locator("#queries .token").nth(1).hover()
    drawn = drawn_links(tab)
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
    assert {key for _, key, _ in drawn_links(tab)} == {2}
    assert tab.locator("#queries .token.chosen").count() == 0


@pytest.mark.long
def test_buttons_choose_layers_heads_and_maps(page):
    tab, page_maps = page
    weights = page_maps["decoder/cross_attention"][0]
    assert tab.locator("#layers button").all_inner_texts() == ["0", "1"]
    assert tab.locator("#heads button").all_inner_texts()[:3] == ["0", "1", "2"]
    tab.locator("#layers button").nth(1).click()
    tab.locator("#heads button").nth(0).click()  # hides head 0
    tab.locator("#heads button").nth(2).click()
    tab.locator("#queries .token").nth(0).hover()
    drawn = drawn_links(tab)
    assert {head for _, _, head in drawn} == {1}
    for (query, key, head), opacity in drawn.items():
        assert opacity == pytest.approx(weights[1, head, query, key], abs=1e-4)
    tab.locator("#kinds button").nth(1).click()
    assert tab.locator("#layers button").count() == 1
    assert tab.locator("#keys .token").all_inner_texts() == QUERIES
    tab.locator("#queries .token").nth(2).hover()
    assert {key for _, key, _ in drawn_links(tab)} == {0, 1, 2}


@pytest.mark.long
def test_focus_and_clicks(page):
    """The keyboard reaches every token, and a click keeps a token selected when the mouse moves."""
    tab, _ = page
    tab.locator("#queries .token").nth(3).focus()
    assert {query for query, _, _ in drawn_links(tab)} == {3}
    tab.locator("#queries .token").nth(0).click()
    tab.locator("#keys .token").nth(4).hover()
    assert {query for query, _, _ in drawn_links(tab)} == {0}
