import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.objective import Objective
from transformer_jax.training.step import create_state
from transformer_jax.training.totals import Totals

CONFIG = TransformerConfig(
    vocab_size=13, width=8, feed_forward=12, heads=2, kv_heads=2, encoder_layers=1, decoder_layers=1,
    dropout=0.0,
)  # fmt: skip


def state(step=0, fill=None):
    """Return a training state at a step, with all parameters set to `fill` if it is given."""
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    state = create_state(model, optax.adam(0.1), jax.random.key(7), with_ema=True)
    state = state.replace(step=jnp.asarray(step, jnp.int32))
    return state if fill is None else state.replace(trained=jax.tree.map(lambda x: x * 0 + fill, state.trained))


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep_last=2) as checkpoints:
        yield checkpoints


def data(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def test_a_state_is_restored_bit_for_bit(checkpoints):
    saved = state(5)
    totals = Totals(seconds=1.5, weight=7.0, skipped_steps=2, best_step=3, best_value=0.25)
    checkpoints.save(saved, totals)
    checkpoints.wait()
    restored, restored_totals = checkpoints.restore(state(0, fill=0.0))
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert restored_totals == totals
    for name, leaf in named_leaves(saved).items():
        np.testing.assert_array_equal(data(leaf), data(named_leaves(restored)[name]), err_msg=name)


def test_the_last_and_the_best_checkpoints_are_kept(checkpoints):
    for step in range(1, 6):
        checkpoints.save(state(step), best=step == 2)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]


def test_names_on_disk_are_canonical(checkpoints):
    import orbax.checkpoint as ocp

    checkpoints.save(state(1))
    checkpoints.wait()
    with ocp.PyTreeCheckpointer() as reader:
        parameters = reader.restore(checkpoints.folder / "1" / "model")
    assert set(parameters) == {"encoder", "decoder", "target_embedding"}
    assert parameters["encoder"]["self_attention"]["query"]["kernel"].shape == (1, 8, 2, 4)


def test_restoring_without_a_checkpoint_returns_none(checkpoints):
    assert checkpoints.restore(state()) is None


def test_the_kept_model_is_the_moving_average(checkpoints):
    """The kept model is the one that was validated, not the latest parameters."""
    saved = state(5, fill=1.0)
    saved = saved.replace(ema=jax.tree.map(lambda x: x * 0 + 3.0, saved.ema))
    checkpoints.save(saved)
    checkpoints.wait()
    kept = checkpoints.restore_kept(Objective(), state().model, None, 5)
    assert all((leaf == 3.0).all() for leaf in jax.tree.leaves(kept))
    assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(checkpoints.restore_model(state().model, 5)))


def test_the_average_is_the_mean(checkpoints):
    for step, fill in ((1, 1.0), (2, 4.0)):
        checkpoints.save(state(step, fill))
    checkpoints.wait()
    mean = checkpoints.average(lambda step: checkpoints.restore_model(state().model, step), [1, 2])
    assert all((leaf == 2.5).all() for leaf in jax.tree.leaves(mean))


def every_file(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_file_is_detected_and_an_older_checkpoint_restored(checkpoints, damage, caplog):
    for step in (1, 2):
        checkpoints.save(state(step, fill=float(step)))
    checkpoints.wait()
    newest = checkpoints.folder / "2"
    for path in every_file(newest):
        content = path.read_bytes()
        if damage == "flip":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:] if content else b"x")
        elif damage == "truncate":
            path.write_bytes(content[:-1] if content else b"x")
        else:
            path.unlink()
        assert not checkpoints.is_complete(2), path
        path.write_bytes(content)
    assert checkpoints.is_complete(2)
    every_file(newest / "model")[0].unlink()
    with caplog.at_level(logging.WARNING):
        restored, _ = checkpoints.restore(state())
    assert int(restored.step) == 1
    assert "does not match its manifest" in caplog.text


