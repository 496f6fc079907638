"""Train a captioner on images with captions, score it, and caption images."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from transformer_jax.commands.captioned_data import check_images, default_recipe
from transformer_jax.commands.parsing import Parsed, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, planned, run_dir_of, train
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.multimodal.captioning import ENTRY, TrainedCaptioner

DESCRIPTION = (
    "Train a captioner on images with captions, score its captions of a test set, and caption images. Without "
    "--data it learns drawn scenes."
)


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. With --images also a published folder. None:
    runs/DATA-MODEL."""
    images: tuple[str, ...] = ()
    """Caption these images with the run or published folder in --run-dir; no training."""
    plot_attention: str | None = None
    """With --images: draw the patches that each word attends to, to this picture; each image starts a row."""
    plot_layer: int = -1
    """With --plot-attention: the decoder layer to draw, counted from 0, or negative from the end."""
    html: str | None = None
    """With --images: write the attention of the first image's caption as an interactive page."""
    json: bool = False
    """With --images: print a JSON object per line. With --dry-run --topology: print a JSON object last."""


def _check(flags: Arguments) -> None:
    if not flags.images and (flags.plot_attention is not None or flags.html is not None):
        raise UserError("`plot_attention` and `html` need `images`")
    if flags.images and flags.run_dir is None:
        raise UserError("name the trained run with `run_dir`")
    from transformer_jax.plotting.page import check_writable

    if flags.plot_attention is not None:
        check_writable(flags.plot_attention, "plot_attention")
    if flags.html is not None:
        check_writable(flags.html)


def use(parsed: Parsed) -> None:
    """Print a caption of each image, and draw the attention of its words.

    Raises:
      UserError: The folder holds another kind of model, an image cannot be read, or a file cannot be written.
    """
    flags: Arguments = parsed.flags
    assert flags.run_dir is not None
    run = load(flags.run_dir, compute=parsed.execution.compute)
    if not isinstance(run, TrainedCaptioner):
        raise UserError(f"{flags.run_dir} holds a {type(run.model).__name__}, not a captioner")
    task = parsed.config.task
    search: dict[str, Any] = dict(
        beam_size=task.beam_size if "beam_size" in parsed.named else None,
        alpha=task.length_penalty if "length_penalty" in parsed.named else None,
    )
    for file, caption in zip(flags.images, run.caption(list(flags.images), **search), strict=True):
        if flags.json:
            print(json.dumps({"file": file, "caption": caption}, ensure_ascii=False))
        else:
            print(one_line(f"{file}: {caption}"))
    if flags.plot_attention is not None:
        from transformer_jax.plotting.captions import plot_captions

        alignments = [run.align(image, **search) for image in flags.images]
        try:
            plot_captions(alignments, layer=flags.plot_layer, path=flags.plot_attention)
        except (OSError, ValueError) as error:
            raise UserError(f"{flags.plot_attention}: the picture cannot be written ({error})") from None
    if flags.html is not None:
        from transformer_jax.plotting.image_page import ImagePage

        alignment = run.align(flags.images[0], **search)
        ImagePage.of_caption(alignment, title=f"{flags.images[0]}: {alignment.text}").save(flags.html)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax caption") -> None:
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
        parsed.check_no_training(used=("beam_size", "length_penalty"))
        if is_first():
            use(parsed)
        return
    parsed.execution.processes.join()
    train(ENTRY, parsed.config, pathlib.Path(run_dir_of(ENTRY, parsed, embedded="scenes")), parsed.execution)
