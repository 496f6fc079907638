"""Training, resuming, sharding, planning, loading, use and inspection of the image tasks."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.cases import others_long, others_soak
from transformer_jax import pretrained, tasks
from transformer_jax.data.corpora.images import digits
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.plotting.image_maps import plot_attention_maps
from transformer_jax.plotting.image_page import ImagePage
from transformer_jax.tasks.encoders.trained_heads import classified
from transformer_jax.tasks.vision import self_distillation
from transformer_jax.tasks.vision.data import ImageDataConfig, open_splits
from transformer_jax.tasks.vision.image_classification import ImageClassification
from transformer_jax.tasks.vision.pretraining import ImagePretraining
from transformer_jax.training import plan
from transformer_jax.training.execution import Execution
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.run_folder import read_run
from transformer_jax.training.task import entry_of
from transformer_jax.training.trained_model import make_model, module_of

STEPS = 20
SIZES = dict(width=24, layers=2, heads=2, feed_forward=32, batch_size=16, examples=200)
HEAD = dict(prototypes=19, projection_hidden=16, bottleneck=12)
CASES = {
    "classes": ("image_classification", dict(convolutions=0, pooling="class", mixup=0.0, ema=0.0)),
    "mixed": ("image_classification", dict(mixup=0.5, cutmix=0.5, stochastic_depth=0.2)),
    "dino": ("self_distillation", HEAD),
    "mae": ("masked_autoencoding", dict(decoder_width=16, decoder_heads=2)),
}  # fmt: skip


def config_of(case, **changes):
    task, values = CASES[case]
    common = SIZES | dict(learning_rate=3e-3, optimizer="adam", steps=STEPS, evaluate_every=10, save_every=5)
    return tasks.configure(task, "digits", **(common | values | changes))


def train(config, folder, mesh=None):
    return tasks.train(config, folder, execution=Execution(mesh=mesh))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a case once and returns its folder and results."""
    root, results = tmp_path_factory.mktemp("runs"), {}

    def train_once(case):
        if case not in results:
            results[case] = train(config_of(case), root / case)
        return root / case, results[case]

    return train_once


class Halt(Exception):
    """End a run after its first steps."""


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize("case", others_soak(CASES, "dino"))
def test_it_is_trained(case, trained):
    folder, results = trained(case)
    expected = {
        "dino": {"knn_accuracy", "feature_spread", "teacher_entropy"},
        "mae": {"knn_accuracy", "feature_spread"},
    }.get(case, {"top1", "top5", "calibration_error"})
    assert expected | {"images_per_second", "parameters"} <= set(results)
    assert all(np.isfinite(results[name]) for name in expected)
    if case != "dino":  # DINO starts with nearly equal outputs, from which its loss need not fall
        assert losses(folder)[-1] < losses(folder)[0]
    assert (
        json.loads((folder / "results.json").read_text()).items() >= {n: results[n] for n in expected}.items()
    )


@pytest.mark.long
@pytest.mark.parametrize("case", others_soak(CASES, "mixed", "dino"))
def test_it_is_resumed_bit_for_bit(case, trained, tmp_path, monkeypatch):
    folder, results = trained(case)

    def halt(*_):
        raise Halt

    with monkeypatch.context() as patched:
        for kind in (ImageClassification, ImagePretraining):
            patched.setattr(kind, "validate", halt)
        with pytest.raises(Halt):
            train(config_of(case), tmp_path / "run")
    again = train(config_of(case), tmp_path / "run")
    assert losses(tmp_path / "run")[-1] == losses(folder)[-1]
    expected, resumed = (named_leaves(tasks.load(path).model) for path in (folder, tmp_path / "run"))
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    measured = {name: value for name, value in results.items() if "second" not in name}
    assert measured == {name: again[name] for name in measured}


@pytest.mark.long
@pytest.mark.parametrize("case", others_soak(CASES, "dino"))
def test_eight_devices_learn_the_same(case, trained, tmp_path):
    train(config_of(case), tmp_path / "run", mesh="data=2,fsdp=2,tensor=2")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(trained(case)[0]), rtol=2e-3)


