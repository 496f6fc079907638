"""Compare text encoders with `transformers` on torch: pretraining, fine-tuning and embedding.

    python -m experiments.benchmarks.bench_encoder [--rounds 7] [--weights FOLDER] [--json]

Pretraining: a masked LM of 4 layers and width 256, vocabulary 8,000, 32 rows of 128 tokens, 15 % masked,
dropout 0.1 (including attention weights), AdamW. Fine-tuning: a classifier of MiniLM's size (6 layers, width
384, 12 heads), batches of 32 texts of 16, 32 and 64 tokens. Embedding: 1,000 texts of 5 to 120 words including
tokenization and normalization, against sentence-transformers with its batches of 32, sorted by length; with
`--onnx` also against ONNX Runtime with such batches. All sides use float32 and all cores. Each side runs in a
separate process, and their measurements alternate. Ratios are this package's median throughput over the
other's. Needs torch, transformers and sentence-transformers, and for `--onnx` onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.training_step import our_stepper, torch_stepper
from transformer_jax.commands.interleaved_rounds import compare, print_rates, processor

V, ROWS, LENGTH, MASKED = 8_000, 32, 128, 20
SMALL: dict[str, Any] = dict(layers=4, width=256, heads=4, feed_forward=1_024, max_length=LENGTH)
MINILM: dict[str, Any] = dict(layers=6, width=384, heads=12, feed_forward=1_536, max_length=512)
TEXT_LENGTHS = (16, 32, 64)
OPTIMIZER: dict[str, Any] = dict(rate=1e-4, weight_decay=0.01, clip=1, b1=0.9, b2=0.999, epsilon=1e-6)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 7
    """Measurements per side."""
    weights: str | None = None
    """Published folder of a BERT for the embeddings; None means random weights of MiniLM's size."""
    texts: int = 1_000
    """Number of texts to embed."""
    onnx: bool = False
    """Measure ONNX Runtime as a third side of the embedding."""
    json: bool = False
    """Print a JSON object as the last line."""


def masked_batch() -> dict[str, np.ndarray]:
    """Return tokens (ROWS, LENGTH), and MASKED positions per row with their labels."""
    rng = np.random.default_rng(0)
    positions = np.stack([np.sort(rng.permutation(LENGTH)[:MASKED]) for _ in range(ROWS)])
    return {
        "tokens": rng.integers(5, V, (ROWS, LENGTH)).astype(np.int32),
        "positions": positions.astype(np.int32),
        "labels": rng.integers(5, V, (ROWS, MASKED)).astype(np.int32),
    }


def labeled_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens (ROWS, T), labels (ROWS,)) for each length of `TEXT_LENGTHS`."""
    rng = np.random.default_rng(1)
    return [(rng.integers(5, V, (ROWS, T)), rng.integers(0, 2, ROWS)) for T in TEXT_LENGTHS]


def texts(count: int) -> list[str]:
    """Return random texts of 5 to 120 words, most of them short."""
    rng = np.random.default_rng(2)
    words = ["time", "of", "the", "people", "new", "way", "day", "man", "thing", "woman", "life", "child"]
    lengths = np.clip(rng.lognormal(3.0, 0.7, count), 5, 120).astype(int)
    return [" ".join(rng.choice(words, n)) for n in lengths]


def random_weights(folder: str) -> None:
    """Write random weights of MiniLM's size as a published folder."""
    from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
    from transformer_jax.models.encoders.bert import Bert, BertConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    tokenizer = EncoderTokenizer.wordpiece(texts(100), 200)
    save(folder, make_model(Bert, BertConfig(vocab_size=tokenizer.vocab_size, **MINILM)), tokenizer)


# --- this package ------------------------------------------------------------


def our_training(_: Any) -> dict[str, Callable[[], Any]]:
    """Return jobs that pretrain for one step, and fine-tune for one step per length."""
    from transformer_jax.models.encoders.bert import BertClassifier, BertConfig, BertMaskedLM
    from transformer_jax.tasks.encoders.masked_language_modeling import MaskedWords
    from transformer_jax.tasks.encoders.sequence_classification import Classes
    from transformer_jax.training.trained_model import make_model

    masked = masked_batch()
    masked |= {
        "segments": np.ones((ROWS, LENGTH), np.int32),
        "weights": np.ones((ROWS, MASKED), np.float32),
    }
    labeled = [
        {
            "tokens": tokens.astype(np.int32),
            "types": np.zeros_like(tokens, np.int32),
            "segments": np.ones_like(tokens, np.int32),
            "weight": np.ones(ROWS, np.float32),
            "target": labels.astype(np.int32),
        }
        for tokens, labels in labeled_batches()
    ]
    masked_lm = make_model(BertMaskedLM, BertConfig(vocab_size=V, pooler=False, **SMALL))
    classifier = make_model(BertClassifier, BertConfig(vocab_size=V, classes=2, **MINILM))
    pretrain = our_stepper(masked_lm, MaskedWords(), **OPTIMIZER)
    fine_tune = our_stepper(classifier, Classes(), **OPTIMIZER)
    return {
        "pretraining": lambda: pretrain(masked),
        "finetuning": lambda: [fine_tune(batch) for batch in labeled] and None,
    }


