"""Pretraining and fine-tuning of tiny encoders: trained, resumed, on eight devices, planned, used."""

import gzip
import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.runs import train
from transformer_jax import tasks
from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.tables import Question
from transformer_jax.data.corpora.targets import positive_label
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.evaluation import encoder_batches
from transformer_jax.interpretability.sentence import attention_of_encoder
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.encoders.bert import BertConfig, BertMaskedLM
from transformer_jax.models.encoders.electra import ElectraConfig, ElectraPretraining
from transformer_jax.parameter_names import named_leaves
from transformer_jax.pretrained import load as load_folder
from transformer_jax.pretrained import save as save_folder
from transformer_jax.tasks.encoders.fine_tuning import FineTuned
from transformer_jax.tasks.encoders.masked_language_modeling import MaskedWords
from transformer_jax.tasks.encoders.pretraining import Pretraining
from transformer_jax.tasks.encoders.question_answering import span_in, split_questions
from transformer_jax.tasks.encoders.replaced_token_detection import ReplacedTokens
from transformer_jax.tasks.encoders.trained import TruncationWarning
from transformer_jax.training import plan
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.task import entry_of
from transformer_jax.training.trained_model import make_model, module_of

STEPS = 20
SIZES = dict(width=16, layers=2, heads=2, feed_forward=32, vocab_size=140, batch_size=8)
GOOD, BAD = ["good", "great", "fine"], ["bad", "awful", "poor"]
NOUNS, VERBS = ["film", "dog", "tree", "book", "house"], ["is", "was", "seems"]
CASES = {
    "bert": ("masked_language_modeling", dict(model="bert")),
    "roberta": ("masked_language_modeling", dict(model="roberta", tokenizer="bpe", vocab_size=270)),
    "distilbert": ("masked_language_modeling", dict(model="distilbert", whole_word_masking=True)),
    "longformer": ("masked_language_modeling", dict(model="longformer", window=8)),
    "electra": ("replaced_token_detection", dict(model="electra", embedding_width=12, generator_size=0.5)),
    "label": ("sequence_classification", dict(model="bert")),
    "pair": ("sequence_classification", dict(model="roberta")),
    "labels": ("sequence_classification", dict(model="distilbert")),
    "score": (
        "sequence_classification",
        dict(model="electra", embedding_width=12, generator_size=0.5, learning_rate=2e-2, steps=60),
    ),
    "tags": ("token_classification", dict(model="bert")),
    "questions": ("question_answering", dict(model="bert", max_length=40, stride=8)),
    "vectors": ("sentence_embedding", dict(model="bert")),
}
PRETRAINING = ("bert", "roberta", "distilbert", "longformer", "electra")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def write_data(folder):
    """Write labeled files in which the labels follow from the words, and return their folder."""
    rng = np.random.default_rng(0)

    def sentence():
        kind = int(rng.integers(2))
        return f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} {rng.choice((BAD, GOOD)[kind])}", kind

    def write(name, header, rows):
        lines = ["\t".join(header), *("\t".join(map(str, row)) for row in rows)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")

    documents = [". ".join(sentence()[0] for _ in range(rng.integers(6, 20))) for _ in range(40)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    made = [sentence() for _ in range(120)]
    write("label", ("sentence", "label"), made)
    pairs = [(*a, *sentence()) for a in made]
    write("pair", ("id", "sentence1", "sentence2", "label"), [(7, a, b, int(x == y)) for a, x, b, y in pairs])
    write(
        "labels",
        ("sentence", "labels"),
        [(t, " ".join(w for w in t.split() if w in (*NOUNS, *VERBS))) for t, _ in made],
    )
    write("score", ("sentence1", "sentence2", "score"), [(a, b, 1.5 * (x + y)) for a, x, b, y in pairs])
    write("tags", ("tokens", "tags"), [(t, "D N V " + "BG"[k]) for t, k in made])
    write("vectors", ("sentence1", "sentence2"), [(t, t.replace("the", "a")) for t, _ in made])
    asked = []
    for number in range(60):
        facts = {noun: rng.choice(GOOD + BAD) for noun in NOUNS}
        context = ". ".join(f"the {noun} is {word}" for noun, word in facts.items())
        noun = str(rng.choice(NOUNS))
        start = context.index(f"{noun} is ") + len(noun) + 4
        answers = [{"text": str(facts[noun]), "answer_start": start}] if number % 6 else []
        asked.append(
            {"context": context, "qas": [{"id": number, "question": f"how is the {noun}?", "answers": answers}]}
        )
    content = json.dumps({"data": [{"paragraphs": asked}]}).encode()
    (folder / "questions.json.gz").write_bytes(gzip.compress(content))
    return folder


def config_of(case, data, **changes):
    task, values = CASES[case]
    if case in PRETRAINING:
        source = dict(text=(str(data / "text.txt"),), context=32)
    else:
        name = "questions.json.gz" if case == "questions" else f"{case}.tsv"
        source = dict(train=(str(data / name),), max_length=24)
    recipe = "text" if case in PRETRAINING else "fine_tune"
    schedule = dict(learning_rate=3e-3, steps=STEPS, evaluate_every=10, save_every=5)
    return tasks.configure(task, recipe, **(SIZES | schedule | source | values | changes))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder and results of a case, trained once."""
    root, done = tmp_path_factory.mktemp("runs"), {}

    def of(case):
        if case not in done:
            done[case] = train(config_of(case, data), root / case)
        return root / case, done[case]

    return of


class Halt(Exception):
    """Ends a run in the middle."""


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize("case", others_soak(CASES, "electra", "vectors"))
def test_it_is_trained(case, trained):
    folder, results = trained(case)
    first, *_, last = losses(folder)
    assert last < first
    expected = {
        **{name: {"validation_loss", "tokens_per_second"} for name in PRETRAINING},
        "electra": {"validation_loss", "discriminator_loss", "tokens_per_second"},
        "label": {"accuracy", "f1", "matthews"},
        "pair": {"accuracy", "f1", "matthews"},
        "labels": {"accuracy", "f1"},
        "score": {"spearman", "pearson"},
        "tags": {"accuracy"},
        "questions": {"exact_match", "token_f1"},
        "vectors": {"accuracy"},
    }[case]
    assert expected <= set(results)
    assert all(np.isfinite(results[name]) for name in expected)
    if case == "tags":  # 108 in 14 batches of 8, of which the last of an epoch is a part of one
        rows = results["examples_per_second"] * results["training_seconds"]
        assert rows == pytest.approx(results["steps"] * 108 / 14, rel=1e-3)
    kept = tasks.load(folder).model
    assert results["parameters"] == kept.parameter_count
    assert len(read_metrics(folder)) >= 4


@pytest.mark.long
@pytest.mark.parametrize("case", others_soak(CASES, "electra", "label"))
def test_it_is_resumed_bit_for_bit(case, data, trained, tmp_path, monkeypatch):
    folder, results = trained(case)

    def halt(*_):
        raise Halt

    with monkeypatch.context() as patched:
        for kind in (Pretraining, FineTuned):
            patched.setattr(kind, "validate", halt)
        with pytest.raises(Halt):
            train(config_of(case, data), tmp_path / "run")
    again = train(config_of(case, data), tmp_path / "run")
    assert losses(tmp_path / "run")[-1] == losses(folder)[-1]
    uninterrupted, resumed = (named_leaves(tasks.load(path).model) for path in (folder, tmp_path / "run"))
    for name, leaf in uninterrupted.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    measured = {name: value for name, value in results.items() if "second" not in name}
    assert measured == {name: again[name] for name in measured}


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "mesh"),
    others_soak(
        [
            *((case, "data=2,fsdp=2,tensor=2") for case in (*PRETRAINING, "label", "tags", "vectors")),
            *((case, "fsdp=2,tensor=2,sequence=2") for case in ("bert", "electra", "tags")),
        ],
        ("electra", "data=2,fsdp=2,tensor=2"),
        ("bert", "fsdp=2,tensor=2,sequence=2"),
    ),
)
def test_eight_devices_learn_the_same(case, mesh, data, trained, tmp_path):
    train(config_of(case, data), tmp_path / "run", mesh=mesh)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(trained(case)[0]), rtol=2e-3)


@pytest.mark.parametrize("case", others_soak(CASES, "bert", "electra", "label", "questions", "vectors"))
def test_it_is_planned(case, data):
    lines = dict(plan.describe(tasks.TASKS[CASES[case][0]], config_of(case, data), "data=2,tensor=2"))
    assert lines["work"].endswith("in total")


@pytest.mark.long
def test_what_the_trained_ones_do(data, trained):
    run = tasks.load(trained("bert")[0])
    (words,) = run.fill("the film [MASK] good.", top=3)
    assert len(words) == 3
    assert words[0].probability >= words[1].probability
    assert words[0].token in words[0].text
    first, second = run.fill("the [MASK] is [MASK].", top=1)
    assert first[0].text.startswith(f"the {first[0].token} is [MASK]")
    assert second[0].text.startswith("the [MASK] is ")
    with pytest.raises(UserError, match=r"no \[MASK\] in the text"):
        run.fill("the film is good.")
    electra = tasks.load(trained("electra")[0])
    assert len(electra.fill("the [MASK] is [MASK].")) == 2
    assert {0 <= p <= 1 for _, p in electra.replaced(["the film is good"])[0]} == {True}

    run = tasks.load(trained("label")[0])
    good, bad = run.classify(["the dog is great", "the dog is awful"])
    assert {*good.probabilities} == {"0", "1"}
    assert good.probabilities["1"] > bad.probabilities["1"]
    assert sum(good.probabilities.values()) == pytest.approx(1)
    with pytest.raises(UserError, match="trained on single texts"):
        run.classify([("a", "b")])
    with pytest.raises(UserError, match="text 2 is empty"):
        run.classify(["a", " "])
    with pytest.raises(UserError, match="a list of texts"):
        run.classify("a")
    for _ in range(2):
        with pytest.warns(
            TruncationWarning, match=r"1 of 2 text\(s\) are longer than 24 tokens and were truncated"
        ):
            run.classify(["the dog", "the dog " * 30])

    run = tasks.load(trained("tags")[0])
    tags = run.tag(["the dog is great", ["a", "unseenlongword"]])
    assert [word for word, _ in tags[0]] == ["the", "dog", "is", "great"]
    assert len(tags[1]) == 2
    # A word without a piece in the vocabulary gets the default tag.
    (odd,) = run.tag([["the", "\u200b", "dog"]])
    assert [word for word, _ in odd] == ["the", "\u200b", "dog"]
    # Each word of a long text has the tag of the window in which it has the most context.
    words = [(*NOUNS, "the", "is")[n % (len(NOUNS) + 2)] for n in range(70)]
    size, step = 22, 16  # words between the special tokens of 24 tokens; windows share 6 tokens
    starts = [*range(0, 70 - size, step), range(0, 70 - size, step)[-1] + step]
    windows = [run.tag([words[start : start + size]])[0] for start in starts]
    expected = []
    for number, word in enumerate(words):
        contexts = [min(number - s, min(s + size, 70) - 1 - number) for s in starts]
        best = int(np.argmax(contexts))
        expected.append((word, windows[best][number - starts[best]][1]))
    assert run.tag([words]) == [expected]
    with pytest.raises(UserError, match="text 2: the text has no tokens"):
        run.tag(["the dog", ["\u200b"]])
    with pytest.raises(UserError, match="give a list of texts, not one text"):
        run.tag("the dog")
    run = tasks.load(trained("questions")[0])
    text = ". ".join(f"the {noun} is good" for noun in NOUNS * 6)
    answer = run.answer("how is the dog?", text)
    assert text[answer.start :].startswith(answer.answer) if answer.answer else answer.start == -1
    run = tasks.load(trained("vectors")[0])
    vectors = run.embed(["the dog is great", "the film"])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert run.embed([]).shape == (0, 16)
    assert run.similarity(["the dog", "the film"]).shape == (2, 2)


@pytest.mark.soak
def test_what_the_other_trained_ones_do(trained):
    assert tasks.load(trained("roberta")[0]).fill("the film<mask> good.")
    with pytest.raises(UserError, match="trained on pairs"):
        tasks.load(trained("pair")[0]).classify(["a"])
    (several,) = tasks.load(trained("labels")[0]).classify(["the dog is great"])
    assert isinstance(several.label, tuple)
    (score,) = tasks.load(trained("score")[0]).classify([("the dog is bad", "the dog is good")])
    assert set(score.probabilities) == {"score"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("built", 9), (4, 4)),
        (("was built ", 5), (3, 4)),
        ((" built in", 8), (4, 5)),
        (("years. ", 18), (6, 6)),
    ],
)
def test_white_space_around_an_answer_is_no_part_of_it(answer, words):
    """Tokens 2 to 6 of "[CLS] What? Rome was built in years. " are the context."""
    ends = np.array([(0, 0), (0, 5), (0, 4), (5, 8), (9, 14), (15, 17), (18, 24)])
    window = EncodedText(np.arange(7), np.arange(7), np.array([-1, 0, 1, 1, 1, 1, 1]), 2, offsets=ends)
    assert span_in(window, [answer]) == words


@pytest.mark.parametrize(
    ("name", "best", "direction"),
    [
        ("label", "valid_accuracy", "max"),
        ("labels", "valid_f1", "max"),
        ("score", "valid_spearman", "max"),
        ("bert", "valid_loss", "min"),
        ("electra", "valid_discriminator_loss", "min"),  # the run keeps the discriminator
    ],
)
def test_which_checkpoint_is_best(data, name, best, direction):
    config = config_of(name, data)
    entry = entry_of(config)
    task = entry.prepare(
        config, entry.objective(config, config.model), mesh=None, stored=None, starts=[], note=print
    )
    assert task.best == (best, direction)


def test_questions_on_one_text_are_held_out_together():
    def asked(*contexts):
        return [Question(str(n), "what?", context, ()) for n, context in enumerate(contexts)]

    kept, left = split_questions(asked(*"aabbbcddd"), 0.5)
    assert len(kept) + len(left) == 9
    kept_texts, left_texts = ({question.context for question in part} for part in (kept, left))
    assert len(kept_texts) == len(left_texts) == 2
    assert not kept_texts & left_texts
    kept, left = split_questions(asked(*"aaaaa"), 0.2)
    assert [len(kept), len(left)] == [4, 1]
    with pytest.raises(UserError, match="one example"):
        split_questions(asked("a"), 0.2)


def test_pairs_are_counted_as_pairs(data):
    config = config_of("vectors", data)
    entry, notes = entry_of(config), []
    task = entry.prepare(
        config, entry.objective(config, config.model), mesh=None, stored=None, starts=[], note=notes.append
    )
    assert notes[-1] == "pairs: 108 for training, 12 for validation"
    assert task.about == f"8 pairs a batch, {STEPS / 13:.1f} epochs"


def test_texts_of_both_columns_are_numbered_together(data, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("sentence1\tsentence2\na film\ta dog\nA dog\tthe film\n")
    files = dict(train=(str(path),), valid=(str(path),), batch_size=2)
    config = config_of("vectors", data).with_values(**files)
    entry = entry_of(config)
    task = entry.prepare(
        config, entry.objective(config, config.model), mesh=None, stored=None, starts=[], note=lambda line: None
    )
    batch = task.batches[0]
    # "A dog" of the second pair is "a dog" of the first to the model.
    numbers = zip(batch["text_id"].tolist(), batch["text_id_2"].tolist(), strict=True)
    assert sorted(numbers) == [(0, 1), (1, 2)]


@pytest.mark.long
def test_no_answer_is_returned_on_demand(trained, monkeypatch):
    """The first token, which means no answer, has the highest logits."""
    run = tasks.load(trained("questions")[0])

    def none(self, name, function, examples):
        return [np.eye(len(example.tokens), 2)[:, :1].repeat(2, axis=1) for example in examples]

    monkeypatch.setattr(type(run), "run", none)
    asked = "how is the dog?", "the dog is good"
    assert run.processor.settings["unanswerable"]
    for unanswerable in (None, True):
        assert run.answer(*asked, unanswerable=unanswerable)[:2] == ("", -1)
    answer = run.answer(*asked, unanswerable=False)
    assert answer.answer
    assert asked[1][answer.start :].startswith(answer.answer)


def test_sentences_are_counted_as_examples(data):
    config, notes = config_of("tags", data), []
    entry = entry_of(config)
    task = entry.prepare(
        config, entry.objective(config, config.model), mesh=None, stored=None, starts=[], note=notes.append
    )
    assert notes[-1] == "examples: 108 for training, 12 for validation"
    assert task.about.startswith("8 examples a batch")


def test_vectors_do_not_depend_on_their_company(trained):
    run = tasks.load(trained("vectors")[0])
    texts = ["the dog", "the film is good " * 4, "a tree", *["the house seems poor"] * 70]
    together = run.embed(texts)
    for number in (0, 1, 2, 40):
        np.testing.assert_allclose(run.embed(texts[number : number + 1])[0], together[number], atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_many_texts_share_rows(trained, pooling, monkeypatch):
    """Each vector equals that of its text in a batch of one; nearly nothing is padding."""
    run, shared = tasks.load(trained("vectors")[0]), []
    plain = encoder_batches._packed_batches
    monkeypatch.setattr(
        encoder_batches, "_packed_batches", lambda *a: shared.extend(batches := list(plain(*a))) or batches
    )
    words, rng = ["the", "dog", "is", "great", "film", "house"], np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 20, 400)]
    vectors = run.embed(texts, pooling=pooling)
    single = np.stack([run.embed([text], pooling=pooling)[0] for text in texts[:40]])
    np.testing.assert_allclose(vectors[:40], single, atol=1e-6)
    numbers = [number for texts_of_batch, _ in shared for number, *_ in texts_of_batch]
    assert len(set(numbers)) == len(numbers) > 300
    filled = np.mean([(batch["segments"] > 0).mean() for _, batch in shared[:-1]])
    assert filled > 0.9
    assert max(batch["segments"].max() for _, batch in shared) > 3


@pytest.mark.parametrize("length", [9, 16, 17, 51, 60, 63, 64])
def test_a_row_has_no_more_texts_than_places(length):
    """Holds also for models whose limit is no multiple of the places."""
    short = Example(np.array([2, 5, 3], np.int32), np.zeros(3, np.int32), {})
    batches = list(encoder_batches._packed_batches([short] * 2_000, length, 0))
    assert sum(len(texts) for texts, _ in batches) > 1_000
    for texts, batch in batches:
        assert max(place for *_, place in texts) + 1 == batch["segments"].max() <= encoder_batches.MAX_PACKED


@pytest.mark.parametrize(
    "case", others_soak(["bert", "electra", "label", "tags", "questions", "vectors"], "label", "vectors")
)
def test_it_is_inspected(case, trained):
    run = tasks.load(trained(case)[0])
    item = ("how is it?", "the dog is good") if case == "questions" else "the dog is good"
    attention = attention_of_encoder(run.model, run.processor, item)
    (layers,) = attention.values()
    assert layers.weights.shape == (2, 2, len(layers.queries), len(layers.keys))
    np.testing.assert_allclose(np.asarray(layers.weights).sum(-1), 1, atol=1e-5)


@pytest.mark.long
def test_an_encoder_is_fine_tuned_with_another_head(data, trained, tmp_path):
    """The pretrained encoder is copied, and the head is new."""
    start = str(trained("bert")[0])
    config = config_of("label", data, start=(start,), model="", learning_rate=0.0, steps=1, average=1)
    # Sizes and vocabulary come from the start.
    config = tasks.configure(
        "sequence_classification", "fine_tune", start=(start,), train=(str(data / "label.tsv"),), steps=1,
        learning_rate=0.0, batch_size=8,
    )  # fmt: skip
    train(config, tmp_path / "run")
    before, tuned = (named_leaves(tasks.load(path).model) for path in (start, tmp_path / "run"))
    shared = [name for name in tuned if name.startswith("encoder/")]
    assert {"encoder/pooler/kernel", "encoder/embeddings/tokens/table/embedding"} <= set(shared)
    for name in shared:
        np.testing.assert_array_equal(before[name], tuned[name], err_msg=name)
    # Sizes and vocabulary come from the start, but no parameter is copied.
    bare = config.with_values(start=(f"{start},leave_out=.*",))
    train(bare, tmp_path / "bare")
    fresh = named_leaves(tasks.load(tmp_path / "bare").model)
    assert {name: leaf.shape for name, leaf in fresh.items()} == {
        name: leaf.shape for name, leaf in tuned.items()
    }
    kernel = "encoder/blocks/self_attention/query/kernel"
    assert (np.asarray(fresh[kernel]) != np.asarray(tuned[kernel])).any()
    # A probe trains only the head.
    probe = config.with_values(trainable="head/.*", learning_rate=1e-2, steps=3)
    train(probe, tmp_path / "probe")
    after = named_leaves(tasks.load(tmp_path / "probe").model)
    moved = {name for name, leaf in after.items() if (np.asarray(leaf) != np.asarray(tuned[name])).any()}
    assert moved
    assert all(name.startswith("head/") for name in moved)


@pytest.mark.long
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    ("case", "head"),
    [
        ("roberta", "label"),
        ("longformer", "questions"),
        *others_soak([("bert", "questions"), ("distilbert", "tags"), ("electra", "questions")]),
    ],
)
def test_every_encoder_starts_from_a_run_and_from_a_folder(case, head, published, data, trained, tmp_path):
    """ELECTRA passes on its discriminator."""
    start, run = trained(case)[0], tasks.load(trained(case)[0])
    if published:
        start = tmp_path / "published"
        save_folder(start, run.model, run.processor)
    task, values = CASES[head]
    name = "questions.json.gz" if head == "questions" else f"{head}.tsv"
    lengths = {n: value for n, value in values.items() if n in ("max_length", "stride")}
    config = tasks.configure(
        task, "fine_tune", start=(str(start),), train=(str(data / name),), steps=1, learning_rate=0.0,
        batch_size=8, **({"max_length": 24} | lengths),
    )  # fmt: skip
    train(config, tmp_path / "run")
    before, tuned = (named_leaves(tasks.load(path).model) for path in (trained(case)[0], tmp_path / "run"))
    shared = [name for name in tuned if name.startswith("encoder/")]
    assert len(shared) > 10
    for name in shared:  # positions are truncated to the length of this task
        np.testing.assert_array_equal(before[name][: len(tuned[name])], tuned[name], err_msg=name)


@pytest.mark.long
def test_a_reader_that_was_a_tagger_has_no_labels(data, trained, tmp_path):
    """`transformers` would otherwise build a reader with one output for each tag."""
    config = tasks.configure(
        "question_answering", "fine_tune", start=(str(trained("tags")[0]),), steps=1, batch_size=8,
        train=(str(data / "questions.json.gz"),), max_length=24, stride=8,
    )  # fmt: skip
    train(config, tmp_path / "run")
    run = tasks.load(tmp_path / "run")
    save_folder(tmp_path / "published", run.model, run.processor)
    assert "id2label" not in json.loads((tmp_path / "published" / "config.json").read_text())
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "published")
    assert theirs.qa_outputs.out_features == 2


@pytest.mark.long
def test_vectors_are_learned_from_an_encoder_with_a_pooler(data, trained, tmp_path):
    """The pooler, which vectors do not need, is not copied."""
    run = tasks.load(trained("label")[0])
    save_folder(tmp_path / "published", run.model.encoder, run.processor)
    config = tasks.configure(
        "sentence_embedding", "fine_tune", start=(str(tmp_path / "published"),), steps=1, batch_size=8,
        train=(str(data / "vectors.tsv"),), learning_rate=0.0,
    )  # fmt: skip
    train(config, tmp_path / "run")
    before, after = (named_leaves(x) for x in (run.model.encoder, tasks.load(tmp_path / "run").model))
    assert before.keys() - after.keys() == {"pooler/kernel", "pooler/bias"}
    for name, leaf in after.items():
        np.testing.assert_array_equal(leaf, before[name], err_msg=name)
    assert config.task.pooling == "mean"

    first = run.processor.with_labels((), pooling="first", normalize=True)
    save_folder(tmp_path / "first", run.model.encoder, first)
    options = dict(train=(str(data / "vectors.tsv"),), batch_size=8)
    for start, pooling in ((tmp_path / "first", "first"), (tmp_path / "run", "mean")):
        config = tasks.configure("sentence_embedding", "fine_tune", start=(str(start),), **options)
        assert config.task.pooling == pooling, "the start's pooling"


def test_masked_words_in_parts_are_the_same(rng):
    """Five places are computed in parts of two, with padding; one row has no masked word."""
    config = BertConfig(vocab_size=53, width=16, layers=1, heads=2, feed_forward=24, max_length=12, dropout=0.0)
    batch = {
        "tokens": rng.integers(5, 53, (3, 12)),
        "segments": np.ones((3, 12), np.int32),
        "positions": rng.integers(0, 12, (3, 5)),
        "labels": rng.integers(5, 53, (3, 5)),
        "weights": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], np.float32),
    }
    outputs = []
    for parts in (1, 2):
        model = BertMaskedLM(config, rngs=nnx.Rngs(0), compute=ComputeOptions(loss_parts=parts))

        def objective(model):
            sums, counts = MaskedWords().loss(model, None, batch, None)
            return sums["loss"], (sums, counts)

        outputs.append(jax.jit(jax.grad(objective, has_aux=True))(model))
    for all_at_once, in_parts in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(all_at_once, in_parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "rate"), [(1024, 0.25), (256, 0.15)])
def test_a_large_electra_predicts_a_quarter_of_the_words(tmp_path, width, rate):
    """Clark et al. 2020, table 6, for a preset and for a published folder as start."""
    sizes = dict(
        model_type="electra", vocab_size=30_522, embedding_size=128, hidden_size=width, num_hidden_layers=12,
        num_attention_heads=width // 64, intermediate_size=4 * width, max_position_embeddings=512,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    configs = (
        tasks.configure("replaced_token_detection", "text", start=(str(tmp_path),)),
        tasks.configure("replaced_token_detection", "text", preset="large" if width == 1024 else "small"),
    )
    assert [config.task.mask_rate for config in configs] == [rate, rate]
    assert [config.model.width for config in configs] == [width, width]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(("1", "2"), "1"), (("1", "0"), "1"), (("yes", "no"), "yes"), (("10", "9"), "10")],
)
def test_f1_is_of_the_same_label_in_any_order(labels, expected):
    assert positive_label(labels) == expected


def test_a_generators_words_in_parts_are_the_same(rng):
    """The drawn words are the same too, because each place has its own key."""
    config = ElectraConfig(
        vocab_size=53, width=16, layers=1, heads=2, feed_forward=24, max_length=12, dropout=0.0,
        attention_dropout=0.0, embedding_width=8, generator_size=0.5,
    )  # fmt: skip
    batch = {
        "tokens": rng.integers(5, 53, (3, 12)),
        "segments": np.ones((3, 12), np.int32),
        "positions": np.stack([rng.permutation(12)[:5] for _ in range(3)]),
        "labels": rng.integers(5, 53, (3, 5), np.int32),
        "weights": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], np.float32),
    }
    batch = jax.tree.map(jax.numpy.asarray, batch)
    outputs = []
    for parts in (1, 2):
        model = ElectraPretraining(config, rngs=nnx.Rngs(0), compute=ComputeOptions(loss_parts=parts))

        def objective(model):
            sums, counts = ReplacedTokens(50.0).loss(model, None, batch, jax.random.key(0))
            return sums["loss"], (sums, counts)

        outputs.append(jax.jit(jax.grad(objective, has_aux=True))(model))
    for all_at_once, in_parts in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(all_at_once, in_parts, rtol=1e-4, atol=1e-5)
    # An untrained generator rarely draws the correct word by chance.
    assert 5 <= outputs[0][1][0]["replaced"] <= 7


def test_the_best_checkpoint_is_kept(data, tmp_path, monkeypatch):
    """The second of four validations is best, and later checkpoints differ from it."""
    seen = []

    def validate(self, model, extra):
        seen.append(jax.tree.map(np.asarray, named_leaves(model)))
        yield "valid_accuracy", [50.0, 90.0, 40.0, 60.0][len(seen) - 1]

    monkeypatch.setattr(FineTuned, "validate", validate)
    config = config_of("label", data, steps=40, evaluate_every=10, save_every=10, learning_rate=1e-2)
    train(config, tmp_path / "run")
    kept = named_leaves(tasks.load(tmp_path / "run").model)
    assert len(seen) == 4
    assert any((seen[3][name] != seen[1][name]).any() for name in kept)
    for name, leaf in kept.items():
        np.testing.assert_array_equal(leaf, seen[1][name], err_msg=name)


@pytest.mark.parametrize("case", others_soak(CASES, "bert", "electra", "label"))
def test_a_batch_of_padding_alone(case, data):
    """Every loss and gradient is a number, and no gradient is more than 0."""
    config = config_of(case, data)
    entry = entry_of(config)
    objective = entry.objective(config, config.model)
    task = entry.prepare(config, objective, mesh=None, stored=None, starts=(), note=lambda line: None)
    batch = jax.tree.map(jax.numpy.zeros_like, dict(next(iter(task.batches.from_step(0)))))
    model = make_model(module_of(entry, task.model_config), task.model_config)

    def loss(model):
        sums, counts = objective.loss(model, None, batch, jax.random.key(0))
        return sums["loss"], (sums, counts)

    gradient, (sums, counts) = jax.jit(jax.grad(loss, has_aux=True))(model)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((sums, counts)))
    assert counts["loss"] == 0
    for name, leaf in named_leaves(gradient).items():
        np.testing.assert_array_equal(leaf, 0, err_msg=name)


@pytest.mark.long
def test_layer_decay_slows_the_lower_layers(data, tmp_path):
    """After one step of Adam every parameter of a layer has moved by about its learning rate."""
    config = config_of(
        "label",
        data,
        steps=1,
        layer_decay=0.5,
        weight_decay=0.0,
        warmup=1,
        learning_rate=1e-3,
        epsilon=1e-12,
        clip=0.0,
    )
    train(config, tmp_path / "run")
    train(config.with_values(learning_rate=0.0), tmp_path / "still")
    after, before = (named_leaves(tasks.load(tmp_path / name).model) for name in ("run", "still"))
    kernel = "encoder/blocks/self_attention/query/kernel"
    moved = np.abs(after[kernel] - before[kernel]).reshape(2, -1).max(axis=1)
    assert moved[0] / moved[1] == pytest.approx(0.5, rel=0.05)


def test_the_settings_of_the_training_are_used(trained):
    """Also by the names of version 0.1, which older run folders contain."""
    run = tasks.load(trained("vectors")[0])
    np.testing.assert_allclose(np.linalg.norm(run.embed(["the dog"]), axis=-1), 1, atol=1e-5)
    files = run.processor.files()
    stored = json.loads(files["processor.json"])
    assert stored["settings"]["normalize"] is True
    stored["settings"] = {"normalise": True, "longest": 7}
    files |= {"processor.json": json.dumps(stored).encode()}
    assert type(run.processor).from_files(files).settings == {"normalize": True, "max_answer_length": 7}


@pytest.mark.long
def test_trained_runs_of_every_head_are_published(trained, tmp_path):
    """A folder in the layout of `transformers` makes the same predictions when it is loaded."""
    for case in ("bert", "roberta", "distilbert", "electra", "label", "pair", "tags", "questions", "vectors"):
        run = tasks.load(trained(case)[0])
        save_folder(tmp_path / case, run.model, run.processor)
        again = tasks.load(tmp_path / case)
        assert type(again) is type(run)
        for name in ("pairs", "stride", "max_answer_length", "unanswerable", "pooling"):
            assert again.processor.settings.get(name) == run.processor.settings.get(name), (case, name)
        leaves = named_leaves(again.model)
        for name, leaf in named_leaves(run.model).items():
            np.testing.assert_array_equal(leaf, leaves[name], err_msg=f"{case}: {name}")
    generator = tasks.load(trained("electra")[0]).generator
    save_folder(tmp_path / "generator", generator, run.processor)
    again, _ = load_folder(tmp_path / "generator")
    for (name, leaf), loaded in zip(named_leaves(generator).items(), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(leaf, loaded, err_msg=name)
    first = tasks.load(trained("label")[0]).classify(["the dog is great"])
    assert tasks.load(tmp_path / "label").classify(["the dog is great"])[0].label == first[0].label
    folders = trained("vectors")[0], tmp_path / "vectors"
    ours, theirs = (tasks.load(folder).embed(["the dog"]) for folder in folders)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
