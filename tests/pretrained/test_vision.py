"""Vision transformers against `transformers` on torch, in both directions, and against real weights."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import transformer_jax
from tests.cases import others_long
from transformer_jax import configure, pretrained
from transformer_jax.data.corpora.images import open_images
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner
from transformer_jax.models.vit import ViT, ViTClassifier, ViTConfig
from transformer_jax.parameter_names import named_leaves, with_leaves
from transformer_jax.tasks.image_data import normalised_images

SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=4)

# By architecture, further fields of its config.
KINDS = {
    "ViTModel": dict(intermediate_size=40),
    "ViTForImageClassification": dict(intermediate_size=40, num_labels=5, hidden_act="gelu_new"),
    "DeiTModel": dict(intermediate_size=40),
    "DeiTForImageClassification": dict(intermediate_size=40, num_labels=5),
    "DeiTForImageClassificationWithTeacher": dict(intermediate_size=40, num_labels=5),
    "Dinov2Model": dict(mlp_ratio=2),
    "Dinov2ForImageClassification": dict(mlp_ratio=2, num_labels=5),
    "Dinov2WithRegistersModel": dict(mlp_ratio=2, num_register_tokens=3),
    "Dinov2WithRegistersForImageClassification": dict(mlp_ratio=2, num_labels=5, use_swiglu_ffn=True),
}


def theirs(architecture: str):
    """A model of `transformers` with random parameters, none of them 0 or 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**SIZES, **KINDS[architecture]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def outputs(model, images, **options):
    """Logits, or states and what is pooled."""
    import torch

    with torch.no_grad():
        found = model(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)), **options)
    if hasattr(found, "logits"):
        return [found.logits.numpy()]
    return [found.last_hidden_state.numpy(), found.pooler_output.numpy()]


def ours(model, images):
    images = jnp.asarray(images)
    if isinstance(model, ViTClassifier):
        return [model(images)]
    states = model(images)
    return [states, model.pooled(states)]


def pictures(height, width):
    return np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("architecture", KINDS)
