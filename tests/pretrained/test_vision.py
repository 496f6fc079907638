"""Vision transformers against `transformers` on torch, read and written, and against real weights."""

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
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.layers.positions.images import resize_grid
from transformer_jax.models.vision.dino import Dino, DinoConfig
from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
from transformer_jax.parameter_names import with_leaves
from transformer_jax.pretrained.folder import read_config

SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=4)

# Further config fields by architecture.
ARCHITECTURES = {
    "ViTModel": dict(intermediate_size=40),
    "ViTModel without a pooler": dict(intermediate_size=40),  # the format of DINO
    "ViTForImageClassification": dict(intermediate_size=40, num_labels=5, hidden_act="gelu_new"),
    "DeiTModel": dict(intermediate_size=40),
    "DeiTForImageClassification": dict(intermediate_size=40, num_labels=5),
    "DeiTForImageClassificationWithTeacher": dict(intermediate_size=40, num_labels=5),
    "Dinov2Model": dict(mlp_ratio=2),
    "Dinov2ForImageClassification": dict(mlp_ratio=2, num_labels=5),
    "Dinov2WithRegistersModel": dict(mlp_ratio=2, num_register_tokens=3),
    "Dinov2WithRegistersForImageClassification": dict(mlp_ratio=2, num_labels=5, use_swiglu_ffn=True),
}


def torch_model(architecture: str, scale: float = 0.3, **fields):
    """Build a model of `transformers` with random parameters, none of them 0 or 1."""
    torch = pytest.importorskip("torch", reason="parity needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    name, _, variant = architecture.partition(" without ")
    model_class = getattr(transformers, name)
    options = {"add_pooling_layer": False} if variant else {}
    model = model_class(model_class.config_class(**(SIZES | ARCHITECTURES[architecture] | fields)), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def torch_outputs(model, images, **options):
    """Return the logits, or the states and the pooled states."""
    import torch

    with torch.no_grad():
        output = model(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)), **options)
    if hasattr(output, "logits"):
        return [output.logits.numpy()]
    pooled = output.last_hidden_state[:, 0] if output.pooler_output is None else output.pooler_output
    return [output.last_hidden_state.numpy(), pooled.numpy()]


def jax_outputs(model, images):
    images = jnp.asarray(images)
    if isinstance(model, ViTClassifier):
        return [model(images)]
    states = model(images)
    return [states, model.pooled(states)]


def pictures(height, width):
    return np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_transformers_in_both_directions(architecture, tmp_path):
    model = torch_model(architecture)
    model.save_pretrained(tmp_path / "theirs")
    loaded, processor = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", loaded, processor)
    options = {"add_pooling_layer": False} if "without" in architecture else {}
    reloaded = type(model).from_pretrained(tmp_path / "ours", **options).eval()
    # The size of the positions, a larger one, and a smaller one that is no square.
    for height, width in ((28, 28), (40, 40), (12, 20)):
        images = pictures(height, width)
        options = {} if "Dinov2" in architecture else {"interpolate_pos_encoding": True}
        expected = torch_outputs(model, images, **options)
        for output, reference in zip(jax_outputs(loaded, images), expected, strict=True):
            np.testing.assert_allclose(output, reference, atol=1e-4)
        for output, reference in zip(torch_outputs(reloaded, images, **options), expected, strict=True):
            np.testing.assert_allclose(output, reference, atol=1e-5)


