"""Check and time an attached accelerator, next to PyTorch if it is installed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
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
# Name of the side of this package in the results.
OURS = "transformer_jax"
# Limit of relative differences, above the rounding errors of bfloat16.
_TOLERANCE = 0.05
_ROUNDS, _CALLS = 5, 4
# Minimum seconds for a part, below which it is skipped.
_MIN_SECONDS = 10
# Maximum seconds in which JAX must open a device.
_SECONDS_TO_OPEN = 120
_DESCRIBE_DEVICE = """import json, jax
devices = jax.devices()
print(json.dumps([devices[0].platform, devices[0].device_kind, jax.__version__, len(devices)]))"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of the check."""

    only: tuple[str, ...] = ()
    """Parts to run; empty means all."""
    seconds: float = 450.0
    """Time limit. Parts that do not finish within it are reported."""
    trial: bool = False
    """Use small sizes, which a CPU can run, to try the command."""
    without_torch: bool = False
    """Do not run the baselines in PyTorch."""
    write: str | None = None
    """JSON file to which the results are written after each part."""
    json: bool = False
    """Print the results as a JSON object in the last line."""


def attached_device(timeout: float) -> tuple[str, str, str, int]:
    """Return (platform, name, version of JAX, number of devices), asking a child process.

    A process that uses a GPU holds its memory, which the parts need.

    Args:
      timeout: Maximum seconds.

    Raises:
      UserError: JAX cannot open a device, or takes longer.
    """
    command = [sys.executable, "-c", _DESCRIBE_DEVICE]
    timeout = min(timeout, _SECONDS_TO_OPEN)
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UserError(f"JAX did not open a device within {timeout:.0f} seconds") from None
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise UserError(f"JAX cannot open a device: {lines[-1]}")
    platform, name, version, count = json.loads(child.stdout.splitlines()[-1])
    return platform, name, version, count


def sides_of(part: str, arguments: Arguments, *, accelerator: bool) -> tuple[dict[str, Callable], str | None]:
    """Return (functions that measure a part, by side; the reason why its baseline is missing, or None)."""
    from transformer_jax.commands import device_parts, torch_baselines

    ours = {"kernels": device_parts.our_kernels, "generation": device_parts.our_generation}
    baselines = {
        "gpt": (torch_baselines.torch_step, "torch"),
        "gpt_unrolled": (torch_baselines.torch_step, "torch"),
        "generation": (torch_baselines.torch_generation, "transformers"),
    }
    sides: dict[str, Callable] = {OURS: ours.get(part, device_parts.our_step)}
    if part not in baselines or arguments.without_torch:
        return sides, None
    function, needs = baselines[part]
    reason = torch_baselines.missing_baseline(needs=needs, accelerator=accelerator)
    return (sides | {"torch": function} if reason is None else sides), reason


def measure(part: str, arguments: Arguments, *, accelerator: bool, timeout: float) -> dict[str, Any]:
    """Run a part and return its results; see `summarize`.

    Raises:
      UserError: The part cannot run on this machine, for lack of memory or a package.
      TimeoutError: The time limit was reached.
      SystemExit: The process of the part ended with an error.
    """
    from transformer_jax.commands import device_parts

    sides, reason = sides_of(part, arguments, accelerator=accelerator)
    rounds, calls = (1, 1) if arguments.trial else (_ROUNDS, _CALLS)
    jobs = {part: calls}
    if part == "kernels":
        rounds, jobs = 1, {part: 1}
    if part == "generation":
        jobs = dict.fromkeys(device_parts.generation_jobs(arguments.trial), 1)
    report = compare(jobs, sides, (part, arguments.trial), rounds, timeout=timeout, optional=("torch",))
    results = summarize(part, report, arguments.trial)
    failures = report[list(jobs)[-1]]["failures"]
    reason = failures.get("torch", reason)
    return results | ({} if reason is None else {"no_baseline": reason})


def summarize(part: str, report: Mapping[str, Any], trial: bool) -> dict[str, Any]:
    """Return the results of a part as JSON values.

    Args:
      part: Name of the part.
      report: Result of `compare`.
      trial: Whether the sizes were small.
    """
    from transformer_jax.commands import device_parts

    if part == "kernels":
        return {"masks": report[part]["results"][OURS]}
    if part == "generation":
        results: dict[str, Any] = {}
        jobs = device_parts.generation_jobs(trial)
        for rows in dict.fromkeys(rows for rows, _, _ in jobs.values()):
            (first, _), (last, more) = ((name, new) for name, (count, _, new) in jobs.items() if count == rows)
            values = results[f"rows_{rows}"] = {}
            for side in (side for side in report[last] if side in (OURS, "torch")):
                seconds = report[first][side]["seconds"], report[last][side]["seconds"]
                values[side] = {
                    "first_token_seconds": seconds[0],
                    "token_seconds": max(0.0, seconds[1] - seconds[0]) / (more - 1),
                    "tokens_per_second": rows * more / seconds[1],
                }
            if "torch" in values:
                rates = {side: values[side]["tokens_per_second"] for side in (OURS, "torch")}
                values["ratio"] = rates[OURS] / rates["torch"]
        return results
    values = report[part]
    facts = values["results"][OURS]
    seconds, peak = values[OURS]["seconds"], facts["peak_flops_per_second"]
    results = {
        "seconds": seconds,
        "unit": device_parts.STEPS[part].units,
        "units_per_second": facts["units"] / seconds,
        "utilization": None if peak is None else facts["flops"] / peak / seconds,
        "seconds_modelled": facts["seconds_modelled"],
        "peak_bytes": facts["peak_bytes"],
        "planned_bytes": facts["planned_bytes"],
        "loss": facts["loss"],
    }
    if "torch" in values:
        baseline = values["results"]["torch"]
        rate = baseline["units"] / values["torch"]["seconds"]
        results |= {
            "torch_units_per_second": rate,
            "torch_peak_bytes": baseline["peak_bytes"],
            "ratio": results["units_per_second"] / rate,
        }
    return results