def test_equals_transformers_in_both_directions(architecture, tmp_path):
    model = theirs(architecture)
    model.save_pretrained(tmp_path / "theirs")
    read, processor = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", read, processor)
    written = type(model).from_pretrained(tmp_path / "ours").eval()
    # The size that positions are of, a larger one, and a smaller one that is no square.
    for height, width in ((28, 28), (40, 40), (12, 20)):
        images = pictures(height, width)
        options = {} if "Dinov2" in architecture else {"interpolate_pos_encoding": True}
        wanted = outputs(model, images, **options)
        for one, other in zip(ours(read, images), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        for one, other in zip(outputs(written, images, **options), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_folder_keeps_labels_and_image_settings(tmp_path):
    config = ViTConfig.preset("mini", classes=3)
    processor = ImageProcessor(
        8, resize="shortest", resized=10, resampling="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6),
        labels=("a", "b", "c"),
    )  # fmt: skip
    pretrained.save(tmp_path / "folder", ViTClassifier(config, rngs=nnx.Rngs(0)), processor)
    _, read = pretrained.load(tmp_path / "folder")
    assert read == processor
    found = transformer_jax.load(tmp_path / "folder").classify([np.zeros((9, 30, 3), np.uint8)])
    assert set(found[0].probabilities) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("resize", "resized", "module"), [("squash", 0, "vit"), ("shortest", 10, "bit"), ("square", 10, "deit")]
)
def test_transformers_prepares_images_as_our_folder_says(resize, resized, module, tmp_path):
    reason = "parity needs transformers"
    pytest.importorskip("torch", reason=reason)
    theirs = pytest.importorskip(f"transformers.models.{module}.image_processing_pil_{module}", reason=reason)
    config = ViTConfig.preset("mini", classes=3)
    processor = ImageProcessor(
        8, resize=resize, resized=resized, resampling="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6),
        labels=("a", "b", "c"),
    )  # fmt: skip
    pretrained.save(tmp_path, ViTClassifier(config, rngs=nnx.Rngs(0)), processor)
    described = json.loads((tmp_path / "preprocessor_config.json").read_text())
    kind = getattr(theirs, f"{described['image_processor_type']}Pil")
    image = np.random.default_rng(0).integers(0, 256, (31, 24, 3), np.uint8)
    wanted = kind.from_pretrained(tmp_path)(Image.fromarray(image), return_tensors="np")["pixel_values"][0]
    run = transformer_jax.load(tmp_path)
    found = run.normalised(run.processor.batch([image]))[0]
    np.testing.assert_allclose(found, wanted.transpose(1, 2, 0), atol=1e-5)


def arrays_of(model: ViTClassifier) -> dict[str, np.ndarray]:
    """The parameters of a ViT under the names of the original files."""
    leaves = {name.removeprefix("encoder/"): np.asarray(x) for name, x in named_leaves(model).items()}
    size, width = model.config.patch_size, model.config.width
    found = {
        "embedding/kernel": leaves["patches/projection/kernel"].reshape(size, size, 3, width),
        "embedding/bias": leaves["patches/projection/bias"],
        "cls": leaves["class_token"][None],
        "Transformer/posembed_input/pos_embedding": leaves["positions/table/embedding"][None],
        "head/kernel": leaves["head/kernel"],
        "head/bias": leaves["head/bias"],
        "pre_logits/kernel": leaves["pooler/kernel"],
        "pre_logits/bias": leaves["pooler/bias"],
        "Transformer/encoder_norm/scale": leaves["norm/scale"],
        "Transformer/encoder_norm/bias": leaves["norm/bias"],
    }
    names = {
        "self_attention_norm": "LayerNorm_0", "feed_forward_norm": "LayerNorm_2",
        "feed_forward/expand": "MlpBlock_3/Dense_0", "feed_forward/contract": "MlpBlock_3/Dense_1",
        "self_attention/output": "MultiHeadDotProductAttention_1/out",
    }  # fmt: skip
    names |= {f"self_attention/{n}": f"MultiHeadDotProductAttention_1/{n}" for n in ("query", "key", "value")}
    for own, other in names.items():
        for kind in ("kernel", "bias", "scale"):
            for layer in range(model.config.layers):
                if f"blocks/{own}/{kind}" in leaves:
                    name = f"Transformer/encoderblock_{layer}/{other}/{kind}"
                    found[name] = leaves[f"blocks/{own}/{kind}"][layer]
    return found


def random_model(config, module=ViTClassifier):
    rng = np.random.default_rng(3)
    model = module(config, rngs=nnx.Rngs(0))
    leaves = {
        n: jnp.asarray(rng.normal(size=x.shape, scale=0.3), jnp.float32) for n, x in named_leaves(model).items()
    }
    return with_leaves(model, leaves)


def test_original_arrays_are_read(tmp_path):
    config = ViTConfig.preset("mini", classes=7, pooler=True, activation="gelu_tanh", layers=2)
    model = random_model(config)
    np.savez(tmp_path / "vit.npz", **arrays_of(model))
    read, processor = pretrained.load(tmp_path / "vit.npz")
    assert (read.config.heads, read.config.layers, processor.size) == (4, 2, 8)
    images = pictures(8, 8)
    np.testing.assert_allclose(read(jnp.asarray(images)), model(jnp.asarray(images)), atol=1e-6)
    arrays = arrays_of(model)
    del arrays["head/kernel"]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(UserError, match="head/kernel is missing"):
        pretrained.load(tmp_path / "other.npz")


@pytest.mark.parametrize("dinov2", others_long([False, True]))
def test_timm_names_are_read(tmp_path, dinov2):
    """qkv in one tensor, `ls1.gamma`, `dist_token`: against the same parameters under transformers' names."""
    from safetensors.numpy import save_file

    if dinov2:
        model = random_model(ViTConfig.preset("s16", patch_size=14, image_size=28, layer_scale=1e-5), ViT)
    else:
        sizes = dict(classes=7, image_size=32, distillation=True, distillation_head=True)
        model = random_model(ViTConfig.preset("ti16", **sizes))
    config, size = model.config, model.config.image_size
    leaves = {n.removeprefix("encoder/"): np.asarray(x) for n, x in named_leaves(model).items()}
    width = config.width
    tensors = {
        "patch_embed.proj.weight": leaves["patches/projection/kernel"]
        .reshape(config.patch_size, config.patch_size, 3, width)
        .transpose(3, 2, 0, 1),
        "patch_embed.proj.bias": leaves["patches/projection/bias"],
        "cls_token": leaves["class_token"][None],
        "pos_embed": leaves["positions/table/embedding"][None],
        "norm.weight": leaves["norm/scale"],
        "norm.bias": leaves["norm/bias"],
    }
    if dinov2:
        for number, kind in enumerate(("attention", "feed_forward"), 1):
            scales = leaves[f"blocks/{kind}_scale"]
            tensors |= {f"blocks.{n}.ls{number}.gamma": scale for n, scale in enumerate(scales)}
    else:
        tensors |= {
            "dist_token": leaves["distillation_token"][None],
            "head.weight": leaves["head/kernel"].T,
            "head.bias": leaves["head/bias"],
            "head_dist.weight": leaves["distillation_head/kernel"].T,
            "head_dist.bias": leaves["distillation_head/bias"],
        }
    for layer in range(config.layers):
        own = {n.removeprefix("blocks/"): x[layer] for n, x in leaves.items() if n.startswith("blocks/")}
        block = f"blocks.{layer}."
        parts = [own[f"self_attention/{n}/kernel"].reshape(width, width) for n in ("query", "key", "value")]
        tensors |= {
            block + "attn.qkv.weight": np.concatenate(parts, axis=1).T,
            block + "attn.qkv.bias": np.concatenate(
                [own[f"self_attention/{n}/bias"].reshape(-1) for n in ("query", "key", "value")]
            ),
            block + "attn.proj.weight": own["self_attention/output/kernel"].reshape(width, width).T,
            block + "attn.proj.bias": own["self_attention/output/bias"],
            block + "norm1.weight": own["self_attention_norm/scale"],
            block + "norm1.bias": own["self_attention_norm/bias"],
            block + "norm2.weight": own["feed_forward_norm/scale"],
            block + "norm2.bias": own["feed_forward_norm/bias"],
            block + "mlp.fc1.weight": own["feed_forward/expand/kernel"].T,
            block + "mlp.fc1.bias": own["feed_forward/expand/bias"],
            block + "mlp.fc2.weight": own["feed_forward/contract/kernel"].T,
            block + "mlp.fc2.bias": own["feed_forward/contract/bias"],
        }
    save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, tmp_path / "model.safetensors")
    described = {
        "architecture": "vit_small_patch14_dinov2" if dinov2 else "deit_tiny_distilled_patch16_224",
        "num_classes": 0 if dinov2 else 7,
        "pretrained_cfg": {
            "input_size": [3, size, size], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.2], "crop_pct": 0.8,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    read, processor = pretrained.load(tmp_path)
    assert (processor.resized, processor.mean) == (int(size / 0.8), (0.4, 0.5, 0.6))
    assert configure("image_classification", "fine_tune", start=(str(tmp_path),)).task.mean == processor.mean
    images = jnp.asarray(pictures(size, size))
    if dinov2:
        np.testing.assert_allclose(read.hidden_states(images), model.hidden_states(images), atol=1e-4)
    else:
        np.testing.assert_allclose(read(images), model(images), atol=1e-5)


def test_weights_of_another_patch_size_are_refused(tmp_path):
    config = ViTConfig.preset("mini", classes=3)
    pretrained.save(
        tmp_path / "a", ViTClassifier(config, rngs=nnx.Rngs(0)), ImageProcessor(8, labels=("a", "b", "c"))
    )
    described = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(described | {"patch_size": 4}))
    with pytest.raises(UserError, match=r"projection\.weight is"):
        pretrained.load(tmp_path / "a")


