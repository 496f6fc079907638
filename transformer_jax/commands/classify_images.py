"""Train or fine-tune a vision model on classes of images, probe a frozen model, and classify images."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformer_jax.commands.parsing import Parsed, flag_value, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.data.corpora.image_files import conversion_of
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
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. With --images also a published folder. None:
    runs/DATA-MODEL-PRESET, or runs/DATA-MODEL with --start-from."""
    probe: Literal["none", "linear", "knn"] = "none"
    """Measure the frozen features of --start-from: linear trains a classifier on them, knn lets the nearest
    training images vote."""
    images: tuple[str, ...] = ()
    """Classify these images with the run or published folder in --run-dir; no training."""
    plot_attention: str | None = None
    """With --images: draw the attention of the class token, by head, to this picture."""
    html: str | None = None
    """With --images: write the attention over the first image as an interactive page."""
    json: bool = False
    """With --images: print a JSON object per line. With --dry-run --topology: print a JSON object last."""


def _recipe_of(argv: Sequence[str]) -> Any:
    def choose(keywords: Mapping[str, Any]) -> str:
        if keywords.get("start"):
            return "probe" if flag_value(argv, "--probe") in ("linear", "knn") else "fine_tune"
        return "images" if flag_value(argv, "--data") else "digits"

    return choose


def use(flags: Arguments, size: int | None = None) -> None:
    """Print the class of each image, and draw the model's attention.

    Args:
      flags: The command's flags.
      size: Size in pixels of the images that the model reads; None means the run's, 0 the model's.

    Raises:
      UserError: No run is named, the folder holds another kind of model, patches do not divide the size, or an
        image cannot be read.
    """
    if flags.run_dir is None:
        raise UserError("name the trained run with `run_dir`")
    run = load(flags.run_dir)
    if not isinstance(run, TrainedImageEncoder):
        raise UserError(f"{flags.run_dir} holds a {type(run.model).__name__}, which does not read images")
    if size is not None:
        run = run.at_size(size or run.encoder.config.image_size)
    for file in flags.images:
        if kind := conversion_of(file):
            print(f"{one_line(str(file))}: {kind}, converted to RGB", file=sys.stderr)
    if isinstance(run, TrainedImageClassifier):
        for file, (label, probabilities) in zip(flags.images, run.classify(list(flags.images)), strict=True):
            probability = probabilities[label]
            if flags.json:
                answer = {"file": file, "label": label, "probability": probability}
                print(json.dumps(answer, ensure_ascii=False))
            else:
                print(one_line(f"{file}: {label} ({probability:.3f})"))
    elif flags.plot_attention is None and flags.html is None:
        raise UserError(f"{flags.run_dir} holds a {type(run.model).__name__}, which has no classes")
    if flags.plot_attention is not None:
        from transformer_jax.plotting.image_maps import plot_attention_maps

        maps = [run.attention_maps(image) for image in flags.images]
        try:
            plot_attention_maps(maps, path=flags.plot_attention)
        except (OSError, ValueError) as error:
            raise UserError(f"{flags.plot_attention}: the picture cannot be written ({error})") from None
    if flags.html is not None:
        from transformer_jax.plotting.image_page import ImagePage

        ImagePage(run.attention_maps(flags.images[0]), title=flags.images[0]).save(flags.html)


def draw_confusion(run_dir: pathlib.Path) -> None:
    """Draw the confusion matrix of each test set in a run's results into the run's folder."""
    results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    if not results.get("confusion"):
        return
    from transformer_jax.plotting.confusion import plot_confusion

    for name, counts in results["confusion"].items():
        plot_confusion(counts, results["labels"], run_dir / f"confusion_{name}.png", title=name)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax classify-images") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=_recipe_of(argv)
    )
    flags: Arguments = parsed.flags
    if planned(ENTRY, parsed, answers=bool(flags.images)):
        return
    _check(flags, parsed)
    if flags.images:
        parsed.check_no_training(used=("size",))
        if is_first():
            use(flags, parsed.config.task.size if "size" in parsed.named else None)
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    name = pathlib.Path(task.data).name.split(".")[0] if task.data else "digits"
    run_dir = pathlib.Path(
        flags.run_dir or default_run_dir(ENTRY, parsed, name, preset=not parsed.config.start)
    )
    if flags.probe == "knn":
        from transformer_jax.tasks.vision.probe import probe_by_neighbors

        lines = probe_by_neighbors(parsed.config, run_dir)
        print("\n".join(lines) + f"\nrun folder   {run_dir}")
        return
    train(ENTRY, parsed.config, run_dir, parsed.execution)
    if is_first():
        draw_confusion(run_dir)


def _check(flags: Arguments, parsed: Parsed) -> None:
    if flags.probe != "none" and not parsed.config.start:
        raise UserError("`probe` measures a pretrained encoder: name it with `start`")
    if flags.probe == "linear" and parsed.config.recipe != "probe":
        raise UserError(
            f"`probe` linear trains only a classifier, but the recipe {parsed.config.recipe} trains more: "
            "leave `recipe` out"
        )
    if not flags.images and (flags.plot_attention is not None or flags.html is not None):
        raise UserError("`plot_attention` and `html` need images: name them with `images`")
    if flags.html is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(flags.html)
