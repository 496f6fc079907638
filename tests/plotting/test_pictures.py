"""Pictures of attention, losses, scores and similarities."""

import numpy as np
import pytest
from PIL import Image

from transformer_jax.plotting.attention import plot_alignment, plot_head_scores, plot_heads
from transformer_jax.plotting.curves import plot_losses, plot_runs
from transformer_jax.plotting.extrapolation import plot_extrapolation
from transformer_jax.plotting.kernel_pooling import Fit, plot_classification, plot_regression
from transformer_jax.plotting.logit_lens import plot_logit_lens
from transformer_jax.plotting.matrix import plot_matrices
from transformer_jax.plotting.scores_by_length import plot_scores_by_length
from transformer_jax.plotting.similarity import cosine_similarity, plot_similarity


def test_alignment_is_drawn(tmp_path):
    weights = np.eye(3, 4)[None].repeat(2, 0)
    figure = plot_alignment(
        weights, ["a", "b", "c", "</s>"], ["x", "y", "</s>"], tmp_path / "a.png", title="a b c"
    )
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 1"]
    with Image.open(tmp_path / "a.png") as image:
        picture = np.asarray(image.convert("RGB")).reshape(-1, 3)
    # The picture contains the colours of weights 0 and 1 in viridis.
    for colour in ((68, 1, 84), (253, 231, 37)):
        assert (np.abs(picture.astype(int) - colour).max(axis=1) < 6).sum() > 100


def test_dollar_signs_are_not_parsed_as_formulas(tmp_path):
    labels = ["$5", "_", "a_b_c$"]
    plot_alignment(np.eye(3)[None], labels, labels, tmp_path / "a.png", title="$5_a_b and $6")
    assert (tmp_path / "a.png").exists()


def test_panels_need_a_name_each(tmp_path):
    weights = np.eye(2)[None].repeat(2, 0)
    plot_alignment(weights, ["a", "b"], ["x", "y"], tmp_path / "a.png", names=["soft", "hard"])
    assert (tmp_path / "a.png").exists()
    with pytest.raises(ValueError, match=r"1 name\(s\) for 2 heads"):
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
        plot_extrapolation({"rotary": {8: 1.0, 16: 2.0}}, training_length=8, title="T"),
        plot_scores_by_length({"gru": [9.0, 5.0]}, bins=["1", "2"], counts=[20, 30], score="BLEU", title="T"),
        plot_regression(fits, query=query, truth=query, key=key, value=key, title="T"),
        plot_classification(
            plane,
            x=np.arange(3.0),
            y=np.arange(2.0),
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


def test_the_legend_names_smoothed_labels_only_if_they_are_used():
    def first_label(loss):
        axes = plot_losses([{"step": 1, "loss": loss, "nll": 2.0}]).axes[0]
        return axes.get_legend_handles_labels()[1][0]

    assert [first_label(2.0), first_label(2.1)] == ["training", "training, smoothed labels"]


def test_ticks_of_unlabeled_cells_are_integers():
    figure = plot_matrices(np.eye(5), xlabel="key", ylabel="query", colorbar_label="weight", title="T")
    figure.draw_without_rendering()
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        assert all(tick == int(tick) for tick in axis.get_ticklocs())
    assert (figure.get_supxlabel(), figure.get_suptitle()) == ("key", "T")


def test_every_head_of_every_layer_is_drawn(rng, tmp_path):
    weights = rng.dirichlet(np.ones(3), (2, 3, 4))
    figure = plot_heads(weights, list("abcd"), list("xyz"), tmp_path / "heads.png", title="two layers")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [f"layer {n}, head {h}" for n in range(2) for h in range(3)]
    for axes, (layer, head) in zip(figure.axes, np.ndindex(2, 3), strict=False):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights[layer, head])
    crowded = plot_heads(rng.dirichlet(np.ones(4), (4, 8, 4)), list("abcd"), list("abcd"))
    assert "position of the key" in [text.get_text() for text in crowded.texts]
    with pytest.raises(ValueError, match=r"are not \(L, H, 4, 2\)"):
        plot_heads(weights, list("abcd"), list("xy"))