@pytest.mark.parametrize("case", others_long(["classes", "dino"]))
def test_micro_batches_learn_the_same(case, trained, tmp_path):
    """This includes DINO, whose centre and teacher are updated once per step."""
    train(config_of(case, accumulation=2, steps=10, schedule="constant"), tmp_path / "two")
    train(config_of(case, steps=10, schedule="constant"), tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_it_is_planned(case):
    lines = dict(plan.describe(tasks.TASKS[CASES[case][0]], config_of(case), "data=2,tensor=2"))
    assert lines["work"].endswith("in total")


def test_a_mesh_with_sequence_is_refused(tmp_path):
    with pytest.raises(UserError, match="shards the tokens of texts, which these batches do not have"):
        train(config_of("classes"), tmp_path / "run", mesh="data=4,sequence=2")


def test_a_trained_classifier_classifies(trained):
    folder, results = trained("classes")
    run = tasks.load(folder)
    _, test = digits()
    images = [test[n] for n in range(len(test))]
    predictions = run.classify(images)
    assert all(abs(sum(prediction.probabilities.values()) - 1) < 1e-5 for prediction in predictions)
    labels = [test.classes[number] for number in test.labels]
    accuracy = np.mean(
        [prediction.label == label for prediction, label in zip(predictions, labels, strict=True)]
    )
    assert 100 * accuracy == pytest.approx(results["top1"], abs=0.3)
    (first,) = run.classify(images[:1])
    assert first.probabilities == pytest.approx(predictions[0].probabilities, abs=1e-5)
    single = ("a.png", images[0], images[0][..., 0])
    for value, message in (
        ([], "one or more"),
        ([np.zeros(3)], "convert it to uint8"),
        *((x, "a list") for x in single),
    ):
        with pytest.raises(UserError, match=message):
            run.classify(value)


@pytest.mark.parametrize("case", others_soak(CASES, "classes", "dino"))
def test_vectors_and_maps_of_every_run(case, trained, tmp_path):
    run = tasks.load(trained(case)[0])
    train_set, _ = digits()
    images = [train_set[n] for n in range(5)]
    vectors = run.embed_images(images)
    assert (vectors.shape, vectors.dtype) == ((5, 24), np.float32)
    np.testing.assert_allclose(run.embed_images(images[3:4])[0], vectors[3], atol=1e-5)
    for image in (np.asarray(images[3]), jnp.asarray(images[3])):
        with pytest.raises(UserError, match="give a list of images, not one image"):
            run.embed_images(image)
    maps = [run.attention_maps(image) for image in images[:2]]
    rows, columns = maps[0].grid
    np.testing.assert_allclose(maps[0].weights.sum(axis=-1), 1, atol=1e-5)
    assert maps[0].heads().shape == (2, rows, columns)
    assert maps[0].rollout().shape == (rows, columns)
    assert maps[0].components().shape == (rows, columns, 3)
    assert 0 <= maps[0].components().min() <= maps[0].components().max() <= 1
    plot_attention_maps(maps, titles=["one", "two"], path=tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 5_000
    page = ImagePage(maps[0], title="digit </script>")
    page.save(tmp_path / "page.html")
    assert "</script>" not in (tmp_path / "page.html").read_text().split("const DATA = ")[1].split(";\n")[0]
    with pytest.raises(UserError, match="layer 2 of 2"):
        maps[0].heads(2)


@pytest.mark.parametrize(("prefix", "class_token"), [(3, True), (2, False), (0, False)])
def test_maps_are_those_of_the_first_token_over_patches_alone(rng, prefix, class_token):
    """Maps omit the registers that precede the patches; each row of the random attention differs."""
    from transformer_jax.interpretability.attention_flow import rollout
    from transformer_jax.interpretability.images import AttentionMaps

    T = prefix + 6
    weights = rng.dirichlet(np.ones(T), (2, 3, T)).astype(np.float32)
    states = rng.normal(size=(T, 4)).astype(np.float32)
    states[prefix:] = np.outer([3, 1, 0, 2, 5, 4], [0.1, -2.0, 0.3, 0.2]) + 7  # along one direction
    maps = AttentionMaps(np.zeros((2, 3, 3), np.uint8), weights, prefix, (2, 3), states, class_token)
    rolled = rollout(weights)[-1]
    for layer in (0, 1):
        expected = [
            [
                weights[layer, head, 0, prefix + n]
                if class_token
                else np.mean([weights[layer, head, prefix + m, prefix + n] for m in range(6)])
                for n in range(6)
            ]
            for head in range(3)
        ]
        np.testing.assert_allclose(maps.heads(layer), np.reshape(expected, (3, 2, 3)), atol=1e-6)
    np.testing.assert_array_equal(maps.heads(), maps.heads(1))
    row = rolled[0] if class_token else rolled[prefix:].mean(axis=0)
    np.testing.assert_allclose(maps.rollout(), row[prefix:].reshape(2, 3), atol=1e-6)
    # The direction's largest weight, -2, is made positive.
    np.testing.assert_allclose(
        maps.components(1)[..., 0], 1 - np.reshape([3, 1, 0, 2, 5, 4], (2, 3)) / 5, atol=1e-5
    )


def test_images_are_read_in_another_size(trained):
    run = tasks.load(trained("classes")[0])
    (image,) = (digits()[0][n] for n in range(1))
    assert run.attention_maps(image).grid == (4, 4)
    larger = run.at_size(12)
    assert larger.attention_maps(image).grid == (6, 6)
    assert larger.attention_maps(image).pixels.shape == (12, 12, 3)
    assert larger.classify([image])[0].probabilities.keys() == run.classify([image])[0].probabilities.keys()
    for size, message in ((0, "below 1"), (9, "`size` 9 is no multiple of `patch_size` 2")):
        with pytest.raises(UserError, match=message):
            run.at_size(size)


def test_masks_keep_the_smallest_set_of_a_share():
    from transformer_jax.interpretability.images import AttentionMaps

    row = np.array([0.1, 0.4, 0.05, 0.3, 0.1, 0.05])  # a class token, then 5 patches
    weights = np.broadcast_to(row, (1, 1, 6, 6)).astype(np.float32)
    maps = AttentionMaps(np.zeros((1, 5, 3), np.uint8), weights, 1, (1, 5), np.zeros((6, 2), np.float32))
    # The patches sum to 0.9, of which 0.4 and 0.3 are 78 %.
    assert maps.masks(0.6)[0, 0].tolist() == [True, False, True, False, False]
    assert maps.masks(0.4)[0, 0].tolist() == [True, False, False, False, False]
    assert maps.masks(1.0).all()
    with pytest.raises(UserError, match="`share` 0 must be above 0"):
        maps.masks(0)


@pytest.mark.long
def test_classes_of_one_name_have_their_own_probabilities():
    """ImageNet has two cranes."""
    prediction = classified(np.log([0.2, 0.7, 0.1]), ("crane", "crane", "kite"), "label")
    assert prediction.label == "crane (1)"
    assert prediction.probabilities == pytest.approx({"crane (0)": 0.2, "crane (1)": 0.7, "kite": 0.1})


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("classes", dict(channels=1), "`channels` 1 must be 3: images are read as RGB"),
        ("mae", dict(patch_size=8), "`patch_size` 8 makes one patch"),
        ("mae", dict(width=18), "must be a multiple of 4"),
    ],
)
def test_sizes_that_cannot_be(case, changes, message, tmp_path):
    with pytest.raises((UserError, ValueError), match=message):
        train(config_of(case, **changes), tmp_path / "run")