def lines_of(part: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table for a part."""
    for state in ("skipped", "failed"):
        if state in results:
            yield f"{part:<13} {state}: {results[state]}"
            return
    if part == "kernels":
        for name, result in results["masks"].items():
            difference = result["difference"]
            mark = "" if difference <= _TOLERANCE else f"  ABOVE {_TOLERANCE}"
            reason = f" ({result['reason']})" if result["reason"] else ""
            kernel = result["kernel"] or f"no kernel{reason}"
            yield f"{part:<13} {name}: relative difference {difference:.1e}{mark}, {kernel}"
        return
    if part == "generation":
        for name, values in results.items():
            if not name.startswith("rows_"):
                continue
            for side in (side for side in values if side != "ratio"):
                value = values[side]
                yield (
                    f"{part:<13} batch {name.removeprefix('rows_')}, {side}: first token "
                    f"{value['first_token_seconds'] * 1e3:.1f} ms, then {value['token_seconds'] * 1e3:.2f} ms, "
                    f"{value['tokens_per_second']:,.0f} tokens/s"
                )
            if "ratio" in values:
                yield f"{part:<13} batch {name.removeprefix('rows_')}: {values['ratio']:.2f}x torch"
    else:
        line = (
            f"{part:<13} {results['seconds'] * 1e3:.1f} ms, "
            f"{results['units_per_second']:,.0f} {results['unit']}/s"
        )
        if results["utilization"] is not None:
            modelled = results["seconds_modelled"] * 1e3
            line += f", modelled {modelled:.1f} ms, utilization {results['utilization']:.0%}"
        memory = f"planned memory {results['planned_bytes'] / 2**30:.2f} GiB"
        if results["peak_bytes"] is not None:
            memory += f", used {results['peak_bytes'] / 2**30:.2f} GiB"
        yield f"{line}, {memory}"
        if "ratio" in results:
            rate = f"{results['torch_units_per_second']:,.0f} {results['unit']}/s"
            yield f"{part:<13} torch {rate}: {results['ratio']:.2f}x torch"
    if "no_baseline" in results:
        yield f"{part:<13} no baseline: {results['no_baseline']}"


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax check-device") -> None:
    """Run the command.

    Raises:
      UserError: A flag is invalid, no accelerator is attached, a part ended with an error, or attention on the
        device is wrong.
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
    from transformer_jax.distributed.targets import chip_of_kind

    deadline = time.monotonic() + arguments.seconds
    # Both sides use the device at the same time; JAX would otherwise take most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform, name, version, count = attached_device(arguments.seconds)
    if platform == "cpu" and not arguments.trial:
        raise UserError(
            "JAX has no accelerator: install JAX for it, or add `trial` to try the command on a CPU"
        )
    if platform == "cpu":
        # The processes of the parts would look for accelerators again, and report that there are none.
        os.environ["JAX_PLATFORMS"] = "cpu"
    unknown_chip = platform != "cpu" and chip_of_kind(name) is None
    note = "; unknown chip, so its utilization is not computed" if unknown_chip else ""
    print(f"{name} ({count} attached, one is used), jax {version}{note}", flush=True)
    results: dict[str, Any] = {"device": name, "jax": version, "trial": arguments.trial, "parts": {}}
    for part in PARTS:
        if arguments.only and part not in arguments.only:
            continue
        left = deadline - time.monotonic()
        try:
            if left < _MIN_SECONDS:
                raise TimeoutError("the time limit was reached")
            values = measure(part, arguments, accelerator=platform != "cpu", timeout=left)
        except (UserError, TimeoutError) as error:
            values = {"skipped": str(error)}
        except SystemExit as error:
            values = {"failed": str(error).removeprefix("error: ")}
        results["parts"][part] = values
        for line in lines_of(part, values):
            print(line, flush=True)
        if target is not None:
            target.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(results))
    if failed := [part for part, values in results["parts"].items() if "failed" in values]:
        raise UserError(f"parts ended with an error: {', '.join(failed)}")
    masks = results["parts"].get("kernels", {}).get("masks", {})
    if wrong := [name for name, result in masks.items() if not result["difference"] <= _TOLERANCE]:
        raise UserError(f"attention differs from plain attention by more than {_TOLERANCE}: {', '.join(wrong)}")
