"""Vision transformers against `transformers` on torch, in both directions, and against real weights."""

import json
import re

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
from transformer_jax.layers.positions.images import resized_grid
from transformer_jax.models.vision.dino import Dino, DinoConfig
from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
from transformer_jax.parameter_names import with_leaves
from transformer_jax.pretrained.folder import read_config
from transformer_jax.tasks.vision.data import normalised_images

SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=4)

# By architecture, further fields of its config.
KINDS = {
    "ViTModel": dict(intermediate_size=40),
    "ViTModel without a pooler": dict(intermediate_size=40),  # as DINO is published
    "ViTForImageClassification": dict(intermediate_size=40, num_labels=5, hidden_act="gelu_new"),
    "DeiTModel": dict(intermediate_size=40),
    "DeiTForImageClassification": dict(intermediate_size=40, num_labels=5),
    "DeiTForImageClassificationWithTeacher": dict(intermediate_size=40, num_labels=5),
    "Dinov2Model": dict(mlp_ratio=2),
    "Dinov2ForImageClassification": dict(mlp_ratio=2, num_labels=5),
    "Dinov2WithRegistersModel": dict(mlp_ratio=2, num_register_tokens=3),
    "Dinov2WithRegistersForImageClassification": dict(mlp_ratio=2, num_labels=5, use_swiglu_ffn=True),
}


