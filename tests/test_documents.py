"""Every snippet of the README and the guides runs unchanged on small files with the names that it uses."""

import gzip
import importlib
import json
import pathlib
import re
import shlex
import shutil
import textwrap

import numpy as np
import pytest
from flax import nnx
from PIL import Image

import transformer_jax
from tests.cases import others_soak
from tests.commands.in_process import call
from tests.conftest import ROOT
from tests.runs import write_pairs
from tests.tasks.encoders import test_encoder_tasks
from transformer_jax import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    Whisper,
    WhisperConfig,
    pretrained,
    tasks,
)
from transformer_jax.commands import console
from transformer_jax.data.corpora.synthetic_speech import spoken_digits
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.data.tokenizers.speech_processor import SpeechProcessor, SpeechSettings
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.tasks.speech import data as speech_data
from transformer_jax.tasks.translators import translation

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
# Pages with snippets that are quick enough to run without `--long`.
COMMON = ("docs/build_your_own.md",)
# Pages whose snippets run with `--long`; those of the other pages run with `--soak`.
LONG = ("README.md",)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# Lines of a snippet that are skipped, because test_package.py tests the installation.
INSTALLATION = ("python3 -m venv", "source ", "pip install")
# Flags added to those of the page. Later flags win, so every run trains a small model for a few steps.
STEPS = ["--steps", "2", "--save-every", "1", "--evaluate-every", "2"]
PHRASES = [*STEPS, "--phrases", "1300", "--vocab-size", "300", "--batch-tokens", "256", "--warmup", "1"]
TABLE = [*STEPS, "--warmup", "1", "--examples", "40"]
IMAGES = [*STEPS, "--warmup", "1", "--batch-size", "8"]
TINY = {
    "translate": PHRASES,
    "hard_attention": PHRASES,
    "nadaraya_watson": ["--steps", "2"],
    "induction_heads": ["--steps", "2"],
    "lm": [*STEPS, "--warmup", "1", "--sample-tokens", "4"],
    "pretrain": [*STEPS, "--warmup", "1"],
    "answer": [*STEPS, "--warmup", "1", "--examples", "20", "--batch-size", "4"],
    "classify": TABLE,
    "tag": TABLE,
    "embed": TABLE,
    "classify-images": IMAGES,
    "self-distill": IMAGES,
    "contrast": IMAGES,
    "caption": IMAGES,
    "graphs": [*STEPS, "--warmup", "1", "--graphs", "40", "--batch-size", "4"],
    "decide": [*STEPS, "--warmup", "1", "--score-episodes", "2", "--batch-size", "4"],
    "transcribe": [*STEPS, "--warmup", "1", "--batch-size", "4"],
}
# Flags of a command that uses a trained model or plans a run.
USES = {
    "--stdin",
    "--fill",
    "--images",
    "--audio",
    "--play",
    "--predict",
    "--help",
    "--dry-run",
    "--weights",
    "knn",
}


def blocks(page, *languages):
    """Return (language, code) of the page's fenced blocks, in order, optionally only of some languages."""
    fenced = BLOCK.findall((ROOT / page).read_text())
    return [(language, code) for _, language, code in fenced if not languages or language in languages]


