"""The check of a device: its parts at small sizes on a CPU, its messages, and its table."""

import json

import pytest

from tests.commands.in_process import call
from transformer_jax.commands import check_device, device_parts, interleaved_rounds, torch_baselines
from transformer_jax.distributed.targets import CHIPS
from transformer_jax.errors import UserError

DEVICE = ("gpu", "NVIDIA H100 80GB HBM3", "0.10.2", 1)


def masks(**differences):
    """Return the results of the part "kernels"."""
    return {
        "masks": {
            name: {"kernel": "cudnn", "reason": None, "difference": difference}
            for name, difference in differences.items()
        }
    }


def fake_parts(monkeypatch, results, device=DEVICE):
    """Replace the device, and the measurement of each part by a result or an exception."""

    def measure(part, arguments, **_):
        result = results[part]
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(check_device, "attached_device", lambda timeout: device)
    monkeypatch.setattr(check_device, "measure", measure)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "gpt", "bart"], "--only has unknown parts bart: parts are kernels, gpt"),
        (["--seconds", "0"], "--seconds 0.0 is not a finite number above 0"),
        (["--seconds", "inf"], "--seconds inf is not a finite number above 0"),
        (["--seconds", "nan"], "--seconds nan is not a finite number above 0"),
        (["--write", "."], "--write .: Is a directory"),
        (["--write", "absent/results.json"], "there is no folder absent"),
        (["--only", "gpt"], "JAX has no accelerator: install JAX for it, or add --trial"),
    ],
)
def test_bad_flags(monkeypatch, flags, message):
    fake_parts(monkeypatch, {}, device=("cpu", "cpu", "0.10.2", 1))
    completed = call(check_device.main, *flags)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert message in completed.stderr


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch, tmp_path):
    step = {
        "seconds": 0.02, "unit": "tokens", "units_per_second": 409_600.0, "utilization": 0.34, "loss": 10.8,
        "seconds_modelled": 0.021, "planned_bytes": 3 * 2**30, "peak_bytes": 2**31, "ratio": 2.0,
        "torch_units_per_second": 204_800.0, "torch_peak_bytes": None,
    }  # fmt: skip
    results = {
        "kernels": masks(causal=0.01),
        "gpt": step,
        "llama": UserError("llama needs 90.0 GiB, and the device has 79.1"),
        "bert": TimeoutError("bert of transformer_jax did not finish within the time limit"),
        "generation": {
            "rows_8": {
                "transformer_jax": {
                    "first_token_seconds": 0.01,
                    "token_seconds": 0.002,
                    "tokens_per_second": 4_000.0,
                }
            },
            "no_baseline": "torch is installed without CUDA",
        },
    }
    fake_parts(monkeypatch, results)
    file = tmp_path / "results.json"
    completed = call(check_device.main, "--only", *results, "--write", file, "--json")
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert lines[0] == "NVIDIA H100 80GB HBM3 (1 attached, one is used), jax 0.10.2"
    assert (
        "20.0 ms, 409,600 tokens/s, modelled 21.0 ms, utilization 34%, planned memory 3.00 GiB, used 2.00 GiB"
        in lines[2]
    )
    assert lines[3].endswith("torch 204,800 tokens/s: 2.00x torch")
    assert lines[4].endswith("skipped: llama needs 90.0 GiB, and the device has 79.1")
    assert lines[5].endswith("skipped: bert of transformer_jax did not finish within the time limit")
    assert lines[7].endswith("no baseline: torch is installed without CUDA")
    assert json.loads(lines[-1]) == json.loads(file.read_text())
    assert set(json.loads(lines[-1])["parts"]) == set(results)


def test_no_part_starts_after_the_time_limit(monkeypatch):
    fake_parts(monkeypatch, {"gpt": {}}, device=("gpu", "Unknown 1", "0.10.2", 1))
    completed = call(check_device.main, "--only", "gpt", "--seconds", "5")
    assert completed.returncode == 0, completed.stderr
    assert "unknown chip, so its utilization is not computed" in completed.stdout
    assert completed.stdout.splitlines()[-1].endswith("skipped: the time limit was reached")


def test_a_wrong_kernel_is_an_error(monkeypatch):
    fake_parts(monkeypatch, {"kernels": masks(causal=0.01, window=0.2, padding=float("nan"))})
    completed = call(check_device.main, "--only", "kernels")
    assert completed.returncode == 2
    assert "attention differs from plain attention by more than 0.05: window, padding" in completed.stderr
    assert completed.stdout.count("ABOVE 0.05") == 2