def test_entropies_are_those_of_all_outputs_at_once(tmp_path):
    """Entropies are summed over batches, for each test set."""
    file = str(tmp_path / "set.npz")
    images, _ = digits()
    pixels = np.stack([images[n] for n in range(60)])
    np.savez(file, images=pixels, labels=images.labels[:60] % 2)
    config = config_of("dino", data=file, test=(file, file), examples=0, steps=1)
    results = train(config, tmp_path / "run")
    assert set(results["teacher_entropy"]) == {"set", "set_"}
    trained = tasks.load(tmp_path / "run")
    outputs = np.asarray(
        trained.model(trained.normalize(np.stack([trained.processor.pixels(p) for p in pixels])))
    )
    logits = (outputs - outputs.mean(axis=0)) / config.task.teacher_temperature
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)

    def entropy(p):
        return -(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1)

    assert results["teacher_entropy"]["set"] == pytest.approx(entropy(shares).mean(), rel=1e-4)
    assert results["prototype_entropy"]["set_"] == pytest.approx(entropy(shares.mean(axis=0)), rel=1e-4)


def test_collapse_is_reported(tmp_path):
    """Equal images have equal outputs; different digits do not."""
    images, _ = digits()
    labels = np.arange(60) % 2
    for name, numbers in (("same", np.zeros(60, int)), ("digits", np.arange(60))):
        file = str(tmp_path / f"{name}.npz")
        np.savez(file, images=np.stack([images[n] for n in numbers]), labels=labels)
        config = config_of("dino", data=file, test=(file,), examples=0, steps=1)
        _, lines = tasks.train(config, tmp_path / name)
        (line,) = (line for line in lines if "nats about an image in the teacher's output" in line)
        assert ("collapsed, it is the same for all images" in line) == (name == "same")


