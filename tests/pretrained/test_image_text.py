"""CLIP, SigLIP and ViT with GPT-2 against `transformers` on torch, read and written."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import transformer_jax
from transformer_jax import pretrained
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

TEXT = dict(
    vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
    max_position_embeddings=13, eos_token_id=0, bos_token_id=0, pad_token_id=0,
)  # fmt: skip
VISION = dict(
    hidden_size=36,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=28,
    patch_size=7,
)
CAPTIONS = ["a dog runs on the grass", "two cats", "a red bus in the street of a town"]


def torch_modules():
    torch = pytest.importorskip("torch", reason="parity needs torch")
    return torch, pytest.importorskip("transformers", reason="parity needs transformers")


def fill(model, scale=0.3):
    """Replace the parameters by random numbers, none of them 0 or 1."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def make_folder(model, folder, *, frame):
    """Save a model with a byte-level tokenizer, whose template adds the end token if `frame`."""
    model.save_pretrained(folder)
    tokenizer = TextTokenizer.byte_pairs(CAPTIONS * 3, 300)
    assert tokenizer.ends == (0,)
    if frame:
        tokenizer = tokenizer.framed(lowercase=True)
    tokenizer.save(folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    images = {"image_processor_type": "ViTImageProcessor", "size": {"height": 28, "width": 28}}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


def clip_model(kind, **changes):
    _, transformers = torch_modules()
    name = "CLIP" if kind == "clip" else "Siglip"
    extra = {"projection_dim": 16} if kind == "clip" else {}
    text = TEXT | ({} if kind == "clip" else {"projection_size": 36}) | changes
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=dict(VISION), **extra)
    return fill(getattr(transformers, f"{name}Model")(config))


def torch_vectors(model, pixels, tokens):
    import torch

    with torch.no_grad():
        output = model(input_ids=torch.tensor(tokens), pixel_values=torch.tensor(pixels.transpose(0, 3, 1, 2)))
    names = ("image_embeds", "text_embeds", "logits_per_image")
    vectors = [getattr(output, name).numpy() for name in names]
    return [vectors[n] / np.linalg.norm(vectors[n], axis=1, keepdims=True) for n in (0, 1)] + vectors[2:]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_vectors_equal_those_of_transformers_in_both_directions(kind, tmp_path):
    model = clip_model(kind)
    make_folder(model, tmp_path / "theirs", frame=True)
    loaded, processor = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", loaded, processor)
    reloaded = type(model).from_pretrained(tmp_path / "ours").eval()
    pixels = np.random.default_rng(0).normal(size=(2, 28, 28, 3)).astype(np.float32)
    encoded = processor.encode(CAPTIONS)
    expected = torch_vectors(model, pixels, encoded.tokens.astype(np.int64))
    ours = [
        loaded.embed_images(jnp.asarray(pixels)),
        loaded.embed_texts(encoded.tokens, encoded.lengths),
        loaded(jnp.asarray(pixels), encoded.tokens, encoded.lengths),
    ]
    for vectors, reference in zip(ours, expected, strict=True):
        np.testing.assert_allclose(vectors, reference, atol=1e-4)
    again = torch_vectors(reloaded, pixels, encoded.tokens.astype(np.int64))
    for vectors, reference in zip(again, expected, strict=True):
        np.testing.assert_allclose(vectors, reference, atol=1e-5)
    _, second = pretrained.load(tmp_path / "ours")
    np.testing.assert_array_equal(second.encode(CAPTIONS).tokens, encoded.tokens)
    assert (second.max_length, second.pad, second.images) == (13, 0, processor.images)


@pytest.mark.long
def test_the_written_tokenizer_frames_texts_in_transformers(tmp_path):
    _, transformers = torch_modules()
    make_folder(clip_model("clip"), tmp_path / "theirs", frame=True)
    model, processor = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", model, processor)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    encoded = processor.encode([text.upper() for text in CAPTIONS])
    for text, ids, length in zip(CAPTIONS, encoded.tokens, encoded.lengths, strict=True):
        assert tokenizer(text.upper())["input_ids"] == ids[:length].tolist()
    padded = tokenizer(CAPTIONS, padding="max_length", truncation=True, max_length=13)["input_ids"]
    np.testing.assert_array_equal(padded, encoded.tokens)