def test_missing_baselines(monkeypatch):
    specs = {"torch": object(), "transformers": None}
    monkeypatch.setattr(torch_baselines.importlib.util, "find_spec", specs.get)
    assert torch_baselines.missing_baseline(needs="torch", accelerator=False) is None
    assert (
        torch_baselines.missing_baseline(needs="transformers", accelerator=False)
        == "transformers is not installed"
    )
    specs["torch"] = None
    assert torch_baselines.missing_baseline(needs="transformers", accelerator=True) == "torch is not installed"


def fail(_):
    raise UserError("this side cannot run")


def exhaust(_):
    def job():
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.\nMore lines")

    return {"job": job}


def exit_at_once(_):
    import os

    os._exit(1)


def answer(_):
    return {"job": lambda: 42}


def sleep(_):
    import time

    return {"job": lambda: time.sleep(600)}


@pytest.mark.parametrize(
    ("side", "error", "message"),
    [
        (fail, UserError, "this side cannot run"),
        (exhaust, UserError, "too little memory: RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.$"),
        (exit_at_once, SystemExit, "the process of side ended during job"),
        (sleep, TimeoutError, "job of side did not finish within"),
    ],
)
def test_a_side_that_fails_or_hangs(side, error, message):
    # A process takes many seconds to start on a busy machine.
    timeout = 5 if side is sleep else 300
    with pytest.raises(error, match=message):
        interleaved_rounds.compare({"job": 1}, {"side": side}, None, 1, timeout=timeout)


@pytest.mark.parametrize(
    ("side", "message"), [(exhaust, "too little memory"), (exit_at_once, "the process of torch ended")]
)
def test_an_optional_side_that_fails_is_left_out(side, message):
    sides = {"transformer_jax": answer, "torch": side}
    report = interleaved_rounds.compare({"job": 2}, sides, None, 2, optional=("torch",))["job"]
    assert report["results"] == {"transformer_jax": 42}
    assert report["transformer_jax"]["seconds"] >= 0
    assert message in report["failures"]["torch"]
    assert "torch" not in report


def test_a_part_that_ends_with_an_error(monkeypatch):
    ended = SystemExit("error: the process of transformer_jax ended during gpt; see its error above")
    fake_parts(monkeypatch, {"gpt": ended})
    completed = call(check_device.main, "--only", "gpt")
    assert completed.returncode == 2
    assert "failed: the process of transformer_jax ended during gpt" in completed.stdout
    assert "parts ended with an error: gpt" in completed.stderr


def test_a_device_that_cannot_be_opened(monkeypatch):
    code = "import sys; print('line of the runtime', file=sys.stderr); sys.exit('no device')"
    monkeypatch.setattr(check_device, "_DESCRIBE_DEVICE", code)
    with pytest.raises(UserError, match=r"^JAX cannot open a device: no device$"):
        check_device.attached_device(60)
    monkeypatch.setattr(check_device, "_DESCRIBE_DEVICE", "import time; time.sleep(60)")
    with pytest.raises(UserError, match="JAX did not open a device within 1 seconds"):
        check_device.attached_device(1)


def test_the_time_model_is_no_part_of_a_timed_step(monkeypatch):
    calls = []
    monkeypatch.setattr(device_parts, "chip_of_kind", lambda _: CHIPS["h100"])
    monkeypatch.setattr(device_parts, "modelled_seconds", lambda *_: calls.append(1) or 0.5)
    step = device_parts.our_step(("gpt", True))["gpt"]
    facts = [step() for _ in range(3)]
    assert len(calls) == 1
    assert {fact["seconds_modelled"] for fact in facts} == {0.5}
    assert facts[2]["loss"] < facts[0]["loss"], "each call trains"


@pytest.mark.long
def test_a_trial_on_a_cpu(tmp_path):
    """The peer in torch runs where it is installed."""
    parts = ("kernels", "gpt", "translator", "bert", "vit", "generation")
    completed = call(check_device.main, "--trial", "--only", *parts, "--json")
    assert completed.returncode == 0, completed.stderr
    results = json.loads(completed.stdout.splitlines()[-1])["parts"]
    assert list(results) == list(parts)
    differences = {name: result["difference"] for name, result in results["kernels"]["masks"].items()}
    assert {"causal", "window", "documents", "lengths", "documents, dropout"} <= set(differences)
    assert max(differences.values()) < 0.05, "bfloat16 against float32"
    for part in parts[1:-1]:
        assert 0 < results[part]["loss"] < 12, part
        assert results[part]["units_per_second"] > 0
        assert results[part]["planned_bytes"] > 0
    assert results["generation"]["rows_8"]["transformer_jax"]["tokens_per_second"] > 0
    for part in ("gpt", "generation"):
        values = results[part]
        assert (
            "ratio" in values or "ratio" in values.get("rows_1", {}) or "not installed" in values["no_baseline"]
        )