def test_images_without_classes_are_pretrained_on(tmp_path):
    (tmp_path / "photos").mkdir()
    images, _ = digits()
    for number in range(40):
        Image.fromarray(images[number]).save(tmp_path / "photos" / f"{number}.png")
    config = config_of("dino", data=str(tmp_path / "photos"), examples=0, steps=2, keep="last")
    results = train(config, tmp_path / "run")
    assert {"feature_spread", "teacher_entropy"} <= set(results)
    assert not any("knn" in name for name in results)
    assert tasks.load(tmp_path / "run").embed_images([images[0]]).shape == (1, 24)
    with pytest.raises(UserError, match="no classes to choose the best step by: give `keep` last"):
        train(config.with_values(keep="best"), tmp_path / "best")
    with pytest.raises(UserError, match="all images are in one folder; classes need"):
        train(config_of("classes", data=str(tmp_path / "photos")), tmp_path / "classes")


def test_a_pretrained_encoder_is_fine_tuned_and_probed(trained, tmp_path):
    """Encoders of DINO and of a masked autoencoder are fine-tuned; a linear probe leaves DINO's unchanged."""
    small = dict(batch_size=16, examples=200, steps=10, evaluate_every=10, save_every=10)
    for case in ("dino", "mae"):
        folder, _ = trained(case)
        config = tasks.configure("image_classification", "fine_tune", start=(str(folder),), **small)
        assert config.model.width == 24
        train(config, tmp_path / case)
    source = tasks.load(trained("dino")[0]).encoder
    config = tasks.configure("image_classification", "probe", start=(str(trained("dino")[0]),), **small)
    train(config, tmp_path / "probe")
    probed = tasks.load(tmp_path / "probe")
    for name, leaf in named_leaves(source).items():
        np.testing.assert_array_equal(leaf, named_leaves(probed.encoder)[name], err_msg=name)
    stored = read_run(tmp_path / "probe", tasks.TASKS)
    assert stored.run.trainable == "(distillation_)?head/.*"


