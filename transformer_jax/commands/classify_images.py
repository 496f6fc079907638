"""Train or fine-tune a vision model on classes of images, probe a frozen one, and classify images."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformer_jax.commands.parsing import Parsed, flag_value, parse_run
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.data.corpora.image_files import kind_of
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.vision.image_classification import ENTRY
from transformer_jax.tasks.vision.trained import TrainedImageClassifier, TrainedImageEncoder

DESCRIPTION = (
    "Train a vision model on classes of images, fine-tune or probe a pretrained one, and classify with it."
)


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. With --images a published folder may stand here
    too. None: runs/NAME-OF-THE-IMAGES-MODEL-PRESET, without a preset where there is a start."""
    probe: Literal["none", "linear", "knn"] = "none"
    """How good the features of --start-from are, which stay as they are: linear trains a classifier on them,
    knn lets the nearest training images vote."""
    images: tuple[str, ...] = ()
    """Images for the trained run, or published folder, in --run-dir: print the class of each; no training."""
    plot_attention: str | None = None
    """With --images: draw what the class token attends to, by head, to this picture."""
    html: str | None = None
    """With --images: write the attention of the first image as an interactive page."""
    json: bool = False
    """With --images: print one JSON object a line. With --dry-run --topology: one object last."""


def _recipe_of(argv: Sequence[str]) -> Any:
    def choose(keywords: Mapping[str, Any]) -> str:
        if keywords.get("start"):
            return "probe" if flag_value(argv, "--probe") in ("linear", "knn") else "fine_tune"
        return "images" if flag_value(argv, "--data") else "digits"

    return choose


def use(own: Arguments, size: int | None = None) -> None:
    """Prints the class of each image, and draws what the model attends to.

    Args:
      own: the flags.
      size: in pixels that images are read in; None is the run's, 0 the model's.

    Raises:
      UserError: no run, a folder of another kind, a size that patches do not divide, or an image that cannot be
        read.
    """
    if own.run_dir is None:
        raise UserError("name the trained run with `run_dir`")
    run = load(own.run_dir)
    if not isinstance(run, TrainedImageEncoder):
        raise UserError(f"{own.run_dir} holds a {type(run.model).__name__}, which does not read images")
    if size is not None:
        run = run.at_size(size or run.encoder.config.image_size)
    for file in own.images:
        if kind := kind_of(file):
            print(f"{file}: {kind}, converted to RGB", file=sys.stderr)
    if isinstance(run, TrainedImageClassifier):
        for file, found in zip(own.images, run.classify(list(own.images)), strict=True):
            probability = found.probabilities[found.label]
            if own.json:
                print(
                    json.dumps(
                        {"file": file, "label": found.label, "probability": probability}, ensure_ascii=False
                    )
                )
            else:
                print(f"{file}: {found.label} ({probability:.3f})")
    elif own.plot_attention is None and own.html is None:
        raise UserError(f"{own.run_dir} holds a {type(run.model).__name__}, which has no classes")
    if own.plot_attention is not None:
        from transformer_jax.plotting.image_maps import plot_attention_maps

        maps = [run.attention_maps(image) for image in own.images]
        try:
            plot_attention_maps(maps, path=own.plot_attention)
        except (OSError, ValueError) as error:
            raise UserError(f"{own.plot_attention}: the picture cannot be written ({error})") from None
    if own.html is not None:
        from transformer_jax.plotting.image_page import ImagePage

        ImagePage(run.attention_maps(own.images[0]), title=own.images[0]).save(own.html)


def draw_confusion(run_dir: pathlib.Path) -> None:
    """Draws the confusion matrix of each test set in a run's results into its folder."""
    results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    if not results.get("confusion"):
        return
    from transformer_jax.plotting.confusion import plot_confusion

    for name, counts in results["confusion"].items():
        plot_confusion(counts, results["labels"], run_dir / f"confusion_{name}.png", title=name)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax classify-images") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=_recipe_of(argv)
    )
    own: Arguments = parsed.own
    if planned(ENTRY, parsed, answers=bool(own.images)):
        return
    _check(own, parsed)
    if own.images:
        parsed.check_no_training(read=("size",))
        if is_first():
            use(own, parsed.config.task.size if "size" in parsed.named else None)
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    name = pathlib.Path(task.data).name.split(".")[0] if task.data else "digits"
    run_dir = pathlib.Path(own.run_dir or default_run_dir(ENTRY, parsed, name, preset=not parsed.config.start))
    if own.probe == "knn":
        from transformer_jax.tasks.vision.probe import probe_by_neighbours

        shown = probe_by_neighbours(parsed.config, run_dir)
        print("\n".join(shown) + f"\nrun folder   {run_dir}")
        return
    train(ENTRY, parsed.config, run_dir, parsed.execution)
    if is_first():
        draw_confusion(run_dir)


def _check(own: Arguments, parsed: Parsed) -> None:
    if own.probe != "none" and not parsed.config.start:
        raise UserError("`probe` measures a pretrained encoder: name it with `start`")
    if own.probe == "linear" and parsed.config.recipe != "probe":
        raise UserError(
            f"`probe` linear trains a classifier alone, the recipe {parsed.config.recipe} more than that: "
            "leave `recipe` out"
        )
    if not own.images and (own.plot_attention is not None or own.html is not None):
        raise UserError("`plot_attention` and `html` show images: name them with `images`")
    if own.html is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(own.html)