@pytest.mark.long
def test_texts_are_split_as_by_the_tokenizer_of_clip(tmp_path):
    """The folder holds `vocab.json` and `merges.txt`, as OpenAI's do, or `tokenizer.json`."""
    _, transformers = torch_modules()
    alphabet = [chr(n) for n in range(33, 127)] + ["Ġ", "Ã", "©"]
    pieces = [*alphabet, *(f"{c}</w>" for c in alphabet), "do", "dog</w>", "th", "the</w>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    vocabulary |= {"<|startoftext|>": len(pieces), "<|endoftext|>": len(pieces) + 1}
    merges = [("d", "o"), ("do", "g</w>"), ("t", "h"), ("th", "e</w>")]
    reference = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges)
    reference.save_pretrained(tmp_path / "json")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "files" / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n"
    )
    texts = ["The dog's  running, in 2010!", "DOG", " the\tdog ", "a photo of the dog."]
    for name in ("json", "files"):
        tokenizer = TextTokenizer.open(tmp_path / name, model_type="clip")
        assert (tokenizer.begin, tokenizer.ends) == (len(pieces), (len(pieces) + 1,))
        for text in texts:
            (ids,) = tokenizer.encode([text])
            assert [tokenizer.begin, *ids, tokenizer.end] == reference(text)["input_ids"], text