def test_folder_keeps_labels_and_image_settings(tmp_path):
    config = ViTConfig.preset("mini", classes=3)
    processor = ImageProcessor(
        8, resize="shortest", resized=10, resampling="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6),
        labels=("a", "b", "c"),
    )  # fmt: skip
    pretrained.save(tmp_path / "folder", ViTClassifier(config, rngs=nnx.Rngs(0)), processor)
    _, loaded_processor = pretrained.load(tmp_path / "folder")
    assert loaded_processor == processor
    results = transformer_jax.load(tmp_path / "folder").classify([np.zeros((9, 30, 3), np.uint8)])
    assert set(results[0].probabilities) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("resize", "resized", "family"), [("squash", 0, "vit"), ("shortest", 10, "bit"), ("square", 10, "deit")]
)
def test_transformers_prepares_images_like_our_processor(resize, resized, family, tmp_path):
    reason = "parity needs transformers"
    pytest.importorskip("torch", reason=reason)
    module = pytest.importorskip(f"transformers.models.{family}.image_processing_pil_{family}", reason=reason)
    config = ViTConfig.preset("mini", classes=3)
    processor = ImageProcessor(
        8, resize=resize, resized=resized, resampling="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6),
        labels=("a", "b", "c"),
    )  # fmt: skip
    pretrained.save(tmp_path, ViTClassifier(config, rngs=nnx.Rngs(0)), processor)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    reference = getattr(module, f"{settings['image_processor_type']}Pil").from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (31, 24, 3), np.uint8)
    expected = reference(Image.fromarray(image), return_tensors="np")["pixel_values"][0]
    run = transformer_jax.load(tmp_path)
    pixels = run.normalize(run.processor.batch([image]))[0]
    np.testing.assert_allclose(pixels, expected.transpose(1, 2, 0), atol=1e-5)


def arrays_of(model) -> dict[str, np.ndarray]:
    """Return the parameters of a ViT of `transformers` with the names of the original files."""
    tensors = {name.removeprefix("vit."): x.detach().numpy() for name, x in model.state_dict().items()}
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    arrays = {
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
        block_tensors = of_layer(tensors, layer)
        block = f"Transformer/encoderblock_{layer}/"
        for name, part in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            arrays |= {
                block + f"{name}/scale": block_tensors[f"{part}.weight"],
                block + f"{name}/bias": block_tensors[f"{part}.bias"],
            }
        for name, part in (("MlpBlock_3/Dense_0", "fc1"), ("MlpBlock_3/Dense_1", "fc2")):
            arrays |= {
                block + f"{name}/kernel": block_tensors[f"{part}.weight"].T,
                block + f"{name}/bias": block_tensors[f"{part}.bias"],
            }
        attention = block + "MultiHeadDotProductAttention_1/"
        for name in ("query", "key", "value"):
            arrays[f"{attention}{name}/kernel"] = block_tensors[f"{name}.weight"].T.reshape(width, heads, -1)
            arrays[f"{attention}{name}/bias"] = block_tensors[f"{name}.bias"].reshape(heads, -1)
        arrays[attention + "out/kernel"] = block_tensors["out.weight"].T.reshape(heads, -1, width)
        arrays[attention + "out/bias"] = block_tensors["out.bias"]
    return arrays


# Short names for the ends of parameter names in a layer of ViT, DeiT and DINOv2.
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
    """Return the parameters of a block of `transformers` by short name."""
    parameters = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"(?:encoder\.)?layers?\.{layer}\.(.+)", name)
        if match:
            part, _, kind = match[1].rpartition(".")
            parameters[PARTS[match[1]] if match[1] in PARTS else f"{PARTS[part]}.{kind}"] = tensor
    return parameters


def test_original_arrays_are_read(tmp_path):
    """The original ViT was trained with Flax's GELU and epsilon of norms."""
    fields = dict(image_size=8, patch_size=2, hidden_size=32, num_attention_heads=4, layer_norm_eps=1e-6)
    model = torch_model("ViTForImageClassification", hidden_act="gelu_pytorch_tanh", **fields)
    arrays = arrays_of(model)
    np.savez(tmp_path / "vit.npz", **arrays)
    loaded, processor = pretrained.load(tmp_path / "vit.npz")
    assert (loaded.config.heads, loaded.config.layers, processor.size) == (4, 2, 8)
    assert (processor.mean, processor.std) == ((0.5,) * 3, (0.5,) * 3)
    images = pictures(8, 8)
    np.testing.assert_allclose(loaded(jnp.asarray(images)), torch_outputs(model, images)[0], atol=1e-4)
    # Files of ImageNet-21k have a dense layer with tanh before the head.
    matrix = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0].astype(np.float32)
    np.savez(tmp_path / "large.npz", **arrays, **{"pre_logits/kernel": matrix, "pre_logits/bias": np.zeros(32)})
    with_dense_layer, _ = pretrained.load(tmp_path / "large.npz")
    first = np.asarray(loaded.encoder.hidden_states(jnp.asarray(images)))[:, 0]
    expected = np.tanh(first @ matrix) @ arrays["head/kernel"] + arrays["head/bias"]
    np.testing.assert_allclose(with_dense_layer(jnp.asarray(images)), expected, atol=1e-4)
    del arrays["head/kernel"]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(UserError, match="head/kernel is missing"):
        pretrained.load(tmp_path / "other.npz")


