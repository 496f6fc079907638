"""Fine-tuning on torch and on JAX: without dropout the trained models are equal."""

import numpy as np
import pytest

from tests.cases import others_soak
from tests.runs import train
from transformer_jax import load, pretrained, tasks
from transformer_jax.tasks.encoders.trained import predicted

WORDS = {"no": ["bad", "awful", "poor"], "yes": ["good", "great", "fine"]}
TEXTS = [(f"{word} film {n}", label) for n in range(6) for label in WORDS for word in WORDS[label]]
FILES = {
    "sequence_classification": (("sentence", "label"), TEXTS),
    "token_classification": (
        ("tokens", "tags"),
        [(text, " ".join([label, "x", "x"])) for text, label in TEXTS],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", others_soak(FILES, "sequence_classification"))
def test_trained_models_are_equal_without_dropout(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from experiments.benchmarks.torch_fine_tuning import TorchFineTuning

    header, rows = FILES[name]
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join("\t".join(row) for row in [header, *rows]) + "\n")
    common_values = dict(train=(str(path),), test=(str(path),), batch_size=4, max_length=16)
    start = tasks.configure(
        name, "fine_tune", model="bert", steps=1, width=16, layers=2, heads=2, feed_forward=24, vocab_size=160,
        dropout=0.0, attention_dropout=0.0, **common_values,
    )  # fmt: skip
    train(start, tmp_path / "start")
    run = load(tmp_path / "start")
    pretrained.save(tmp_path / "published", run.model, run.processor)

    config = tasks.configure(
        name, "fine_tune", start=(str(tmp_path / "published"),), steps=120, evaluate_every=120,
        learning_rate=1e-2, weight_decay=0.1, **common_values,
    )  # fmt: skip
    train(config, tmp_path / "ours")
    torch_run = TorchFineTuning(config)
    examples = torch_run.task.examples("test")
    before = torch_run.outputs("test")
    torch_run.train()
    after = torch_run.outputs("test")
    padded = load(tmp_path / "ours").run("logits", predicted, examples)
    ours = [x[: len(e.tokens)] if x.ndim > 1 else x for x, e in zip(padded, examples, strict=True)]
    assert max(np.abs(x - y).max() for x, y in zip(before, after, strict=True)) > 0.5, "it learned"
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(after), atol=1e-3)
