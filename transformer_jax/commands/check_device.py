"""Check and time an attached accelerator, next to PyTorch if it is installed."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tyro

from transformer_jax.commands.interleaved_rounds import compare
from transformer_jax.errors import UserError

DESCRIPTION = """Check and time the attached accelerator, next to PyTorch if it is installed.

Parts: kernels (attention kernels against plain attention in float32), one training step each of gpt (GPT-2
124M), gpt_unrolled (the same without a loop over layers), llama (350M), translator (Transformer base), bert
(base) and vit (ViT-B/16), and generation with GPT-2 124M for 1, 8 and 64 rows. It takes at most eight
minutes."""

PARTS = ("kernels", "gpt", "gpt_unrolled", "llama", "translator", "bert", "vit", "generation")
# Limit of relative differences, above the rounding errors of bfloat16.
_TOLERANCE = 0.05
_ROUNDS, _CALLS = 5, 4
# Minimum seconds for a part, below which it is skipped.
_MIN_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of the check."""

    only: tuple[str, ...] = ()
    """Parts to run; empty means all."""
    seconds: float = 450.0
    """Time limit. Parts that do not end within it are reported as such."""
    trial: bool = False
    """Use small sizes, which a CPU can run, to try the command."""
    without_torch: bool = False
    """Do not run the peers in PyTorch."""
    write: str | None = None
    """JSON file to which the results are written after each part."""
    json: bool = False
    """Print the results as a JSON object in the last line."""


def _describe_device(connection: Any) -> None:
    """Send the attached device's platform and name, and the version of JAX."""
    import jax

    device = jax.devices()[0]
    connection.send((device.platform, device.device_kind, jax.__version__, len(jax.devices())))


def attached_device() -> tuple[str, str, str, int]:
    """Return (platform, name, version of JAX, number of devices), asking a child process.

    A process that uses a GPU holds its memory, which the parts need.
    """
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    process = context.Process(target=_describe_device, args=(child,), daemon=True)
    process.start()
    child.close()
    try:
        return connection.recv()
    except EOFError:
        raise UserError("JAX cannot open a device; its error is above") from None
    finally:
        process.join()


def sides_of(part: str, arguments: Arguments, *, accelerator: bool) -> tuple[dict[str, Callable], str | None]:
    """Return (the functions that measure a part, by side; the reason why its peer is missing, or None)."""
    from transformer_jax.commands import device_parts, torch_peers

    ours = {"kernels": device_parts.our_kernels, "generation": device_parts.our_generation}
    peers = {
        "gpt": (torch_peers.torch_step, "torch"),
        "gpt_unrolled": (torch_peers.torch_step, "torch"),
        "generation": (torch_peers.torch_generation, "transformers"),
    }
    sides: dict[str, Callable] = {"ours": ours.get(part, device_parts.our_step)}
    if part not in peers or arguments.without_torch:
        return sides, None
    function, needs = peers[part]
    reason = torch_peers.missing_peer(needs=needs, accelerator=accelerator)
    return (sides | {"torch": function} if reason is None else sides), reason


def measure(part: str, arguments: Arguments, *, accelerator: bool, timeout: float) -> dict[str, Any]:
    """Run a part and return its results; see `summarize`.

    Raises:
      UserError: The part does not fit into memory.
      SystemExit: A process of the part ended, or the time is up.
    """
    from transformer_jax.commands import device_parts

    sides, reason = sides_of(part, arguments, accelerator=accelerator)
    rounds, calls = (1, 1) if arguments.trial else (_ROUNDS, _CALLS)
    jobs = {part: calls}
    if part == "kernels":
        rounds, jobs = 1, {part: 1}
    if part == "generation":
        jobs = dict.fromkeys(device_parts.generation_jobs(arguments.trial), 1)
    report = compare(jobs, sides, (part, arguments.trial), rounds, timeout=timeout)
    results = summarize(part, report, arguments.trial)
    return results | ({} if reason is None else {"peer": reason})


def summarize(part: str, report: Mapping[str, Any], trial: bool) -> dict[str, Any]:
    """Return the results of a part as JSON values.

    Args:
      part: Name of the part.
      report: Result of `compare`.
      trial: Whether the sizes were small.
    """
    from transformer_jax.commands import device_parts

    if part == "kernels":
        return {"differences": report[part]["results"]["ours"]}
    if part == "generation":
        results: dict[str, Any] = {}
        jobs = device_parts.generation_jobs(trial)
        for rows in dict.fromkeys(rows for rows, _, _ in jobs.values()):
            (first, _), (last, more) = ((name, new) for name, (count, _, new) in jobs.items() if count == rows)
            values = results[f"rows_{rows}"] = {}
            for side in (side for side in report[first] if side != "results"):
                seconds = report[first][side]["seconds"], report[last][side]["seconds"]
                values[side] = {
                    "first_token_seconds": seconds[0],
                    "token_seconds": max(0.0, seconds[1] - seconds[0]) / (more - 1),
                    "tokens_per_second": rows * more / seconds[1],
                }
            if "torch" in values:
                ours, torch = (values[side]["tokens_per_second"] for side in ("ours", "torch"))
                values["ratio"] = ours / torch
        return results
    values = report[part]
    facts = values["results"]["ours"]
    seconds = values["ours"]["seconds"]
    results = {
        "seconds": seconds,
        "unit": device_parts.STEPS[part].units,
        "units_per_second": facts["units"] / seconds,
        "utilization": None if facts["peak"] is None else facts["flops"] / facts["peak"] / seconds,
        "modelled_seconds": facts["modelled_seconds"],
        "peak_bytes": facts["peak_bytes"],
        "planned_bytes": facts["planned_bytes"],
        "loss": facts["loss"],
    }
    if "torch" in values:
        peer = values["results"]["torch"]
        rate = peer["units"] / values["torch"]["seconds"]
        results |= {
            "torch_units_per_second": rate,
            "torch_peak_bytes": peer["peak_bytes"],
            "ratio": results["units_per_second"] / rate,
        }
    return results