@pytest.mark.parametrize("dinov2", others_long([False, True]))
def test_timm_names_are_read(tmp_path, dinov2):
    """timm joins qkv in one tensor and has names such as `ls1.gamma` and `dist_token`."""
    from safetensors.numpy import save_file

    if dinov2:
        sizes = dict(hidden_size=384, num_attention_heads=6, patch_size=14, mlp_ratio=4, layer_norm_eps=1e-6)
        model = torch_model("Dinov2Model", 0.05, num_hidden_layers=12, image_size=28, **sizes)
        prefix, size = "", 28
    else:
        sizes = dict(hidden_size=192, num_attention_heads=3, patch_size=16, intermediate_size=768)
        model = torch_model(
            "DeiTForImageClassificationWithTeacher", 0.05, num_hidden_layers=12, num_labels=7, image_size=32,
            layer_norm_eps=1e-6, **sizes,
        )  # fmt: skip
        prefix, size = "deit.", 32
    state = {name.removeprefix(prefix): x.detach().numpy() for name, x in model.state_dict().items()}
    names = {
        "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
        "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
        "embeddings.cls_token": "cls_token", "embeddings.distillation_token": "dist_token",
        "embeddings.position_embeddings": "pos_embed", "layernorm.weight": "norm.weight",
        "layernorm.bias": "norm.bias",
        "cls_classifier.weight": "head.weight", "cls_classifier.bias": "head.bias",
        "distillation_classifier.weight": "head_dist.weight", "distillation_classifier.bias": "head_dist.bias",
    }  # fmt: skip
    tensors = {name: state[source] for source, name in names.items() if source in state}
    for layer in range(12):
        block_tensors, block = of_layer(state, layer), f"blocks.{layer}."
        for kind in ("weight", "bias"):
            joined = [block_tensors[f"{part}.{kind}"] for part in ("query", "key", "value")]
            tensors[f"{block}attn.qkv.{kind}"] = np.concatenate(joined)
            for part, name in (
                ("out", "attn.proj"), ("norm1", "norm1"), ("norm2", "norm2"), ("fc1", "mlp.fc1"),
                ("fc2", "mlp.fc2"),
            ):  # fmt: skip
                tensors[f"{block}{name}.{kind}"] = block_tensors[f"{part}.{kind}"]
        if dinov2:
            tensors |= {f"{block}ls{n}.gamma": block_tensors[f"scale{n}"] for n in (1, 2)}
    save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()}, tmp_path / "model.safetensors")
    hf_config = {
        "architecture": "vit_small_patch14_dinov2" if dinov2 else "deit_tiny_distilled_patch16_224",
        "num_classes": 0 if dinov2 else 7,
        "pretrained_cfg": {
            "input_size": [3, size, size], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.2], "crop_pct": 0.8,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    loaded, processor = pretrained.load(tmp_path)
    assert (processor.resized, processor.mean) == (int(size / 0.8), (0.4, 0.5, 0.6))
    assert configure("image_classification", "fine_tune", start=(str(tmp_path),)).task.mean == processor.mean
    images = pictures(size, size)
    output = loaded.hidden_states(jnp.asarray(images)) if dinov2 else loaded(jnp.asarray(images))
    np.testing.assert_allclose(output, torch_outputs(model, images)[0], atol=1e-4)


def test_positions_of_timm_are_antialiased_for_smaller_images(tmp_path):
    """timm's `resample_abs_pos_embed` uses torch's bicubic interpolation with antialias."""
    torch = pytest.importorskip("torch", reason="parity needs torch")
    hf_config = {"architecture": "vit_tiny_patch16_224", "num_classes": 7}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config, *_ = read_config(tmp_path)
    table = np.random.default_rng(0).normal(size=(14 * 14, 5)).astype(np.float32)
    grid = torch.tensor(table.reshape(1, 14, 14, 5).transpose(0, 3, 1, 2))
    expected = torch.nn.functional.interpolate(grid, size=(6, 9), mode="bicubic", antialias=True)
    positions = resize_grid(jnp.asarray(table), (14, 14), (6, 9), antialias=config.antialias)
    np.testing.assert_allclose(positions, expected.numpy()[0].reshape(5, -1).T, atol=1e-5)


@pytest.mark.long
def test_the_encoder_of_dino_is_read_by_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="parity needs torch")
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    sizes = dict(width=24, layers=2, heads=3, feed_forward=40, patch_size=4, image_size=28)
    model = Dino(DinoConfig(**sizes, prototypes=8, projection_hidden=8, bottleneck=4), rngs=nnx.Rngs(0))
    pretrained.save(tmp_path, model.encoder, ImageProcessor(28))
    loaded = transformers.ViTModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    images = pictures(28, 28)
    with torch.no_grad():
        states = loaded(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2))).last_hidden_state
    np.testing.assert_allclose(model.encoder(jnp.asarray(images)), states.numpy(), atol=1e-4)