@pytest.mark.long
def test_real_post_norm_weights(shared):
    """A ViT by others, with torch's encoder-layer names, converted here: logits and accuracy as torch has
    them."""
    from safetensors.numpy import load_file

    folder = shared / "weights" / "vit_cifar10_small"
    model = post_norm_model(load_file(folder / "model.safetensors"))
    with np.load(folder / "expected.npz") as expected:
        images, logits = expected["images"], expected["logits"]
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    np.testing.assert_allclose(model(normalised_images(images, mean, std)), logits, atol=1e-4)
    # On the true pixels of CIFAR-10's test images.
    test = open_images(str(shared / "data" / "cifar10" / "test_true.tar.xz"))
    runner = ImageRunner(lambda m, x: m(normalised_images(x, mean, std)))
    found = runner(runner.prepared(model), test).argmax(axis=1)
    assert round(100 * float((found == test.labels).mean()), 2) == 73.72


def post_norm_model(tensors) -> ViTClassifier:
    """The converter of a torch state dict with `nn.TransformerEncoderLayer`."""
    width, layers = 128, 6
    config = ViTConfig(
        image_size=32, patch_size=4, width=width, layers=layers, heads=8, feed_forward=256, norm="post",
        final_norm=True, activation="relu", norm_epsilon=1e-5, classes=10,
    )  # fmt: skip
    model = ViTClassifier(config, rngs=nnx.Rngs(0))

    def stacked(name, change=lambda x: x):
        return np.stack([change(tensors[f"transformer.layers.{n}.{name}"]) for n in range(layers)])

    leaves = {
        "encoder/patches/projection/kernel": tensors["patch_embed.proj.weight"]
        .transpose(2, 3, 1, 0)
        .reshape(-1, width),
        "encoder/patches/projection/bias": tensors["patch_embed.proj.bias"],
        "encoder/class_token": tensors["cls_token"][0],
        "encoder/positions/table/embedding": tensors["pos_embed"][0],
        # Their norm in front of the head is of token 0 alone, which is the same.
        "encoder/norm/scale": tensors["mlp_head.0.weight"],
        "encoder/norm/bias": tensors["mlp_head.0.bias"],
        "head/kernel": tensors["mlp_head.1.weight"].T,
        "head/bias": tensors["mlp_head.1.bias"],
    }
    blocks = "encoder/blocks/"
    for ours, own in {"self_attention_norm": "norm1", "feed_forward_norm": "norm2"}.items():
        leaves[f"{blocks}{ours}/scale"] = stacked(f"{own}.weight")
        leaves[f"{blocks}{ours}/bias"] = stacked(f"{own}.bias")
    for ours, own in {"expand": "linear1", "contract": "linear2"}.items():
        leaves[f"{blocks}feed_forward/{ours}/kernel"] = stacked(f"{own}.weight", lambda x: x.T)
        leaves[f"{blocks}feed_forward/{ours}/bias"] = stacked(f"{own}.bias")
    for number, name in enumerate(("query", "key", "value")):
        part = slice(number * width, (number + 1) * width)
        leaves[f"{blocks}self_attention/{name}/kernel"] = stacked(
            "self_attn.in_proj_weight", lambda x, p=part: x[p].T.reshape(width, 8, 16)
        )
        leaves[f"{blocks}self_attention/{name}/bias"] = stacked(
            "self_attn.in_proj_bias", lambda x, p=part: x[p].reshape(8, 16)
        )
    leaves[f"{blocks}self_attention/output/kernel"] = stacked(
        "self_attn.out_proj.weight", lambda x: x.T.reshape(8, 16, width)
    )
    leaves[f"{blocks}self_attention/output/bias"] = stacked("self_attn.out_proj.bias")
    return with_leaves(model, {name: jnp.asarray(x) for name, x in leaves.items()})