def lines_of(part: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table for a part."""
    if "skipped" in results:
        yield f"{part:<13} skipped: {results['skipped']}"
        return
    if part == "kernels":
        for name, difference in results["differences"].items():
            mark = "" if difference <= _TOLERANCE else f"  ABOVE {_TOLERANCE}"
            yield f"{part:<13} {name}: relative difference {difference:.1e}{mark}"
        return
    if part == "generation":
        for name, values in results.items():
            if not name.startswith("rows_"):
                continue
            for side in (side for side in values if side != "ratio"):
                value = values[side]
                yield (
                    f"{part:<13} {name.removeprefix('rows_'):>2} rows, {side}: first token "
                    f"{value['first_token_seconds'] * 1e3:.1f} ms, then {value['token_seconds'] * 1e3:.2f} ms, "
                    f"{value['tokens_per_second']:,.0f} tokens/s"
                )
            if "ratio" in values:
                yield f"{part:<13} {name.removeprefix('rows_'):>2} rows: {values['ratio']:.2f}x torch"
    else:
        line = (
            f"{part:<13} {results['seconds'] * 1e3:.1f} ms, "
            f"{results['units_per_second']:,.0f} {results['unit']}/s"
        )
        if results["utilization"] is not None:
            modelled = results["modelled_seconds"] * 1e3
            line += f", {results['utilization']:.0%} of the peak, modelled {modelled:.1f} ms"
        memory = f"planned {results['planned_bytes'] / 2**30:.2f} GiB"
        if results["peak_bytes"] is not None:
            memory = f"peak {results['peak_bytes'] / 2**30:.2f} GiB, {memory}"
        yield f"{line}, {memory}"
        if "ratio" in results:
            rate = f"{results['torch_units_per_second']:,.0f} {results['unit']}/s"
            yield f"{part:<13} torch {rate}: {results['ratio']:.2f}x torch"
    if "peer" in results:
        yield f"{part:<13} no peer: {results['peer']}"


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax check-device") -> None:
    """Run the command.

    Raises:
      UserError: A flag is invalid, no accelerator is attached, or a kernel is wrong.
    """
    arguments = tyro.cli(Arguments, prog=prog, description=DESCRIPTION, args=argv)
    if unknown := sorted(set(arguments.only) - set(PARTS)):
        raise UserError(f"`only` has unknown parts {', '.join(unknown)}: parts are {', '.join(PARTS)}")
    if not 0 < arguments.seconds < math.inf:
        raise UserError(f"`seconds` {arguments.seconds} is not a finite number above 0")
    target = None if arguments.write is None else pathlib.Path(arguments.write)
    if target is not None and not target.parent.is_dir():
        raise UserError(f"`write` {target}: there is no folder {target.parent}")
    if target is not None:
        try:
            target.open("a").close()
        except OSError as error:
            raise UserError(f"`write` {target}: {error.strerror}") from None
    try:
        from transformer_jax.commands import device_parts  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install {error.name}") from None
    deadline = time.monotonic() + arguments.seconds
    # Both sides use the device at the same time; JAX would otherwise take most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform, name, version, count = attached_device()
    if platform == "cpu" and not arguments.trial:
        raise UserError(
            "JAX has no accelerator: install JAX for it, or add `trial` to try the command on a CPU"
        )
    from transformer_jax.distributed.targets import CHIPS

    known = any(chip.name == name for chip in CHIPS.values())
    note = "" if known or platform == "cpu" else "; unknown chip, so its utilization is not computed"
    print(f"{name} ({count} attached, one is used), jax {version}{note}", flush=True)
    results: dict[str, Any] = {"device": name, "jax": version, "trial": arguments.trial, "parts": {}}
    for part in PARTS:
        if arguments.only and part not in arguments.only:
            continue
        left = deadline - time.monotonic()
        try:
            if left < _MIN_SECONDS:
                raise SystemExit("the time limit")
            values = measure(part, arguments, accelerator=platform != "cpu", timeout=left)
        except (UserError, SystemExit) as error:
            values = {"skipped": str(error).removeprefix("error: ")}
        results["parts"][part] = values
        for line in lines_of(part, values):
            print(line, flush=True)
        if target is not None:
            target.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(results))
    differences = results["parts"].get("kernels", {}).get("differences", {})
    if wrong := [mask for mask, value in differences.items() if not value <= _TOLERANCE]:
        raise UserError(f"attention differs from plain attention by more than {_TOLERANCE}: {', '.join(wrong)}")