def test_weights_of_another_patch_size_are_refused(tmp_path):
    config = ViTConfig.preset("mini", classes=3)
    pretrained.save(
        tmp_path / "a", ViTClassifier(config, rngs=nnx.Rngs(0)), ImageProcessor(8, labels=("a", "b", "c"))
    )
    hf_config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(hf_config | {"patch_size": 4}))
    with pytest.raises(UserError, match=r"projection\.weight is"):
        pretrained.load(tmp_path / "a")


MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def real_post_norm_model(shared):
    from safetensors.numpy import load_file

    folder = shared / "weights" / "vit_cifar10_small"
    return folder, post_norm_model(load_file(folder / "model.safetensors"))


@pytest.mark.long
def test_real_post_norm_weights(shared):
    """Logits equal torch's for a foreign ViT with the names of torch's encoder layers."""
    folder, model = real_post_norm_model(shared)
    with np.load(folder / "expected.npz") as expected:
        images, logits = expected["images"], expected["logits"]
    np.testing.assert_allclose(model(normalize_images(images, MEAN, DEVIATION)), logits, atol=1e-4)


@pytest.mark.soak
def test_accuracy_of_real_post_norm_weights(shared):
    """Accuracy on the 10,000 test images equals torch's."""
    _, model = real_post_norm_model(shared)
    test = open_images(str(shared / "data" / "cifar10" / "test_true.tar.xz"))
    runner = ImageRunner(lambda m, x: m(normalize_images(x, MEAN, DEVIATION)))
    predictions = runner(runner.prepare(model), test).argmax(axis=1)
    assert round(100 * float((predictions == test.labels).mean()), 2) == 73.72


def post_norm_model(tensors) -> ViTClassifier:
    """Convert the state dict of a torch model with `nn.TransformerEncoderLayer`."""
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
        # The foreign model applies this norm only to token 0, which is equivalent.
        "encoder/norm/scale": tensors["mlp_head.0.weight"],
        "encoder/norm/bias": tensors["mlp_head.0.bias"],
        "head/kernel": tensors["mlp_head.1.weight"].T,
        "head/bias": tensors["mlp_head.1.bias"],
    }
    blocks = "encoder/blocks/"
    for ours, published in {"self_attention_norm": "norm1", "feed_forward_norm": "norm2"}.items():
        leaves[f"{blocks}{ours}/scale"] = stacked(f"{published}.weight")
        leaves[f"{blocks}{ours}/bias"] = stacked(f"{published}.bias")
    for ours, published in {"expand": "linear1", "contract": "linear2"}.items():
        leaves[f"{blocks}feed_forward/{ours}/kernel"] = stacked(f"{published}.weight", lambda x: x.T)
        leaves[f"{blocks}feed_forward/{ours}/bias"] = stacked(f"{published}.bias")
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
