"""Text encoders here and in `transformers` on torch: pretraining, fine-tuning, embedding, interleaved.

    python -m experiments.benchmarks.bench_encoder [--rounds 7] [--weights FOLDER] [--json]

Pretraining: a masked LM of 4 layers and width 256, vocabulary 8,000, 32 rows of 128 tokens, 15 % masked,
dropout 0.1 (attention weights included), AdamW. Fine-tuning: a classifier of MiniLM's size (6 layers, width
384, 12 heads), batches of 32 texts of 16, 32 and 64 tokens. Embedding: 1,000 texts of 5 to 120 words,
tokenized, in vectors of length 1, against sentence-transformers with its batches of 32, sorted by length; with
`--onnx` ONNX Runtime runs such batches too. All in float32 with all cores. Each side has a process of its own,
and their measurements alternate; medians are compared, and every ratio is this package's throughput over the
peer's. Needs torch, transformers and sentence-transformers, and for `--onnx` onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # the processes of both sides inherit it

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.interleaved_rounds import compare, processor

V, ROWS, LENGTH, MASKED = 8_000, 32, 128, 20
SMALL: dict[str, Any] = dict(layers=4, width=256, heads=4, feed_forward=1_024, max_length=LENGTH)
MINILM: dict[str, Any] = dict(layers=6, width=384, heads=12, feed_forward=1_536, max_length=512)
TEXT_LENGTHS = (16, 32, 64)
RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Throughput of this package over that of transformers on torch at the same sizes."""

    rounds: int = 7
    """Measurements of each side."""
    weights: str | None = None
    """Published folder of a BERT for the embeddings; None: random weights of MiniLM's size."""
    texts: int = 1_000
    """Number of texts that are embedded."""
    onnx: bool = False
    """ONNX Runtime as a third side of the embedding."""
    json: bool = False
    """Print one JSON object last on standard output."""


def masked_batch() -> dict[str, np.ndarray]:
    """Tokens (ROWS, LENGTH), and MASKED positions a row with their labels."""
    rng = np.random.default_rng(0)
    positions = np.stack([np.sort(rng.permutation(LENGTH)[:MASKED]) for _ in range(ROWS)])
    return {
        "tokens": rng.integers(5, V, (ROWS, LENGTH)).astype(np.int32),
        "positions": positions.astype(np.int32),
        "labels": rng.integers(5, V, (ROWS, MASKED)).astype(np.int32),
    }


def labelled_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens (ROWS, T), labels (ROWS,)) of each length."""
    rng = np.random.default_rng(1)
    return [(rng.integers(5, V, (ROWS, T)), rng.integers(0, 2, ROWS)) for T in TEXT_LENGTHS]


def texts(count: int) -> list[str]:
    """Texts of 5 to 120 words, most of them short."""
    rng = np.random.default_rng(2)
    words = ["time", "of", "the", "people", "new", "way", "day", "man", "thing", "woman", "life", "child"]
    lengths = np.clip(rng.lognormal(3.0, 0.7, count), 5, 120).astype(int)
    return [" ".join(rng.choice(words, n)) for n in lengths]


def random_weights(folder: str) -> None:
    """Writes random weights of MiniLM's size as a published folder."""
    from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
    from transformer_jax.models.encoders.bert import Bert, BertConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    tokenizer = EncoderTokenizer.wordpiece(texts(100), 200)
    save(folder, make_model(Bert, BertConfig(vocab_size=tokenizer.vocab_size, **MINILM)), tokenizer)


# --- this package ------------------------------------------------------------


def our_stepper(module: Any, config: Any, objective: Any) -> Callable[[Any], None]:
    """A function that does one training step on a batch."""
    import jax

    from transformer_jax.training.optimizers import make_optimizer
    from transformer_jax.training.schedules import make_schedule
    from transformer_jax.training.step import create_state, make_train_step
    from transformer_jax.training.trained_model import make_model

    model = make_model(module, config)
    schedule = make_schedule("constant", peak=RATE, warmup=1, steps=1)
    optimizer = make_optimizer(
        "adam", schedule, model, weight_decay=0.01, clip=1, b1=0.9, b2=0.999, epsilon=1e-6
    )
    train_step = make_train_step(objective, optimizer)
    state = create_state(model, optimizer, jax.random.key(0))

    def step(batch: Any) -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)

    return step


def our_training(_: Any) -> dict[str, Callable[[], Any]]:
    """One step a call; of fine-tuning one of each length."""
    from transformer_jax.models.encoders.bert import BertClassifier, BertConfig, BertMaskedLM
    from transformer_jax.tasks.encoders.masked_language_modeling import MaskedWords
    from transformer_jax.tasks.encoders.sequence_classification import Classes

    masked = masked_batch()
    masked |= {
        "segments": np.ones((ROWS, LENGTH), np.int32),
        "weights": np.ones((ROWS, MASKED), np.float32),
    }
    labelled = [
        {
            "tokens": tokens.astype(np.int32),
            "types": np.zeros_like(tokens, np.int32),
            "segments": np.ones_like(tokens, np.int32),
            "weight": np.ones(ROWS, np.float32),
            "target": labels.astype(np.int32),
        }
        for tokens, labels in labelled_batches()
    ]
    pretrain = our_stepper(BertMaskedLM, BertConfig(vocab_size=V, pooler=False, **SMALL), MaskedWords())
    fine_tune = our_stepper(BertClassifier, BertConfig(vocab_size=V, classes=2, **MINILM), Classes())
    return {
        "pretraining": lambda: pretrain(masked),
        "finetuning": lambda: [fine_tune(batch) for batch in labelled] and None,
    }


