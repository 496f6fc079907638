"""A ViT with a GPT-2 as `transformers` publishes them: `VisionEncoderDecoderModel`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.models.multimodal.captioner import Captioner, CaptionerConfig
from transformer_jax.models.vision.vit import ViTConfig
from transformer_jax.pretrained.family import CONFIG, Count, Family, Tensor, linear, norm
from transformer_jax.pretrained.gpt2 import GPT2, dense
from transformer_jax.pretrained.vit import VIT, encoder_table, read_image_processor

# Maximum length in tokens of captions that a published folder generates.
_CAPTION_LENGTH = 64


class _Fields(msgspec.Struct):
    encoder: dict[str, Any]
    decoder: dict[str, Any]
    decoder_start_token_id: Count | None = None


def _parts(hf_config: Mapping[str, Any]) -> _Fields:
    """Return the configs of encoder and decoder.

    Raises:
      UserError: They are not a ViT and a GPT-2 with cross-attention.
    """
    fields = convert(hf_config, _Fields, CONFIG)
    for part, config, known in (("encoder", fields.encoder, "vit"), ("decoder", fields.decoder, "gpt2")):
        if config.get("model_type") != known:
            raise UserError(
                f"{CONFIG}: the {part} is a {config.get('model_type')!r}; only {known} is supported"
            )
    if not fields.decoder.get("add_cross_attention", False):
        raise UserError(f"{CONFIG}: the decoder has no cross-attention, so it would not see the image")
    return fields


def _config(hf_config: Mapping[str, Any]) -> CaptionerConfig:
    fields = _parts(hf_config)
    vision = VIT[0].config(fields.encoder)
    gpt = GPT2.config({**fields.decoder, "add_cross_attention": False})
    encoder = {f.name: getattr(vision, f.name) for f in dataclasses.fields(ViTConfig)} | {"pooler": False}
    return CaptionerConfig(
        **encoder, vocab_size=gpt.vocab_size, max_length=gpt.max_length, decoder_width=gpt.width,
        decoder_layers=gpt.layers, decoder_heads=gpt.heads, decoder_feed_forward=gpt.feed_forward,
        decoder_activation=gpt.activation, decoder_epsilon=gpt.norm_epsilon, tie=gpt.tie,
    )  # fmt: skip


def _describe(config: CaptionerConfig) -> dict[str, Any]:
    encoder = VIT[0].describe(config.encoder) | {"model_type": "vit", "architectures": ["ViTModel"]}
    decoder = GPT2.describe(config.decoder) | {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "add_cross_attention": True,
        "is_decoder": True,
    }
    return {"encoder": encoder, "decoder": decoder, "tie_word_embeddings": config.tie}


def _table() -> tuple[Tensor, ...]:
    layer, block = "h.{layer}", "blocks/cross_attention"
    cross = [
        *norm(f"{layer}.ln_cross_attn", f"{block}_norm"),
        *dense(f"{layer}.crossattention.q_attn", f"{block}/query"),
        *dense(f"{layer}.crossattention.c_proj", f"{block}/output"),
        *(
            Tensor(
                f"{layer}.crossattention.c_attn.{theirs}",
                tuple(f"{block}/{n}/{kind}" for n in ("key", "value")),
            )
            for theirs, kind in (("weight", "kernel"), ("bias", "bias"))
        ),
    ]
    projection = linear("enc_to_dec_proj", "projection", in_config="has_projection")
    return (
        *(row.moved("encoder.", "") for row in encoder_table("encoder/", tokens={}, dino=False, gated=False)),
        *projection,
        *(
            row.moved("decoder.transformer.", "decoder/", layers="decoder_layers")
            for row in (*GPT2.table, *cross)
        ),
    )


def _read_processor(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> ImageTextProcessor:
    fields = _parts(hf_config)
    images = read_image_processor(folder, fields.encoder)
    tokenizer = TextTokenizer.open(folder, model_type="gpt2")
    length = min(_CAPTION_LENGTH, int(fields.decoder.get("n_positions", 1_024)))
    processor = ImageTextProcessor.of(images, tokenizer, length, source=folder)
    if fields.decoder_start_token_id not in (None, processor.start):
        raise UserError(
            f"{folder}: decoder_start_token_id is {fields.decoder_start_token_id}; only the tokenizer's begin "
            f"or end token, {processor.start}, is supported"
        )
    return processor


def _settings(processor: ImageTextProcessor, config: CaptionerConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    ids = {
        "decoder_start_token_id": processor.start,
        "bos_token_id": processor.start,
        "eos_token_id": processor.end,
        "pad_token_id": processor.pad,
    }
    files = processor.published_tokenizer() | {
        "generation_config.json": ids | {"max_length": processor.max_length}
    }
    return ids, files


VISION_DECODER = Family(
    model_type="vision-encoder-decoder",
    architecture="VisionEncoderDecoderModel",
    module=Captioner,
    config=_config,
    describe=_describe,
    table=_table(),
    head="decoder.lm_head.weight",
    # A captioner has no pooler and no mask token; older files also store the causal masks.
    ignored=r"encoder\.pooler\..*|encoder\.embeddings\.mask_token"
    r"|decoder\.transformer\.h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",
    processor=_read_processor,
    settings=_settings,
    fits=lambda config: VIT[0].fits(config.encoder),
)