def test_every_block_names_its_language():
    for page in PAGES:
        languages = {language for language, _ in blocks(page)}
        assert languages <= {"python", "bash", "text"}, page


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a small file of each name that a snippet reads."""
    folder = tmp_path_factory.mktemp("files")
    write_pairs(folder, train=60, valid=8, test=8)
    sentences = [f"The {noun} sees A {second} ." for noun in ("cat", "dog", "man") for second in ("sun", "sea")]
    (folder / "book.txt").write_text("\n".join(sentences * 60) + "\n")
    (folder / "more_texts").mkdir()
    shutil.copy(folder / "book.txt", folder / "more_texts" / "second.txt")
    (folder / "notes.txt").write_text("how to undo a change\na dog runs\nthe price of tea\n")
    (folder / "document.txt").write_text(" ".join(sentences[:4]) + "\n")
    test_encoder_tasks.write_data(folder)
    for name, file in (("text.txt", "corpus.txt"), ("label.tsv", "reviews.tsv"), ("vectors.tsv", "pairs.tsv")):
        (folder / name).rename(folder / file)
    with gzip.open(folder / "questions.json.gz") as questions:
        (folder / "questions.json").write_bytes(questions.read())
    rng = np.random.default_rng(0)
    for name in [*(f"photos/{c}/{n}.png" for c in ("cat", "dog") for n in range(30)), "a.jpg", "b.png"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    rows = [f"{c}/{n}.png\ta photo of a {c} with {n} spots" for c in ("cat", "dog") for n in range(30)]
    (folder / "captions.tsv").write_text("\n".join(["image\tcaption", *rows]) + "\n")
    save_published(folder)
    write_recordings(folder)
    write_episodes(folder)
    write_graphs(folder)
    return folder


def write_graphs(folder):
    """Write molecules with numbers and with labels, and graphs as lists of edges."""
    chains = [f"{'C' * n}{end}" for n in range(1, 8) for end in ("O", "N", "c1ccccc1", "C1CCCC1")]
    for name, target, value in (("molecules", "score", len), ("more_molecules", "label", lambda s: len(s) % 2)):
        rows = [f"{smiles}\t{value(smiles)}" for smiles in chains]
        (folder / f"{name}.tsv").write_text(f"smiles\t{target}\n" + "\n".join(rows) + "\n")
    lines = [{"nodes": n, "edges": [[0, k] for k in range(1, n)], "score": n} for n in range(2, 22)]
    (folder / "graphs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def write_episodes(folder):
    """Write episodes of four values and two actions in both forms."""
    rng = np.random.default_rng(0)
    states, actions, rewards = rng.normal(size=(60, 4)), rng.integers(0, 2, 60), np.ones(60)
    terminals = np.arange(60) % 10 == 9
    np.savez(
        folder / "episodes.npz", observations=states, actions=actions, rewards=rewards, terminals=terminals
    )
    parts = {"observations": states[:10], "actions": actions[:10], "rewards": rewards[:10]}
    line = json.dumps({name: values.tolist() for name, values in parts.items()})
    (folder / "more_episodes.jsonl").write_text(f"{line}\n{line}\n")


def write_recordings(folder):
    """Write recordings with their table, and a tiny Whisper of two languages."""
    soundfile = pytest.importorskip("soundfile", reason="sound needs the extra speech")
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(8_000) / 16_000)
    (folder / "sounds").mkdir()
    for path in (*(folder / "sounds" / f"{n}.wav" for n in range(12)), folder / "a.wav", folder / "b.flac"):
        soundfile.write(path, tone, 16_000)
    rows = ["file\ttranscript", *(f"{n}.wav\ta tone of {n} beats" for n in range(12))]
    (folder / "recordings.tsv").write_text("\n".join(rows) + "\n")
    tokenizer = TextTokenizer.byte_pairs(rows * 3, 280)
    end, size = tokenizer.ends[0], tokenizer.vocab_size
    model = WhisperConfig(
        vocab_size=size + 40, width=16, encoder_layers=1, decoder_layers=1, heads=2, feed_forward=16,
        max_frames=200, max_length=16,
    )  # fmt: skip
    settings = SpeechSettings(
        mel_bins=80, max_frames=200, max_length=16, start=size, end=end, pad=end,
        languages={"en": size + 1, "de": size + 2}, tasks={"transcribe": size + 3, "translate": size + 4},
        no_timestamps=size + 5,
    )  # fmt: skip
    processor = SpeechProcessor(tokenizer, settings)
    pretrained.save(folder / "whisper-tiny", Whisper(model, rngs=nnx.Rngs(0)), processor)


def save_published(folder):
    """Save a tiny encoder and a tiny decoder under the names of the published ones in the guides."""
    texts = (folder / "corpus.txt").read_text().split("\n")
    tokenizer = EncoderTokenizer.wordpiece(texts, 140)
    sizes = dict(width=16, layers=2, heads=2, feed_forward=32, max_length=512)
    encoder = Bert(BertConfig(vocab_size=tokenizer.vocab_size, **sizes), rngs=nnx.Rngs(0))
    pretrained.save(folder / "all-MiniLM-L6-v2", encoder, tokenizer)
    tokenizer = TextTokenizer.byte_pairs(texts, 300)
    sizes = dict(width=24, layers=3, heads=6, kv_heads=6, feed_forward=32, max_length=128)
    decoder = Llama(LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes), rngs=nnx.Rngs(0))
    pretrained.save(folder / "stories260K", decoder, tokenizer)
    config = GPTConfig.preset("micro", tokenizer.vocab_size, max_length=64)
    pretrained.save(folder / "gpt2", GPT(config, rngs=nnx.Rngs(0)), tokenizer)


def run_command_line(line):
    """Run a line of a shell block in this process."""
    line = line.replace("--preset 124M", "--preset micro").replace("1024", "64").replace("2048", "64")
    words = shlex.split(line, comments=True)
    stdin = ""
    if "<" in words:
        stdin = pathlib.Path(words[words.index("<") + 1]).read_text()
        words = words[: words.index("<")]
    if words[0] == "transformer-jax":
        name, main, arguments = words[1], console.main, words[1:]
    else:
        assert words[:2] == ["python", "-m"], line
        name, arguments = words[2].rpartition(".")[2], words[3:]
        main = importlib.import_module(words[2]).main
    trains = not USES & set(words) and ("--text" not in words or name in ("lm", "pretrain"))
    completed = call(main, *arguments, *(TINY.get(name, []) if trains else []), stdin=stdin)
    assert completed.returncode == 0, f"{line}\n{completed.stderr}"
    assert "error:" not in completed.stderr, f"{line}\n{completed.stderr}"


def marked_pages():
    """Return the pages with the marks of the suites in which their snippets run."""
    soak = others_soak(PAGES, *COMMON, *LONG)
    return [pytest.param(page, marks=pytest.mark.long) if page in LONG else page for page in soak]


@pytest.mark.parametrize("page", marked_pages())
def test_snippets_run_unchanged(page, files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # An untrained translator decodes every sentence to its maximum length.
    monkeypatch.setattr(translation, "_VALIDATION_PHRASES", 10)
    monkeypatch.setattr(translation, "_TEST_PHRASES", 40)
    monkeypatch.setattr(speech_data, "spoken_digits", lambda: spoken_digits(speakers=2))
    train = tasks.train

    def train_a_few_steps(config, run_dir, **options):
        changes = dict(steps=2, save_every=1, evaluate_every=2, warmup=1)
        return train(config.with_values(**changes), run_dir, **options)

    monkeypatch.setattr(transformer_jax, "train", train_a_few_steps, raising=False)
    names = {"nnx": nnx}
    for language, code in blocks(page, "python", "bash"):
        code = textwrap.dedent(code)
        if language == "python":
            exec(compile(code, page, "exec"), names)
            continue
        for line in code.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith(INSTALLATION):
                run_command_line(line)
    if page == "README.md":
        assert names["logits"].shape == (1, 2, 1500)
        assert type(names["gradients"]) is names["Transformer"]
    if page == "docs/build_your_own.md":
        assert names["losses"][-1] < 0.3 < 3 < names["losses"][0]
    if page == "docs/encoders.md":
        assert (names["states"].shape, names["pooled"].shape) == ((2, 4, 256), (2, 256))