def test_head_scores_are_written_into_their_cells(rng, tmp_path):
    scores = rng.random((2, 3))
    figure = plot_head_scores(scores, tmp_path / "scores.png", score="entropy (nats)")
    cell_texts = [text.get_text() for text in figure.axes[0].texts]
    assert cell_texts == [f"{number:.2f}" for number in scores.ravel()]
    assert figure.axes[1].get_ylabel() == "entropy (nats)"
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"], "layers"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"], "heads"


def test_colours_of_signed_scores_are_centered_at_zero():
    scores = np.array([[-0.1, 0.4, 0.0]])
    image = plot_head_scores(scores, score="loss added").axes[0].images[0]
    assert image.get_clim() == (-0.4, 0.4)
    # Scores of one sign use the full scale.
    assert plot_head_scores(scores + 0.1, score="entropy").axes[0].images[0].get_clim() == (0.0, 0.5)


def test_masks_have_two_colours():
    figure = plot_matrices(
        {"causal": np.tril(np.ones((5, 5), bool))}, xlabel="key", ylabel="query", colorbar_label="may attend"
    )
    assert figure.axes[0].images[0].cmap.N == 2
    assert [text.get_text() for text in figure.axes[-1].get_yticklabels()] == ["no", "yes"]


def test_the_lens_shows_the_most_probable_token(rng, tmp_path):
    logits = rng.normal(size=(3, 2, 5))
    figure = plot_logit_lens(logits, ["a", "b"], list("vwxyz"), tmp_path / "lens.png", title="lens")
    cell_texts = [text.get_text() for text in figure.axes[0].texts]
    assert cell_texts == ["vwxyz"[i] for i in logits[::-1].argmax(-1).ravel()], "the last layer on top"
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["after layer 1", "after layer 0", "embeddings"]
    with pytest.raises(ValueError, match=r"are not \(L \+ 1, 1, 5\)"):
        plot_logit_lens(logits, ["a"], list("vwxyz"))


def test_similarity_is_the_cosine(rng):
    vectors = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, -3.0], [-1.0, 0.0], [0.0, 0.0]])
    expected = [[1, 1, 0, -1, 0], [1, 1, 0, -1, 0], [0, 0, 1, 0, 0], [-1, -1, 0, 1, 0], [0, 0, 0, 0, 0]]
    np.testing.assert_allclose(cosine_similarity(vectors), expected, atol=1e-12)
    figure = plot_similarity(vectors, list("abcde"), axis_label="token", title="five")
    assert figure.axes[0].images[0].get_clim() == (-1.0, 1.0)


def test_several_runs_are_drawn_in_one_figure(tmp_path):
    runs = {
        "one": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "valid_loss": 1.5}],
        "two": [{"step": 1, "loss": 3.0}],
    }
    figure = plot_runs(runs, tmp_path / "runs.png", title="two runs")
    assert [len(axes.lines) for axes in figure.axes] == [2, 1]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "training loss (nats per token)",
        "validation loss (nats per token)",
    ]
    with pytest.raises(ValueError, match="no run has 'bleu'; the first has loss, valid_loss"):
        plot_runs(runs, values={"bleu": "BLEU"})


def test_matrices_need_one_shape_and_labels_that_fit():
    with pytest.raises(ValueError, match="matrices of one shape"):
        plot_matrices({"a": np.ones((2, 2)), "b": np.ones((2, 3))}, xlabel="", ylabel="", colorbar_label="")
    with pytest.raises(ValueError, match="3 labels for 2 rows"):
        plot_matrices(np.ones((2, 2)), rows=list("abc"), xlabel="", ylabel="", colorbar_label="")
