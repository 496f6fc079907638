"""Compare the tiny Transformer with torch: training steps, greedy search and beam search.

    python -m experiments.benchmarks.bench_translate [--sources FILE] [--rounds 7] [--json]

Training: `torch.nn.Transformer` with tied embeddings and Adam, against this package's training step; 128 pairs
of 20 tokens, vocabulary 10,000, float32, dropout 0.3, label smoothing 0.1. Decoding: MarianMTModel of
`transformers` with the same weights, 1,000 sources in batches of 64 sorted by length, 20 new tokens for each,
because random weights never end a sentence; this package searches two batches at a time, as its `Translator`
does. Each side runs in separate processes, and their measurements alternate. Ratios are this package's median
throughput over torch's. Needs torch and transformers; takes three to five minutes on two CPU cores.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.training_step import our_stepper
from transformer_jax.commands.interleaved_rounds import compare, compare_throughput

VOCAB, ROWS, LENGTH, DROPOUT, SMOOTHING = 10_000, 128, 20, 0.3, 0.1
LAYERS, WIDTH, FEED_FORWARD, HEADS = 4, 128, 256, 4  # the tiny preset
PAD, BEGIN, END = 0, 1, 2
SENTENCES, BATCH, BEAMS, ALPHA = 1_000, 64, 5, 0.6


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    sources: str | None = None
    """Text file with the sentences to translate, plain or .gz; None means phrases of the embedded corpus."""
    rounds: int = 7
    """Measurements per side."""
    json: bool = False
    """Print a JSON object as the last line."""


def training_tokens() -> np.ndarray:
    """Return token ids (ROWS, LENGTH) without padding."""
    return np.random.default_rng(0).integers(3, VOCAB, (ROWS, LENGTH), np.int64)


def source_batches(path: str | None) -> list[np.ndarray]:
    """Return the sources as padded batches (BATCH, S), sorted by length."""
    from transformer_jax.data.batches.pair_batches import pad
    from transformer_jax.data.corpora.pairs import read_lines
    from transformer_jax.data.corpora.parallel import phrases_corpus
    from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer

    if path is None:
        texts = [p.source for p in phrases_corpus("phrases:en-de", 2_000, 1, SENTENCES, 0).test]
    else:
        texts = read_lines(path)[:SENTENCES]
    tokenizer = BytePairTokenizer.train(texts, VOCAB)
    ids = sorted(([*i, END] for i in tokenizer.encode(texts)), key=len)
    batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
    batches[-1] += [batches[-1][-1]] * (BATCH - len(batches[-1]))
    return [pad(batch, BATCH, len(batch[-1])) for batch in batches]


def our_model(dropout: float) -> Any:
    """Return the model of the preset with biases in the attention, as in torch."""
    from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
    from transformer_jax.training.trained_model import make_model

    return make_model(
        Transformer, TransformerConfig.preset("tiny", VOCAB, dropout=dropout, attention_bias=True)
    )


# --- this package ------------------------------------------------------------


def our_training(_: Any) -> dict[str, Callable[[], Any]]:
    """Return a job that trains for one step."""
    from transformer_jax.tasks.translators.objective import TokenLoss

    step = our_stepper(
        our_model(DROPOUT), TokenLoss(SMOOTHING),
        rate=1e-3, weight_decay=0, clip=0, b1=0.9, b2=0.98, epsilon=1e-9,
    )  # fmt: skip
    tokens = training_tokens().astype(np.int32)
    batch = {"source": tokens, "target_in": tokens, "target_out": tokens}
    return {"training": lambda: step(batch)}


def our_decoding(batches: list[np.ndarray]) -> dict[str, Callable[[], Any]]:
    """Return jobs that translate all sentences, padded to the translator's buckets as `Translator` does."""
    from transformer_jax.data.batches.pair_batches import pad
    from transformer_jax.decoding.translator import bucket_length, search_all

    model = our_model(0.0)
    padded = [
        pad(batch.tolist(), BATCH, bucket_length(batch.shape[1], model.config.max_length)) for batch in batches
    ]

    def decode(beams: int) -> list[np.ndarray]:
        results = search_all(model, padded, max_length=LENGTH, beam_size=beams, alpha=ALPHA)
        return [np.asarray(hypotheses.tokens[:, 0]) for hypotheses in results]

    return {"greedy": lambda: decode(1), "beam": lambda: decode(BEAMS)}


# --- torch ------------------------------------------------------------


def torch_training(_: Any) -> dict[str, Callable[[], Any]]:
    """Return a job that trains for one step, written like torch's tutorials."""
    import torch

    torch.manual_seed(0)

    class Translator(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
            self.transformer = torch.nn.Transformer(
                WIDTH, HEADS, LAYERS, LAYERS, FEED_FORWARD, DROPOUT, batch_first=True
            )
            self.dropout = torch.nn.Dropout(DROPOUT)
            torch.nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
            angles = torch.arange(LENGTH)[:, None] * torch.exp(
                torch.arange(0, WIDTH, 2) * (-math.log(10_000) / WIDTH)
            )
            sinusoids = torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(LENGTH, WIDTH)
            self.register_buffer("positions", sinusoids)

        def forward(self, source, target):
            padding = source == PAD
            causal = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            x, y = (self.dropout(self.embedding(t) * WIDTH**0.5 + self.positions) for t in (source, target))
            hidden = self.transformer(
                x, y, tgt_mask=causal, tgt_is_causal=True,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return hidden @ self.embedding.weight.T

    model = Translator().train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.98), eps=1e-9)
    loss = torch.nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=SMOOTHING)
    tokens = torch.tensor(training_tokens())

    def step() -> None:
        optimizer.zero_grad()
        loss(model(tokens, tokens).reshape(-1, VOCAB), tokens.reshape(-1)).backward()
        optimizer.step()

    return {"training": step}