def open_clip_names(name):
    """Return the OpenCLIP name of a tensor of `transformers`; queries, keys and values stay apart."""
    is_vision = name.startswith("vision_model")
    for theirs, ours in (
        ("vision_model.embeddings.patch_embedding", "visual.conv1"),
        ("vision_model.embeddings.class_embedding", "visual.class_embedding"),
        ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
        ("vision_model.pre_layrnorm", "visual.ln_pre"),
        ("vision_model.post_layernorm", "visual.ln_post"),
        ("text_model.embeddings.token_embedding", "token_embedding"),
        ("text_model.embeddings.position_embedding.weight", "positional_embedding"),
        ("text_model.final_layer_norm", "ln_final"),
        ("_model.encoder.layers", ".resblocks"),
        ("self_attn", "attn"), ("layer_norm", "ln_"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name.replace("vision.resb" if is_vision else "text.resb", f"{'visual.' * is_vision}transformer.resb")


@pytest.mark.long
def test_names_of_open_clip_are_read(tmp_path):
    """The tensors of a model of `transformers` are stored with the names and layouts of OpenCLIP."""
    from safetensors.numpy import save_file

    model = clip_model("clip", intermediate_size=4 * 24)
    make_folder(model, tmp_path / "theirs", frame=True)
    tensors = {open_clip_names(n): x.numpy() for n, x in model.state_dict().items() if "position_ids" not in n}
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        tensors[name.replace("q_proj.", "in_proj_")] = np.concatenate(parts)
    tensors["visual.proj"] = np.ascontiguousarray(tensors.pop("visual_projection.weight").T)
    tensors["text_projection"] = np.ascontiguousarray(tensors.pop("text_projection.weight").T)
    folder = tmp_path / "open_clip"
    folder.mkdir()
    save_file(tensors, folder / "open_clip_model.safetensors")
    vision = {
        "image_size": 28,
        "layers": 2,
        "width": 36,
        "patch_size": 7,
        "head_width": 12,
        "mlp_ratio": 20 / 36,
    }
    text = {"context_length": 13, "vocab_size": 300, "width": 24, "heads": 2, "layers": 3}
    description = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text, "quick_gelu": True}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": description, "preprocess_cfg": {}}))
    (folder / "tokenizer.json").write_bytes((tmp_path / "theirs" / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_bytes((tmp_path / "theirs" / "tokenizer_config.json").read_bytes())
    assert pretrained.is_published(folder)
    loaded, processor = pretrained.load(folder)
    pixels = np.random.default_rng(0).normal(size=(2, 28, 28, 3)).astype(np.float32)
    encoded = processor.encode(CAPTIONS)
    # A causal encoder does not see what follows the end, so that the padding may differ.
    expected = torch_vectors(model, pixels, encoded.tokens.astype(np.int64))
    np.testing.assert_allclose(loaded.embed_images(jnp.asarray(pixels)), expected[0], atol=1e-4)
    np.testing.assert_allclose(loaded.embed_texts(encoded.tokens, encoded.lengths), expected[1], atol=1e-4)
    assert processor.images.resize == "shortest"
    description["vision_cfg"] = vision | {"timm_model_name": "resnet"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": description}))
    with pytest.raises(UserError, match="timm_model_name"):
        pretrained.load(folder)


def test_texts_of_siglip_are_cleaned_as_by_its_tokenizer(tmp_path):
    make_folder(clip_model("siglip"), tmp_path, frame=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name, expected in (
        ("SiglipTokenizer", "a photo of a dogs ball"),
        ("Siglip2Tokenizer", "a photo, of a dog's ball."),
        ("PreTrainedTokenizerFast", "A photo, of a Dog's ball."),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
        _, processor = pretrained.load(tmp_path)
        assert processor.clean("A  photo, of a Dog's ball.") == expected


def captioner_model(width=36, **fields):
    _, transformers = torch_modules()
    encoder = transformers.ViTConfig(**(VISION | {"hidden_size": 36}))
    decoder = transformers.GPT2Config(
        vocab_size=300, n_embd=width, n_layer=3, n_head=2, n_positions=17, add_cross_attention=True, **fields
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = config.pad_token_id = config.eos_token_id = 0
    return fill(transformers.VisionEncoderDecoderModel(config=config), scale=0.2)


def torch_logits(model, pixels, tokens):
    import torch

    images = torch.tensor(pixels.transpose(0, 3, 1, 2))
    with torch.no_grad():
        return model(pixel_values=images, decoder_input_ids=torch.tensor(tokens)).logits.numpy()


@pytest.mark.long
@pytest.mark.parametrize("width", [24, 36])
def test_a_captioner_equals_transformers_in_both_directions(width, tmp_path):
    torch, _ = torch_modules()
    model = captioner_model(width)
    make_folder(model, tmp_path / "theirs", frame=False)
    loaded, processor = pretrained.load(tmp_path / "theirs")
    assert (loaded.projection is None) == (width == 36)
    pretrained.save(tmp_path / "ours", loaded, processor)
    reloaded = type(model).from_pretrained(tmp_path / "ours").eval()
    pixels = np.random.default_rng(0).normal(size=(2, 28, 28, 3)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 300, (2, 11))
    expected = torch_logits(model, pixels, tokens)
    np.testing.assert_allclose(loaded(jnp.asarray(pixels), tokens), expected, atol=1e-4)
    np.testing.assert_allclose(torch_logits(reloaded, pixels, tokens), expected, atol=1e-5)
    run = transformer_jax.load(tmp_path / "theirs")
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 256, (40, 30, 3), np.uint8))
    prepared = torch.tensor(np.asarray(run.normalize(run.image_processor.pixels(picture)[None])))
    with torch.no_grad():
        ids = model.generate(prepared.permute(0, 3, 1, 2), max_length=17, num_beams=1, do_sample=False)
    (caption,) = run.caption([picture], beam_size=1)
    assert caption == " ".join(run.tokenizer.tokenizer.decode(ids[:, 1:].tolist())[0].split())


def test_folders_that_are_not_supported(tmp_path):
    torch_modules()
    make_folder(clip_model("clip"), tmp_path / "clip", frame=True)
    config = json.loads((tmp_path / "clip" / "config.json").read_text())
    config["text_config"]["hidden_act"] = "gelu"
    (tmp_path / "clip" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="hidden_act is 'gelu' for texts and 'quick_gelu' for images"):
        pretrained.load(tmp_path / "clip")
    make_folder(captioner_model(), tmp_path / "captioner", frame=False)
    config = json.loads((tmp_path / "captioner" / "config.json").read_text())
    for changes, message in (
        ({"decoder": config["decoder"] | {"model_type": "bert"}}, "the decoder is a 'bert'; only gpt2"),
        ({"decoder": config["decoder"] | {"add_cross_attention": False}}, "the decoder has no cross-attention"),
        ({"decoder_start_token_id": 5}, "decoder_start_token_id is 5"),
    ):
        (tmp_path / "captioner" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=message):
            pretrained.load(tmp_path / "captioner")