def our_embedding(argument: tuple[str, int]) -> dict[str, Callable[[], Any]]:
    """Return a job that embeds all texts."""
    import transformer_jax

    folder, count = argument
    run, sentences = transformer_jax.load(folder), texts(count)
    return {"embedding": lambda: run.embed(sentences, pooling="mean", normalize=True)}


# --- other packages ------------------------------------------------------------


def torch_training(_: Any) -> dict[str, Callable[[], Any]]:
    """Return jobs that pretrain for one step, and fine-tune for one step per length."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    def config(sizes: dict[str, Any]) -> Any:
        return BertConfig(
            vocab_size=V,
            hidden_size=sizes["width"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            intermediate_size=sizes["feed_forward"],
            max_position_embeddings=sizes["max_length"],
        )

    masked = masked_batch()
    labels = np.full((ROWS, LENGTH), -100, np.int64)
    np.put_along_axis(labels, masked["positions"].astype(np.int64), masked["labels"].astype(np.int64), axis=1)
    tokens = torch.tensor(masked["tokens"]).long()
    masked_inputs = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=torch.tensor(labels))
    labeled = [
        dict(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.ones(tokens.shape, dtype=torch.long),
            labels=torch.tensor(classes),
        )
        for tokens, classes in labeled_batches()
    ]
    pretrain = torch_stepper(BertForMaskedLM(config(SMALL)), rate=OPTIMIZER["rate"])
    fine_tune = torch_stepper(BertForSequenceClassification(config(MINILM)), rate=OPTIMIZER["rate"])
    return {
        "pretraining": lambda: pretrain(**masked_inputs),
        "finetuning": lambda: [fine_tune(**batch) for batch in labeled] and None,
    }


def _batches(folder: str, count: int) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield (indices of the texts, padded inputs of a model) in batches of 32, longest texts first."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    sentences = texts(count)
    order = sorted(range(count), key=lambda n: -len(sentences[n]))
    for start in range(0, count, 32):
        indices = order[start : start + 32]
        batch = [sentences[n] for n in indices]
        yield (
            indices,
            dict(tokenizer(batch, padding=True, truncation=True, max_length=256, return_tensors="np")),
        )


def torch_embedding(argument: tuple[str, int]) -> dict[str, Callable[[], Any]]:
    """Return a job that embeds all texts with sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer

    folder, count = argument
    sentences = texts(count)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})

    def embed() -> np.ndarray:
        return model.encode(sentences, batch_size=32, normalize_embeddings=True, show_progress_bar=False)

    return {"embedding": embed}


def onnx_embedding(argument: tuple[str, int]) -> dict[str, Callable[[], Any]]:
    """Return a job that embeds all texts with ONNX Runtime."""
    import onnxruntime
    import torch
    from transformers import BertModel

    folder, count = argument
    path = pathlib.Path(tempfile.mkdtemp()) / "model.onnx"
    model = BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self, encoder: Any):
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    names = ["input_ids", "attention_mask"]
    example = tuple(torch.ones((2, 8), dtype=torch.long) for _ in names)
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("length")}
    torch.onnx.export(
        States(model),
        example,
        str(path),
        input_names=names,
        dynamo=True,
        dynamic_shapes=dict.fromkeys(names, axes),
    )
    session = onnxruntime.InferenceSession(str(path))

    def embed() -> np.ndarray:
        embeddings = np.zeros((count, model.config.hidden_size), np.float32)
        for indices, batch in _batches(folder, count):
            (states,) = session.run(None, {name: batch[name] for name in names})
            mask = batch["attention_mask"][..., None]
            means = (states * mask).sum(1) / mask.sum(1)
            embeddings[indices] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return embeddings

    return {"embedding": embed}


def main() -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__)
    jobs = {"pretraining": 3, "finetuning": 1}
    report = compare(jobs, {"ours": our_training, "torch": torch_training}, None, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.weights is None:
            random_weights(f"{folder}/weights")
        weights = arguments.weights or f"{folder}/weights"
        sides: dict[str, Callable] = {"ours": our_embedding, "torch": torch_embedding}
        if arguments.onnx:
            sides["onnx"] = onnx_embedding
        report |= compare({"embedding": 1}, sides, (weights, arguments.texts), arguments.rounds)
    amounts = {"pretraining": ROWS, "finetuning": ROWS * len(TEXT_LENGTHS), "embedding": arguments.texts}
    summary: dict[str, Any] = {"processor": processor(), **print_rates(report, amounts, "examples")}
    vectors = report["embedding"]["results"]
    summary["largest_difference"] = float(np.abs(vectors["ours"] - vectors["torch"]).max())
    print(f"largest difference of the vectors: {summary['largest_difference']:.1e}; {summary['processor']}")
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