@pytest.mark.parametrize("recipe", ["fine_tune", "probe"])
def test_a_classifier_is_fine_tuned_on_other_classes(recipe, trained, tmp_path):
    """The encoder is copied, and the head for three classes is new."""
    train_set, _ = digits()
    rows = np.flatnonzero(train_set.labels < 3)[:60]
    np.savez(
        tmp_path / "three.npz", images=np.stack([train_set[n] for n in rows]), labels=train_set.labels[rows]
    )
    folder = str(trained("classes")[0])
    config = tasks.configure(
        "image_classification", recipe, start=(folder,), data=str(tmp_path / "three.npz"), steps=1,
        learning_rate=0.0, batch_size=8,
    )  # fmt: skip
    train(config, tmp_path / "run")
    before, after = (named_leaves(tasks.load(path).model) for path in (folder, tmp_path / "run"))
    assert (before["head/kernel"].shape, after["head/kernel"].shape) == ((24, 10), (24, 3))
    for name, leaf in after.items():
        if name.startswith("encoder/"):
            np.testing.assert_array_equal(leaf, before[name], err_msg=name)


@pytest.mark.long
def test_a_run_is_published_and_read_again(trained, tmp_path):
    run = tasks.load(trained("classes")[0])
    pretrained.save(tmp_path / "folder", run.model, run.processor)
    again = tasks.load(tmp_path / "folder")
    image = digits()[1][0]
    assert again.classify([image])[0].probabilities == pytest.approx(
        run.classify([image])[0].probabilities, abs=1e-6
    )


@pytest.mark.long
def test_a_compact_transformer_has_no_published_format(trained, tmp_path):
    run = tasks.load(trained("mixed")[0])
    with pytest.raises(UserError, match="has no published format"):
        pretrained.save(tmp_path / "none", run.model, run.processor)


