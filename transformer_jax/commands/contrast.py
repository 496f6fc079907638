"""Train image and text vectors on captioned images, retrieve with them, and classify by labels in words."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from transformer_jax.commands.captioned_data import check_images, default_recipe
from transformer_jax.commands.parsing import Parsed, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, planned, run_dir_of, train
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.multimodal.contrastive import ENTRY, TEMPLATES, TrainedClip

DESCRIPTION = (
    "Train an image and a text encoder whose vectors are similar for pairs (CLIP or SigLIP), score retrieval "
    "in both directions, and classify images by labels in words. Without --data it learns drawn scenes."
)


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. With --images also a published folder. None:
    runs/DATA-MODEL."""
    images: tuple[str, ...] = ()
    """Images to classify with --labels, or to find with --text, by the run or published folder in --run-dir."""
    labels: tuple[str, ...] = ()
    """With --images: classify each image among these labels, which need not occur in the training data."""
    templates: tuple[str, ...] = TEMPLATES
    """With --labels: captions with {} in the place of the label, whose vectors are averaged."""
    text: str | None = None
    """With --images: list the images by their similarity to this text, most similar first."""
    json: bool = False
    """With --images: print a JSON object per line. With --dry-run --topology: print a JSON object last."""


def _check(flags: Arguments) -> None:
    if not flags.images:
        if flags.labels or flags.text is not None:
            raise UserError("`labels` and `text` need `images`")
        return
    if flags.run_dir is None:
        raise UserError("name the trained run with `run_dir`")
    if bool(flags.labels) == (flags.text is not None):
        raise UserError("`images` needs either `labels` to classify among, or a `text` to compare with")


def use(parsed: Parsed) -> None:
    """Print the label of each image, or the images in the order of their similarity to a text.

    Raises:
      UserError: The folder holds another kind of model, or an image cannot be read.
    """
    flags: Arguments = parsed.flags
    assert flags.run_dir is not None
    run = load(flags.run_dir, compute=parsed.execution.compute)
    if not isinstance(run, TrainedClip):
        raise UserError(f"{flags.run_dir} holds a {type(run.model).__name__}, not a model of images and texts")
    images = list(flags.images)
    if flags.text is not None:
        similarity = run.similarity(images, [flags.text])[:, 0]
        for number in np.argsort(-similarity, kind="stable"):
            values = {"file": images[number], "similarity": float(similarity[number])}
            print(
                json.dumps(values, ensure_ascii=False)
                if flags.json
                else one_line(f"{similarity[number]:.3f} {images[number]}")
            )
        return
    for file, (label, probabilities) in zip(
        images, run.classify(images, flags.labels, templates=flags.templates), strict=True
    ):
        values = {"file": file, "label": label, "probability": probabilities[label]}
        print(
            json.dumps(values, ensure_ascii=False)
            if flags.json
            else one_line(f"{file}: {label} ({probabilities[label]:.3f})")
        )


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax contrast") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=default_recipe(argv)
    )
    flags: Arguments = parsed.flags
    if planned(ENTRY, parsed, answers=bool(flags.images)):
        return
    check_images(parsed)
    _check(flags)
    if flags.images:
        parsed.check_no_training()
        if is_first():
            use(parsed)
        return
    parsed.execution.processes.join()
    train(ENTRY, parsed.config, pathlib.Path(run_dir_of(ENTRY, parsed, embedded="scenes")), parsed.execution)