def marian_of(model: Any) -> Any:
    """Return a MarianMTModel with the weights of a post-norm Transformer of this package."""
    import jax.numpy as jnp
    import torch
    from transformers import MarianConfig, MarianMTModel

    from transformer_jax.layers.positions.absolute import sinusoidal_positions
    from transformer_jax.parameter_names import named_leaves

    c = model.config
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=c.vocab_size, d_model=c.width, encoder_layers=c.encoder_layers,
            decoder_layers=c.decoder_layers, encoder_ffn_dim=c.feed_forward, decoder_ffn_dim=c.feed_forward,
            encoder_attention_heads=c.heads, decoder_attention_heads=c.heads, activation_function="relu",
            max_position_embeddings=c.max_length, scale_embedding=True, pad_token_id=PAD, eos_token_id=END,
            forced_eos_token_id=None, decoder_start_token_id=BEGIN,
        )
    ).eval()  # fmt: skip
    ours = {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}
    theirs = marian.state_dict()

    def fill(name: str, value: np.ndarray) -> None:
        theirs[name].copy_(torch.tensor(np.array(value)).reshape(theirs[name].shape))

    table = ours["target_embedding/table/embedding"][: c.vocab_size]
    positions = np.asarray(sinusoidal_positions(jnp.arange(c.max_length), c.width))
    fill("model.shared.weight", table)
    fill("lm_head.weight", table)
    for stack, layers in (("encoder", c.encoder_layers), ("decoder", c.decoder_layers)):
        fill(f"model.{stack}.embed_tokens.weight", table)
        fill(f"model.{stack}.embed_positions.weight", positions)
        attentions = {"self_attention": "self_attn"}
        if stack == "decoder":
            attentions["cross_attention"] = "encoder_attn"
        norms = {f"{our}_norm": f"{their}_layer_norm" for our, their in attentions.items()}
        for i in range(layers):
            prefix = f"model.{stack}.layers.{i}."
            for our, their in attentions.items():
                for part, name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
                    kernel = ours[f"{stack}/{our}/{part}/kernel"][i].reshape(c.width, c.width)
                    fill(f"{prefix}{their}.{name}_proj.weight", kernel.T)
                    fill(f"{prefix}{their}.{name}_proj.bias", ours[f"{stack}/{our}/{part}/bias"][i])
            for part, name in (("expand", "fc1"), ("contract", "fc2")):
                fill(f"{prefix}{name}.weight", ours[f"{stack}/feed_forward/{part}/kernel"][i].T)
                fill(f"{prefix}{name}.bias", ours[f"{stack}/feed_forward/{part}/bias"][i])
            for our, their in (norms | {"feed_forward_norm": "final_layer_norm"}).items():
                fill(f"{prefix}{their}.weight", ours[f"{stack}/{our}/scale"][i])
                fill(f"{prefix}{their}.bias", ours[f"{stack}/{our}/bias"][i])
    return marian


def torch_decoding(batches: list[np.ndarray]) -> dict[str, Callable[[], Any]]:
    """Return jobs that translate all sentences with `generate`, padded to the longest of each batch."""
    import torch

    marian = marian_of(our_model(0.0))
    tensors = [torch.tensor(batch, dtype=torch.long) for batch in batches]

    def decode(beams: int) -> list[np.ndarray]:
        outputs = []
        with torch.no_grad():
            for batch in tensors:
                tokens = marian.generate(
                    input_ids=batch, attention_mask=batch != PAD, num_beams=beams, do_sample=False,
                    max_new_tokens=LENGTH, length_penalty=ALPHA,
                )  # fmt: skip
                outputs.append(tokens[:, 1:].numpy())
        return outputs

    return {"greedy": lambda: decode(1), "beam": lambda: decode(BEAMS)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    batches = source_batches(arguments.sources)
    sentences = BATCH * len(batches)
    training = compare({"training": 5}, {"ours": our_training, "torch": torch_training}, None, arguments.rounds)
    decoding = compare(
        {"greedy": 1, "beam": 1}, {"ours": our_decoding, "torch": torch_decoding}, batches, arguments.rounds
    )
    summary: dict[str, Any] = {}
    for job, unit, amount in (
        ("training", "target tokens", ROWS * LENGTH),
        ("greedy", "sentences", sentences),
        ("beam", "sentences", sentences),
    ):
        medians = {**training, **decoding}[job]
        ratio, line = compare_throughput(medians, amount, unit)
        summary[f"{job}_ratio"] = ratio
        if medians["results"]["ours"] is not None:
            ours, theirs = (np.concatenate(medians["results"][side]) for side in ("ours", "torch"))
            equal = float(np.mean([(a == b).all() for a, b in zip(ours, theirs, strict=True)]))
            summary[f"{job}_equal"] = equal
            line += f", {100 * equal:.1f} % of the outputs equal"
        print(f"{job:9} ratio {ratio:.2f}: {line}", flush=True)
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