def test_teacher_and_centre_follow_their_recurrences():
    """Teacher and centre match NumPy: moving averages, the teacher's with a decay that rises to 1."""
    from flax import nnx

    from transformer_jax.models.vision.dino import Dino
    from transformer_jax.tasks.vision.self_distillation import objective

    config = config_of("dino", steps=8)
    loss = objective(config, config.model)
    first, second = (Dino(config.model, rngs=nnx.Rngs(n)) for n in (0, 1))
    extra = loss.initial_extra(first, jax.random.key(0))
    means = {"centre": jnp.arange(19.0)}
    for step in (0, 4, 8):
        after = loss.after_update(second, extra, means, jnp.asarray(step))
        decay = 1 - (1 - config.task.teacher_decay) * (np.cos(np.pi * step / 8) + 1) / 2
        for name, leaf in named_leaves(after["teacher"]).items():
            expected = decay * named_leaves(first)[name] + (1 - decay) * named_leaves(second)[name]
            np.testing.assert_allclose(leaf, expected, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(after["centre"], 0.1 * np.arange(19.0), rtol=1e-6)
        assert int(after["step"]) == 1


def test_the_teachers_temperature_rises():
    from transformer_jax.tasks.vision.self_distillation import objective

    config = config_of("dino", teacher_temperature=0.07, temperature_warmup=10)
    loss = objective(config, config.model)
    assert [round(float(loss.temperature(step)), 6) for step in (0, 5, 10, 99)] == [0.04, 0.055, 0.07, 0.07]
    assert objective(config_of("dino"), config.model).temperature(0) == 0.04
    paper = tasks.configure("self_distillation", "paper", steps=1_000)
    assert (paper.task.temperature_warmup, paper.model.stochastic_depth) == (300, 0.1)


@pytest.mark.long
def test_the_loss_of_views_is_that_of_the_paper():
    """Equation 3 in NumPy's float64: every global view of the teacher with every other view of the student."""
    from flax import nnx

    from transformer_jax.models.vision.dino import Dino
    from transformer_jax.tasks.vision.self_distillation import objective

    config = config_of("dino")
    loss = objective(config, config.model)
    student, teacher = (jax.jit(lambda n=n: Dino(config.model, rngs=nnx.Rngs(n)))() for n in (0, 1))
    rng = np.random.default_rng(0)
    batch = {
        "global_crops": rng.integers(256, size=(3, 2, 8, 8, 3), dtype=np.uint8),
        "local_crops": rng.integers(256, size=(3, 2, 4, 4, 3), dtype=np.uint8),
        "weight": np.array([1, 0, 1], np.float32),
    }
    centre = rng.normal(size=19).astype(np.float32) * 0.1
    extra = {"teacher": teacher, "centre": jnp.asarray(centre), "step": jnp.zeros((), jnp.int32)}
    sums, weights = loss.loss(student, extra, batch, jax.random.key(0))

    def outputs(model, views):
        x = (views.reshape(-1, *views.shape[2:]) / 255 - 0.5) / 0.5
        return np.asarray(model(jnp.asarray(x, jnp.float32)), np.float64).reshape(3, -1, 19)

    def softmax(x):
        x = np.exp(x - x.max(axis=-1, keepdims=True))
        return x / x.sum(axis=-1, keepdims=True)

    taught = outputs(teacher, batch["global_crops"])
    expected = softmax((taught - centre) / 0.04)
    learned = np.concatenate(
        [outputs(student, batch[name]) for name in ("global_crops", "local_crops")], axis=1
    )
    logs = np.log(softmax(learned / 0.1))
    total, pairs = np.zeros(3), 0
    for teacher_view in range(2):
        for student_view in range(4):
            if teacher_view != student_view:
                total -= (expected[:, teacher_view] * logs[:, student_view]).sum(axis=-1)
                pairs += 1
    np.testing.assert_allclose(sums["loss"], (total / pairs * batch["weight"]).sum(), rtol=1e-4)
    np.testing.assert_allclose(
        sums["centre"], (taught.mean(axis=1) * batch["weight"][:, None]).sum(axis=0), atol=1e-5
    )
    assert float(weights["loss"]) == 2


def test_only_masked_patches_are_predicted():
    """The loss matches NumPy: the error on normalized pixels of the patches that the encoder does not see."""
    from flax import nnx

    from transformer_jax.models.vision.masked_autoencoder import MaskedAutoencoder
    from transformer_jax.tasks.vision.masked_autoencoding import kept_patches, objective

    config = config_of("mae")
    loss = objective(config, config.model)
    model = jax.jit(lambda: MaskedAutoencoder(config.model, rngs=nnx.Rngs(0)))()
    images = np.random.default_rng(0).integers(256, size=(2, 8, 8, 3), dtype=np.uint8)
    key = jax.random.key(5)
    sums, _ = loss.loss(model, None, {"images": images, "weight": np.ones(2, np.float32)}, key)
    mask_key, _ = jax.random.split(key)
    kept = jnp.argsort(jax.random.uniform(mask_key, (2, 16)), axis=1)[:, :4]
    pixels = (images / 255 - 0.5) / 0.5
    patches = pixels.reshape(2, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 16, 12)
    normal = (patches - patches.mean(-1, keepdims=True)) / np.sqrt(patches.var(-1, keepdims=True) + 1e-6)
    predicted = np.asarray(model(jnp.asarray(pixels, jnp.float32), kept), np.float64)
    errors = ((predicted - normal) ** 2).mean(-1)
    hidden = np.array([[n not in set(row.tolist()) for n in range(16)] for row in np.asarray(kept)])
    np.testing.assert_allclose(sums["loss"], (errors * hidden).sum() / 12, rtol=1e-4)
    assert [kept_patches(n, 0.75) for n in (2, 4, 16, 196)] == [1, 1, 4, 49]


@pytest.mark.long
def test_classes_of_other_sizes_and_sets(tmp_path):
    """Positions of a start are interpolated for images of another size; two test sets have separate scores."""
    train_set, test = digits()
    for name, images in (("train", train_set), ("one", test), ("two", test)):
        pixels = np.stack([images[n] for n in range(100)]).repeat(2, axis=1).repeat(2, axis=2)
        np.savez(tmp_path / f"{name}.npz", images=pixels, labels=images.labels[:100])
    tests = tuple(str(tmp_path / f"{name}.npz") for name in ("one", "two"))
    config = config_of("classes", data=str(tmp_path / "train.npz"), test=tests, examples=0, size=16, steps=4,
                       save_every=4, evaluate_every=4)  # fmt: skip
    results = train(config, tmp_path / "run")
    assert set(results["top1"]) == {"one", "two"}
    assert results["top1"]["one"] == results["top1"]["two"]
    run = tasks.load(tmp_path / "run")
    assert run.processor.size == 16
    assert run.attention_maps(np.zeros((16, 16, 3), np.uint8)).grid == (8, 8)
    assert dataclasses.asdict(run.config.model)["image_size"] == 8
    for recipe in ("fine_tune", "probe"):
        further = tasks.configure("image_classification", recipe, start=(str(tmp_path / "run"),))
        assert further.task.size == 16, "the size of the start's processor"


def test_a_further_set_of_several_splits_is_its_test(tmp_path):
    """The training images are never used for testing."""
    pixels = np.random.default_rng(0).integers(256, size=(12, 8, 8), dtype=np.uint8)
    path = str(tmp_path / "set.npz")
    np.savez(path, x_train=pixels, y_train=[0, 1] * 6, x_test=pixels[:3], y_test=[1, 0, 1])
    splits = open_splits(ImageDataConfig(data=path, test=(path,)))
    assert [len(images) for images in splits.tests.values()] == [3]
    # A test set with the name of another split gets a name of its own.
    for name in ("valid", "train"):
        np.savez(tmp_path / name, images=pixels[:5], labels=[0, 1, 0, 1, 0])
    renamed = open_splits(
        ImageDataConfig(data=path, test=tuple(f"{tmp_path}/{n}.npz" for n in ("valid", "train")))
    )
    assert {name: len(images) for name, images in renamed.tests.items()} == {"valid_": 5, "train_": 5}
    with pytest.raises(UserError, match="has several splits, none of them marked for validation"):
        open_splits(ImageDataConfig(data=path, valid=path))


def test_the_last_layer_of_a_student_is_frozen_at_first():
    config = tasks.configure(
        "self_distillation", "digits", width=16, layers=1, heads=2, feed_forward=16, prototypes=8,
        projection_hidden=8, bottleneck=4, frozen_prototype_steps=2, local_crops=1, batch_size=2, steps=10,
    )  # fmt: skip
    entry = entry_of(config)
    objective = entry.objective(config, config.model)
    model = make_model(module_of(entry, config.model), config.model)
    shapes = entry.abstract_batch(config)
    rng = np.random.default_rng(0)
    batch = {
        name: jnp.asarray(rng.integers(0, 256, x.shape) if name != "weight" else np.ones(x.shape), x.dtype)
        for name, x in shapes.items()
    }
    extra = objective.initial_extra(model, jax.random.key(0))
    differentiated = jax.jit(
        jax.grad(lambda model, extra: objective.loss(model, extra, batch, jax.random.key(1))[0]["loss"])
    )
    for step, frozen in ((0, True), (1, True), (2, False)):
        gradient = named_leaves(differentiated(model, extra | {"step": jnp.int32(step)}))
        assert (np.abs(gradient["prototypes/kernel"]).max() == 0) == frozen, step


@pytest.mark.long
def test_collapse_is_noted_during_training(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(
        self_distillation.SelfDistillationTask,
        "extra_scores",
        lambda self, kept, name: iter([("teacher_entropy", 2.0), ("prototype_entropy", 2.0)]),
    )
    config = tasks.configure(
        "self_distillation", "digits", width=16, layers=1, heads=2, feed_forward=16, prototypes=8,
        projection_hidden=8, bottleneck=4, local_crops=0, batch_size=8, steps=2, evaluate_every=1, examples=40,
    )  # fmt: skip
    tasks.train(config, tmp_path / "run", note=notes.append)
    assert [line.partition(":")[0] for line in notes if "collapsed" in line] == ["step 1", "step 2"]