@pytest.mark.long
def test_no_damage_of_any_byte_loads_silently(checkpoints, tmp_path, request):
    """Random damage to any file, also the manifest, restores the older checkpoint or raises an error."""
    for step in (1, 2):
        checkpoints.save(state(step, fill=float(step)))
    checkpoints.wait()
    rng = np.random.default_rng(0)
    names = [path.relative_to(checkpoints.folder) for path in every_file(checkpoints.folder / "2")]
    # Every file is damaged at least once, then random ones.
    trials = 240 if request.config.getoption("--soak") else 80
    for trial, name in enumerate([*names, *rng.choice(names, max(0, trials - len(names)))]):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoints.folder, folder)
        path, damage = folder / name, rng.choice(["flip", "byte", "truncate", "add", "delete"])
        content = bytearray(path.read_bytes())
        offset = int(rng.integers(max(1, len(content))))
        if damage == "delete":
            path.unlink()
        elif damage == "truncate" and content:
            path.write_bytes(content[:offset])
        elif damage == "add" or not content:
            path.write_bytes(content + rng.bytes(3))
        else:
            content[offset] ^= 1 << int(rng.integers(8)) if damage == "flip" else int(rng.integers(1, 256))
            path.write_bytes(content)
        with Checkpoints(folder) as damaged:
            description = f"trial {trial}: {damage} of {name} at {offset}"
            assert not damaged.is_complete(2), description
            with pytest.raises(UserError, match="not a complete checkpoint"):
                damaged.restore_model(state().model, 2)
            with pytest.raises(UserError, match="no complete checkpoint to average"):
                damaged.average(lambda step: damaged.restore_model(state().model, step), [2])
            if trial % 4:
                continue  # restoring takes most of the time
            restored, _ = damaged.restore(state())
            assert int(restored.step) == 1, description
            assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(restored.model)), description


def test_a_manifest_without_a_digest_of_itself_is_refused(checkpoints):
    checkpoints.save(state(3))
    checkpoints.wait()
    assert checkpoints.is_complete(3)
    path = checkpoints.folder / "3" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["manifest_sha256"]
    path.write_text(json.dumps(manifest, indent=1))
    assert not checkpoints.is_complete(3)


def test_an_interrupted_first_save_is_an_error(checkpoints):
    checkpoints.save(state(1))
    checkpoints.wait()
    (checkpoints.folder / "1" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"1 checkpoint.*none complete: a save was interrupted"):
        checkpoints.restore(state())


def test_a_save_replaces_an_interrupted_one(checkpoints):
    checkpoints.save(state(1))
    checkpoints.wait()
    (checkpoints.folder / "1" / "manifest.json").unlink()
    checkpoints.save(state(1))
    checkpoints.wait()
    assert checkpoints.is_complete(1)


def test_a_full_disk_gives_one_clear_line(tmp_path, monkeypatch):
    """Writing the manifest to /dev/full raises the real OSError of a full device."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    monkeypatch.setattr("transformer_jax.training.manifests.open", _open_on_a_full_disk, raising=False)
    checkpoints.save(state(1))
    with pytest.raises(UserError, match="the disk is full; free some space"):
        checkpoints.wait()
    assert checkpoints.steps() == []
    checkpoints.close()


def _open_on_a_full_disk(path, *args, **kwargs):
    return open("/dev/full", "w")


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(UserError, match="could not be written"):
        checkpoints.save(state(1))
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused(checkpoints):
    checkpoints.save(state(1))
    checkpoints.wait()
    import dataclasses

    wider_model = Transformer(dataclasses.replace(CONFIG, width=16), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"holds another model: .*kernel is"):
        checkpoints.restore_model(wider_model, 1)


def test_a_killed_first_save_is_repeated(tmp_path):
    """A killed first save loses nothing, whereas the remains of a complete checkpoint are an error."""
    folder = tmp_path / "checkpoints"
    for name in ("2.orbax-checkpoint-tmp", "2"):
        (folder / name / "model").mkdir(parents=True)
    (folder / "2.begun").touch()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(None) is None
    (folder / "2" / "manifest.json").write_text("{}")
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="none complete"):
        checkpoints.restore(None)
    (folder / "2" / "manifest.json").unlink()
    (folder / "2.begun").unlink()
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="none complete"):
        checkpoints.restore(None)