def theirs(architecture: str, scale: float = 0.3, **fields):
    """A model of `transformers` with random parameters, none of them 0 or 1."""
    torch = pytest.importorskip("torch", reason="parity needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    name, _, without = architecture.partition(" without ")
    kind = getattr(transformers, name)
    options = {"add_pooling_layer": False} if without else {}
    model = kind(kind.config_class(**(SIZES | KINDS[architecture] | fields)), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def outputs(model, images, **options):
    """Logits, or states and what is pooled."""
    import torch

    with torch.no_grad():
        found = model(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)), **options)
    if hasattr(found, "logits"):
        return [found.logits.numpy()]
    pooled = found.last_hidden_state[:, 0] if found.pooler_output is None else found.pooler_output
    return [found.last_hidden_state.numpy(), pooled.numpy()]


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
    options = {"add_pooling_layer": False} if "without" in architecture else {}
    written = type(model).from_pretrained(tmp_path / "ours", **options).eval()
    # The size that positions are of, a larger one, and a smaller one that is no square.
    for height, width in ((28, 28), (40, 40), (12, 20)):
        images = pictures(height, width)
        options = {} if "Dinov2" in architecture else {"interpolate_pos_encoding": True}
        expected = outputs(model, images, **options)
        for one, other in zip(ours(read, images), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        for one, other in zip(outputs(written, images, **options), expected, strict=True):
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
    expected = kind.from_pretrained(tmp_path)(Image.fromarray(image), return_tensors="np")["pixel_values"][0]
    run = transformer_jax.load(tmp_path)
    found = run.normalised(run.processor.batch([image]))[0]
    np.testing.assert_allclose(found, expected.transpose(1, 2, 0), atol=1e-5)


def arrays_of(model) -> dict[str, np.ndarray]:
    """The parameters of a ViT of `transformers` under the names of the original files."""
    tensors = {name.removeprefix("vit."): x.detach().numpy() for name, x in model.state_dict().items()}
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    found = {
        "embedding/kernel": tensors["embeddings.patch_embeddings.projection.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": tensors["embeddings.patch_embeddings.projection.bias"],
        "cls": tensors["embeddings.cls_token"],
        "Transformer/posembed_input/pos_embedding": tensors["embeddings.position_embeddings"],
        "head/kernel": tensors["classifier.weight"].T,
        "head/bias": tensors["classifier.bias"],
        "Transformer/encoder_norm/scale": tensors["layernorm.weight"],
        "Transformer/encoder_norm/bias": tensors["layernorm.bias"],
    }
    for layer in range(model.config.num_hidden_layers):
        own = of_layer(tensors, layer)
        block = f"Transformer/encoderblock_{layer}/"
        for name, part in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            found |= {
                block + f"{name}/scale": own[f"{part}.weight"],
                block + f"{name}/bias": own[f"{part}.bias"],
            }
        for name, part in (("MlpBlock_3/Dense_0", "fc1"), ("MlpBlock_3/Dense_1", "fc2")):
            found |= {
                block + f"{name}/kernel": own[f"{part}.weight"].T,
                block + f"{name}/bias": own[f"{part}.bias"],
            }
        attention = block + "MultiHeadDotProductAttention_1/"
        for name in ("query", "key", "value"):
            found[f"{attention}{name}/kernel"] = own[f"{name}.weight"].T.reshape(width, heads, -1)
            found[f"{attention}{name}/bias"] = own[f"{name}.bias"].reshape(heads, -1)
        found[attention + "out/kernel"] = own["out.weight"].T.reshape(heads, -1, width)
        found[attention + "out/bias"] = own["out.bias"]
    return found


# Of ViT and DeiT, and of DINOv2: ends of their names in a layer, and what they are called in these tests.
PARTS = {
    "layernorm_before": "norm1", "layernorm_after": "norm2", "norm1": "norm1", "norm2": "norm2",
    "intermediate.dense": "fc1", "output.dense": "fc2", "mlp.fc1": "fc1", "mlp.fc2": "fc2",
    "attention.output.dense": "out", "attention.o_proj": "out",
    "attention.attention.query": "query", "attention.attention.key": "key",
    "attention.attention.value": "value",
    "attention.q_proj": "query", "attention.k_proj": "key", "attention.v_proj": "value",
    "layer_scale1.lambda1": "scale1", "layer_scale2.lambda1": "scale2",
}  # fmt: skip


def of_layer(tensors, layer: int) -> dict[str, np.ndarray]:
    """The parameters of a block of `transformers`, by part."""
    found = {}
    for name, tensor in tensors.items():
        matched = re.fullmatch(rf"(?:encoder\.)?layers?\.{layer}\.(.+)", name)
        if matched:
            part, _, kind = matched[1].rpartition(".")
            found[PARTS[matched[1]] if matched[1] in PARTS else f"{PARTS[part]}.{kind}"] = tensor
    return found


def test_original_arrays_are_read(tmp_path):
    """With Flax's GELU and its norms' epsilon, as JAX's own ViT was trained."""
    fields = dict(image_size=8, patch_size=2, hidden_size=32, num_attention_heads=4, layer_norm_eps=1e-6)
    model = theirs("ViTForImageClassification", hidden_act="gelu_pytorch_tanh", **fields)
    arrays = arrays_of(model)
    np.savez(tmp_path / "vit.npz", **arrays)
    read, processor = pretrained.load(tmp_path / "vit.npz")
    assert (read.config.heads, read.config.layers, processor.size) == (4, 2, 8)
    assert (processor.mean, processor.std) == ((0.5,) * 3, (0.5,) * 3)
    images = pictures(8, 8)
    np.testing.assert_allclose(read(jnp.asarray(images)), outputs(model, images)[0], atol=1e-4)
    # A dense layer with tanh in front of the classes, as files of ImageNet-21k have.
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0].astype(np.float32)
    np.savez(tmp_path / "large.npz", **arrays, **{"pre_logits/kernel": turned, "pre_logits/bias": np.zeros(32)})
    other, _ = pretrained.load(tmp_path / "large.npz")
    first = np.asarray(read.encoder.hidden_states(jnp.asarray(images)))[:, 0]
    expected = np.tanh(first @ turned) @ arrays["head/kernel"] + arrays["head/bias"]
    np.testing.assert_allclose(other(jnp.asarray(images)), expected, atol=1e-4)
    del arrays["head/kernel"]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(UserError, match="head/kernel is missing"):
        pretrained.load(tmp_path / "other.npz")


@pytest.mark.parametrize("dinov2", others_long([False, True]))
def test_timm_names_are_read(tmp_path, dinov2):
    """qkv in one tensor, `ls1.gamma`, `dist_token`: parameters of `transformers` under timm's names."""
    from safetensors.numpy import save_file

    if dinov2:
        sizes = dict(hidden_size=384, num_attention_heads=6, patch_size=14, mlp_ratio=4, layer_norm_eps=1e-6)
        model = theirs("Dinov2Model", 0.05, num_hidden_layers=12, image_size=28, **sizes)
        ours, size = "", 28
    else:
        sizes = dict(hidden_size=192, num_attention_heads=3, patch_size=16, intermediate_size=768)
        model = theirs(
            "DeiTForImageClassificationWithTeacher", 0.05, num_hidden_layers=12, num_labels=7, image_size=32,
            layer_norm_eps=1e-6, **sizes,
        )  # fmt: skip
        ours, size = "deit.", 32
    state = {name.removeprefix(ours): x.detach().numpy() for name, x in model.state_dict().items()}
    names = {
        "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
        "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
        "embeddings.cls_token": "cls_token", "embeddings.distillation_token": "dist_token",
        "embeddings.position_embeddings": "pos_embed", "layernorm.weight": "norm.weight",
        "layernorm.bias": "norm.bias",
        "cls_classifier.weight": "head.weight", "cls_classifier.bias": "head.bias",
        "distillation_classifier.weight": "head_dist.weight", "distillation_classifier.bias": "head_dist.bias",
    }  # fmt: skip
    tensors = {name: state[own] for own, name in names.items() if own in state}
    for layer in range(12):
        own, block = of_layer(state, layer), f"blocks.{layer}."
        for kind in ("weight", "bias"):
            joined = [own[f"{part}.{kind}"] for part in ("query", "key", "value")]
            tensors[f"{block}attn.qkv.{kind}"] = np.concatenate(joined)
            for part, name in (
                ("out", "attn.proj"), ("norm1", "norm1"), ("norm2", "norm2"), ("fc1", "mlp.fc1"),
                ("fc2", "mlp.fc2"),
            ):  # fmt: skip
                tensors[f"{block}{name}.{kind}"] = own[f"{part}.{kind}"]
        if dinov2:
            tensors |= {f"{block}ls{n}.gamma": own[f"scale{n}"] for n in (1, 2)}
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
    images = pictures(size, size)
    found = read.hidden_states(jnp.asarray(images)) if dinov2 else read(jnp.asarray(images))
    np.testing.assert_allclose(found, outputs(model, images)[0], atol=1e-4)


def test_positions_of_timm_are_smoothed_in_smaller_images(tmp_path):
    """As its `resample_abs_pos_embed` does: torch's bicubic interpolation with antialias."""
    torch = pytest.importorskip("torch", reason="parity needs torch")
    described = {"architecture": "vit_tiny_patch16_224", "num_classes": 7}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config, *_ = read_config(tmp_path)
    table = np.random.default_rng(0).normal(size=(14 * 14, 5)).astype(np.float32)
    grid = torch.tensor(table.reshape(1, 14, 14, 5).transpose(0, 3, 1, 2))
    expected = torch.nn.functional.interpolate(grid, size=(6, 9), mode="bicubic", antialias=True)
    found = resized_grid(jnp.asarray(table), (14, 14), (6, 9), antialias=config.antialias)
    np.testing.assert_allclose(found, expected.numpy()[0].reshape(5, -1).T, atol=1e-5)


@pytest.mark.long
def test_the_encoder_of_a_dino_is_published(tmp_path):
    torch = pytest.importorskip("torch", reason="parity needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    sizes = dict(width=24, layers=2, heads=3, feed_forward=40, patch_size=4, image_size=28)
    model = Dino(DinoConfig(**sizes, prototypes=8, projection_hidden=8, bottleneck=4), rngs=nnx.Rngs(0))
    pretrained.save(tmp_path, model.encoder, ImageProcessor(28))
    read = transformers.ViTModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    images = pictures(28, 28)
    with torch.no_grad():
        states = read(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2))).last_hidden_state
    np.testing.assert_allclose(model.encoder(jnp.asarray(images)), states.numpy(), atol=1e-4)


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