def our_embedding(argument: tuple[str, int]) -> dict[str, Callable[[], Any]]:
    """All texts a call."""
    import transformer_jax

    folder, count = argument
    run, given = transformer_jax.load(folder), texts(count)
    return {"embedding": lambda: run.embed(given, pooling="mean", normalise=True)}


# --- the peers ---------------------------------------------------------------


def torch_stepper(model: Any) -> Callable[..., None]:
    """A function that does one training step on the model's arguments."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-6, weight_decay=0.01)

    def step(**given: Any) -> None:
        loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_training(_: Any) -> dict[str, Callable[[], Any]]:
    """One step a call; of fine-tuning one of each length."""
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
    given = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=torch.tensor(labels))
    labelled = [
        dict(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.ones(tokens.shape, dtype=torch.long),
            labels=torch.tensor(classes),
        )
        for tokens, classes in labelled_batches()
    ]
    pretrain = torch_stepper(BertForMaskedLM(config(SMALL)))
    fine_tune = torch_stepper(BertForSequenceClassification(config(MINILM)))
    return {
        "pretraining": lambda: pretrain(**given),
        "finetuning": lambda: [fine_tune(**batch) for batch in labelled] and None,
    }


def _batches(folder: str, count: int) -> tuple[list[list[int]], list[dict[str, np.ndarray]]]:
    """Numbers of the texts, longest first, in batches of 32, and what a model reads of them, padded."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    given = texts(count)
    order = sorted(range(count), key=lambda n: -len(given[n]))
    parts = [order[n : n + 32] for n in range(0, count, 32)]
    return parts, [
        dict(
            tokenizer(
                [given[n] for n in own], padding=True, truncation=True, max_length=256, return_tensors="np"
            )
        )
        for own in parts
    ]


def _vectors(parts: list[list[int]], outputs: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((sum(map(len, parts)), outputs[0].shape[1]), np.float32)
    for own, vectors in zip(parts, outputs, strict=True):
        found[own] = vectors
    return found


def torch_embedding(argument: tuple[str, int]) -> dict[str, Callable[[], Any]]:
    """All texts a call, by sentence-transformers."""
    import torch
    from sentence_transformers import SentenceTransformer

    folder, count = argument
    given = texts(count)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})

    def embed() -> np.ndarray:
        return model.encode(given, batch_size=32, normalize_embeddings=True, show_progress_bar=False)

    return {"embedding": embed}


def onnx_embedding(argument: tuple[str, int]) -> dict[str, Callable[[], Any]]:
    """All texts a call, by ONNX Runtime."""
    import onnxruntime
    import torch
    from transformers import BertModel

    folder, count = argument
    path = pathlib.Path(tempfile.mkdtemp()) / "model.onnx"
    model = BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self, own: Any):
            super().__init__()
            self.own = own

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.own(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

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
        parts, batches = _batches(folder, count)
        outputs = []
        for batch in batches:
            (states,) = session.run(None, {name: batch[name] for name in names})
            real = batch["attention_mask"][..., None]
            vectors = (states * real).sum(1) / real.sum(1)
            outputs.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
        return _vectors(parts, outputs)

    return {"embedding": embed}


def main() -> None:
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
    found: dict[str, Any] = {"processor": processor()}
    counts = {"pretraining": ROWS, "finetuning": ROWS * len(TEXT_LENGTHS), "embedding": arguments.texts}
    for job, count in counts.items():
        for side, own in report[job].items():
            if side == "results":
                continue
            rate = count / own["seconds"]
            found[f"{job}_{side}"] = rate
            print(f"{job:<12} {side:<6} {rate:9.1f} examples/s, peak {own['peak'] / 2**30:.2f} GiB")
        found[f"{job}_ratio"] = found[f"{job}_ours"] / found[f"{job}_torch"]
        print(f"{job:<12} ratio to torch {found[f'{job}_ratio']:.2f}")
    if arguments.onnx:
        found["embedding_onnx_ratio"] = found["embedding_ours"] / found["embedding_onnx"]
        print(f"embedding    ratio to ONNX Runtime {found['embedding_onnx_ratio']:.2f}")
    vectors = report["embedding"]["results"]
    found["largest_difference"] = float(np.abs(vectors["ours"] - vectors["torch"]).max())
    print(f"largest difference of a vector's number: {found['largest_difference']:.1e}; {found['processor']}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
