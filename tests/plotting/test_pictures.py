import numpy as np
import pytest
from PIL import Image

from transformer_jax.plotting.attention import plot_alignment
from transformer_jax.plotting.curves import plot_losses


def test_alignment_is_drawn(tmp_path):
    weights = np.eye(3, 4)[None].repeat(2, 0)
    plot_alignment(weights, ["a", "b", "c", "</s>"], ["x", "y", "</s>"], tmp_path / "a.png", title="a b c")
    with Image.open(tmp_path / "a.png") as image:
        picture = np.asarray(image.convert("RGB")).reshape(-1, 3)
    # viridis at 0 and at 1: both ends of the weights are in the picture.
    for colour in ((68, 1, 84), (253, 231, 37)):
        assert (np.abs(picture.astype(int) - colour).max(axis=1) < 6).sum() > 100


def test_money_is_no_formula(tmp_path):
    labels = ["$5", "_", "a_b_c$"]
    plot_alignment(np.eye(3)[None], labels, labels, tmp_path / "a.png", title="$5_a_b and $6")
    assert (tmp_path / "a.png").exists()


def test_panels_need_a_name_each(tmp_path):
    weights = np.eye(2)[None].repeat(2, 0)
    plot_alignment(weights, ["a", "b"], ["x", "y"], tmp_path / "a.png", names=["soft", "hard"])
    assert (tmp_path / "a.png").exists()
    with pytest.raises(ValueError, match="1 name for 2 heads"):
        plot_alignment(weights, ["a", "b"], ["x", "y"], tmp_path / "b.png", names=["soft"])
    assert not (tmp_path / "b.png").exists()


def test_labels_must_fit(tmp_path):
    with pytest.raises(ValueError, match="do not fit 1 target and 2 source tokens"):
        plot_alignment(np.ones((1, 2, 2)), ["a", "b"], ["x"], tmp_path / "a.png")


def test_losses_are_drawn(tmp_path):
    rows = [{"step": i, "loss": 3.0 / i} for i in range(1, 20)] + [{"step": 19, "valid_loss": 0.4}]
    plot_losses(rows, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size[0] > 300


def test_an_empty_record_is_drawn(tmp_path):
    plot_losses([], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()
