"""The interactive page of an image in a real browser, and pictures of attention maps."""

import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.interpretability.images import AttentionMaps
from transformer_jax.plotting.image_maps import plot_attention_maps, plot_images
from transformer_jax.plotting.image_page import ImagePage


@pytest.fixture
def maps(rng):
    """Return maps of two layers with three heads over a class token, a register and 2 x 3 patches."""
    weights = rng.dirichlet(np.full(8, 0.3), (2, 3, 8)).astype(np.float32)
    pixels = rng.integers(256, size=(8, 12, 3), dtype=np.uint8)
    return AttentionMaps(pixels, weights, 2, (2, 3), rng.normal(size=(8, 5)).astype(np.float32))


@pytest.mark.long
def test_hovering_a_patch_names_the_patch_with_the_largest_weight(browser, maps, tmp_path):
    ImagePage(maps, title="</script> a cat").save(tmp_path / "page.html")
    context = browser.new_context(viewport={"width": 900, "height": 800}, offline=True)
    tab, errors = context.new_page(), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto((tmp_path / "page.html").as_uri())
    assert tab.locator("h1").inner_text() == "</script> a cat"

    def status():
        return tab.locator("#said").inner_text()

    def best(layer, head, token):
        row = maps.weights[layer].mean(axis=0)[token] if head is None else maps.weights[layer, head, token]
        patch = int(row[2:].argmax())
        return f"row {patch // 3}, column {patch % 3} ({100 * row[2:].max():.1f} %)"

    assert status().startswith("class token, layer 1, mean of the heads: most to " + best(1, None, 0))
    image = tab.locator("#image")
    box = image.bounding_box()
    # The mouse moves to the center of the patch in row 1, column 2, which is token 2 + 5.
    tab.mouse.move(box["x"] + box["width"] * 5 / 6, box["y"] + box["height"] * 3 / 4)
    assert status().startswith(
        "patch in row 1, column 2, layer 1, mean of the heads: most to " + best(1, None, 7)
    )
    tab.mouse.click(box["x"] + box["width"] * 5 / 6, box["y"] + box["height"] * 3 / 4)
    tab.locator("#heads button").nth(3).click()
    tab.locator("#layers button").nth(0).click()
    assert status().startswith("patch in row 1, column 2, layer 0, head 2: most to " + best(0, 2, 7))
    image.press("ArrowLeft")
    assert status().startswith("patch in row 1, column 1, layer 0, head 2")
    tab.locator("#tokens button").nth(1).click()
    assert status().startswith("token 1 before the patches")
    tab.screenshot(path=tmp_path / "page.png")
    assert errors == []
    context.close()


def test_images_and_titles_that_do_not_fit_are_refused(maps, tmp_path):
    with pytest.raises(ValueError, match="1 images with 2 titles"):
        plot_attention_maps([maps], titles=["a", "b"])
    with pytest.raises(ValueError, match="no image to show"):
        plot_images({})
    with pytest.raises(UserError, match="25,000,000 attention weights are too many"):
        ImagePage(maps._replace(weights=np.broadcast_to(np.float32(0), (1, 1, 5_000, 5_000))))
    plot_images({"one": maps.pixels, "two": maps.pixels}, path=tmp_path / "images.png")
    assert (tmp_path / "images.png").stat().st_size > 2_000
