import numpy as np
import pytest
from PIL import Image

from transformer_jax.plotting.attention import plot_alignment
from transformer_jax.plotting.curves import plot_losses
from transformer_jax.plotting.extrapolation import plot_extrapolation
from transformer_jax.plotting.kernel_pooling import Fit, plot_classification, plot_regression
from transformer_jax.plotting.matrix import plot_matrices
from transformer_jax.plotting.scores_by_length import plot_scores_by_length


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


def test_a_figure_needs_no_file(tmp_path):
    weights, query, key = np.eye(3), np.arange(3.0), np.arange(3.0)
    fits = {"gaussian": {"fixed": Fit(1.0, query, weights)}}
    plane = {"gaussian": {"fixed": Fit(1.0, np.full(6, 0.5), np.ones((6, 3)))}}
    figures = [
        plot_alignment(weights[None], ["a", "b", "c"], ["x", "y", "z"], title="T"),
        plot_losses([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], title="T"),
        plot_extrapolation({"rotary": {8: 1.0, 16: 2.0}}, trained=8, title="T"),
        plot_scores_by_length({"gru": [9.0, 5.0]}, bins=["1", "2"], counts=[20, 30], score="BLEU", title="T"),
        plot_regression(fits, query=query, truth=query, key=key, value=key, title="T"),
        plot_classification(
            plane,
            across=np.arange(3.0),
            up=np.arange(2.0),
            key=np.eye(3, 2),
            label=np.array([0, 1, 1]),
            title="T",
        ),
    ]
    for number, figure in enumerate(figures):
        assert "T" in [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
        figure.savefig(tmp_path / f"{number}.png")
        with Image.open(tmp_path / f"{number}.png") as picture:
            assert picture.size[0] > 100


def test_smoothed_labels_are_named_where_there_are_some():
    def first_label(loss):
        axes = plot_losses([{"step": 1, "loss": loss, "nll": 2.0}]).axes[0]
        return axes.get_legend_handles_labels()[1][0]

    assert [first_label(2.0), first_label(2.1)] == ["training", "training, smoothed labels"]


def test_numbered_cells_have_whole_numbers():
    figure = plot_matrices(np.eye(5), xlabel="key", ylabel="query", colours="weight", title="T")
    figure.draw_without_rendering()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert all(place == int(place) for place in axis.get_ticklocs())
    assert (figure.get_supxlabel(), figure.get_suptitle()) == ("key", "T")
