"""Run folders of format 1 converted to the present format."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.models.registry import DECODERS
from transformer_jax.tasks import TASKS
from transformer_jax.training.checkpoints import rewrite_manifest
from transformer_jax.training.config import Optimization, field_names, run_config_from_json
from transformer_jax.training.metrics import FILE, read_metrics
from transformer_jax.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    FORMAT_VERSION,
    models_of,
    read_json,
    write_json,
)
from transformer_jax.training.totals import Totals

_TASKS = {"translation": "translation", "language": "language_modeling"}
# Format 1 left Adam's constants to the package.
_ADAM = {
    "translation": dict(b1=0.9, b2=0.98, epsilon=1e-9),
    "language_modeling": dict(b1=0.9, b2=0.95, epsilon=1e-8),
}
_BEST = {"translation": "best_valid_bleu", "language_modeling": "best_valid_loss"}
_POSITIONS = {
    "rotary": {"rotary_theta": "theta"},
    "bucketed": {"relative_buckets": "buckets", "relative_distance": "max_distance"},
    "shaw": {"shaw_limit": "limit"},
}


def convert(folder: str | pathlib.Path) -> str:
    """Converts a run of format 1 in its folder; it then resumes bit for bit. Returns a line on what was done.

    The old config is kept as `config.format_1.json`. A conversion that was interrupted can be repeated: the
    config is written last.

    Raises:
      UserError: not a run of format 1.
    """
    folder = pathlib.Path(folder)
    old = read_json(folder / CONFIG)
    if old.get("format_version") != 1:
        raise UserError(
            f"{folder / CONFIG}: format version {old.get('format_version')}, not 1: nothing to convert"
        )
    task = _TASKS[old.get("task", "language" if old["model"] in DECODERS else "translation")]
    described = converted_config(old, task)
    files = [name for name in ("tokenizer.json", "lengths.npy") if (folder / name).exists()]
    rows = read_metrics(folder)
    steps = 0
    for manifest in sorted((folder / CHECKPOINTS).glob("*/manifest.json")):
        if manifest.parent.name.isdigit():
            step = int(manifest.parent.name)
            rewrite_manifest(manifest.parent, totals_at(rows, step, _BEST[task]))
            steps += 1
    unit = "target_tokens" if task == "translation" else "tokens"
    if unit != "target_tokens":
        renamed = [{unit if name == "target_tokens" else name: v for name, v in row.items()} for row in rows]
        (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in renamed), encoding="utf-8")
    write_json(folder / "config.format_1.json", old)
    write_json(folder / CONFIG, described | {"files": sorted(files)})
    return f"{folder}: converted from format 1 to {FORMAT_VERSION}, {steps} checkpoint(s)"


def converted_config(old: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The `config.json` of a run of format 1 in the present format, but for its files.

    Raises:
      UserError: a model or a value that this package does not know.
    """
    entry, flat = TASKS[task], old["training"]
    models = models_of(entry)
    if old["model"] not in models:
        raise UserError(f"unknown model {old['model']!r}; known are {', '.join(models)}")
    true_config = converted_model(old["model_config"])
    run = {
        "task": {name: value for name, value in flat.items() if name in field_names(entry.config)},
        # The vocabulary as it was asked for; the data gave the true one.
        "model": true_config | {"vocab_size": flat["vocab_size"]},
        "optimization": {n: v for n, v in flat.items() if n in field_names(Optimization)} | _ADAM[task],
        "start": [flat["start_from"]] if flat.get("start_from") else [],
        "trainable": ".*",
        "seed": flat["seed"],
        "recipe": flat.get("recipe") or next(iter(entry.recipes)),
        "preset": flat["preset"],
    }
    kind = models[old["model"]].config
    run_config_from_json(run, task=entry.config, model=kind, what=CONFIG)
    return dict(
        format_version=FORMAT_VERSION,
        task=task,
        model=old["model"],
        run=run,
        model_config=true_config,
        fingerprint=old["corpus_fingerprint"],
    )


def converted_model(old: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config of format 1 in the present one: the positions of a GPT are one text."""
    new = dict(old)
    if "shaw_limit" not in new:
        return new
    kind = new["positions"]
    own = {name: new.pop(old_name) for old_name, name in _POSITIONS.get(kind, {}).items()}
    for fields in _POSITIONS.values():
        for old_name in fields:
            new.pop(old_name, None)
    if new.pop("rotary_scaling", None) is not None:
        raise UserError("rotary_scaling of a GPT of format 1 cannot be converted")
    new["positions"] = kind + (":" + ",".join(f"{n}={v}" for n, v in own.items()) if own else "")
    return new


def totals_at(rows: list[dict[str, Any]], step: int, best: str) -> Totals:
    """The totals of a run of format 1 at a step, from its record."""
    last: dict[str, Any] = {}
    for row in rows:
        if row["step"] <= step:
            last = row
    return Totals(
        seconds=last.get("seconds", 0.0),
        weight=last.get("target_tokens", last.get("tokens", 0.0)),
        skipped_steps=int(last.get("skipped_steps", 0)),
        loss_spikes=int(last.get("loss_spikes", 0)),
        best_step=last.get("best_step"),
        best_value=last.get(best),
    )
