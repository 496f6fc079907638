"""Whisper against `transformers` on torch, read and written: states, logits, transcripts, and spectrograms."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pretrained.test_image_text import fill, torch_modules
from transformer_jax import pretrained
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.transcripts import Transcriber
from transformer_jax.layers.log_mel import log_mel, mel_filters
from transformer_jax.models.speech.whisper import Whisper, WhisperConfig

TEXTS = ["one two three", "four five six seven", "eight nine zero"]
END, START, EN, DE, TRANSCRIBE, TRANSLATE, NO_TIMESTAMPS = 300, 301, 302, 303, 304, 305, 306
SIZES = dict(
    vocab_size=360, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=36, decoder_ffn_dim=36, num_mel_bins=80,
    max_source_positions=100, max_target_positions=24, decoder_start_token_id=START, eos_token_id=END,
    bos_token_id=END, pad_token_id=END, suppress_tokens=[], begin_suppress_tokens=[],
)  # fmt: skip


def make_folder(folder, *, scale=0.3, suppressed=(), **changes):
    """Save a random Whisper of two seconds with a tokenizer and control tokens, and return it."""
    torch, transformers = torch_modules()
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**(SIZES | changes)))
    fill(model, scale)
    generation = model.generation_config
    generation.lang_to_id = {"<|en|>": EN, "<|de|>": DE}
    generation.task_to_id = {"transcribe": TRANSCRIBE, "translate": TRANSLATE}
    generation.no_timestamps_token_id, generation.is_multilingual = NO_TIMESTAMPS, True
    generation.suppress_tokens, generation.begin_suppress_tokens = [7, 11, START, *suppressed], [20, END]
    generation.max_initial_timestamp_index = 30
    generation.max_length = 24
    model.save_pretrained(folder)
    tokenizer = TextTokenizer.byte_pairs(TEXTS * 3, 300)
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"]
    vocabulary = json.loads(tokenizer.text)
    # In Whisper's vocabulary the control tokens follow all others, and some ids may be unused.
    pieces = [piece for piece in vocabulary["model"]["vocab"] if piece != "<|endoftext|>"]
    pieces += [f"unused{number}" for number in range(END - len(pieces))]
    vocabulary["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
    vocabulary["added_tokens"] = [
        {
            "id": END + number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for number, name in enumerate([*names, "<|notimestamps|>"])
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    settings = {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def waveforms(count=3, seconds=2.0):
    rng = np.random.default_rng(3)
    time = np.arange(int(16_000 * seconds)) / 16_000
    return [
        np.float32(0.3 * np.sin(2 * np.pi * pitch * time**1.2) + 0.05 * rng.normal(size=len(time)))
        for pitch in rng.uniform(100, 900, count)
    ]


def spectrograms():
    return np.asarray(log_mel(jnp.asarray(np.stack(waveforms())), 80))


@pytest.mark.parametrize("bins", [80, 128])
def test_spectrograms_equal_those_of_the_published_feature_extractor(bins):
    _, transformers = torch_modules()
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    np.testing.assert_allclose(mel_filters(bins), extractor.mel_filters, atol=1e-8)
    time = np.arange(480_000) / 16_000
    noise = np.random.default_rng(0).normal(size=480_000)
    recordings = {
        "noise": 0.1 * noise,
        "silence": np.zeros(480_000),
        "chirp": 0.5 * np.sin(2 * np.pi * (100 * time + 120 * time**2)),
        "a second of noise": np.where(time < 1, 0.1 * noise, 0),
    }
    compute = jax.jit(log_mel, static_argnums=1)
    for name, recording in recordings.items():
        recording = recording.astype(np.float32)
        expected = extractor._np_extract_fbank_features(recording[None], "cpu")[0].T
        actual = compute(jnp.asarray(recording[None]), bins)[0]
        np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"num_mel_bins": 128, "decoder_layers": 1, "d_model": 32}])
def test_states_and_logits_in_both_directions(changes, tmp_path):
    torch, transformers = torch_modules()
    reference = make_folder(tmp_path / "theirs", **changes)
    model, processor = pretrained.load(tmp_path / "theirs")
    pretrained.save(tmp_path / "ours", model, processor)
    written = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    rng = np.random.default_rng(0)
    mel = rng.normal(size=(2, 200, model.config.mel_bins)).astype(np.float32)
    tokens = rng.integers(0, 360, (2, 13))
    states = model.encode(jnp.asarray(mel))
    logits = model(jnp.asarray(mel), jnp.asarray(tokens))
    for other in (reference, written):
        with torch.no_grad():
            output = other(
                input_features=torch.tensor(mel.transpose(0, 2, 1)), decoder_input_ids=torch.tensor(tokens)
            )
        np.testing.assert_allclose(states, output.encoder_last_hidden_state.numpy(), atol=1e-4)
        np.testing.assert_allclose(logits, output.logits.numpy(), atol=1e-4)
    assert sum(p.numel() for p in reference.parameters()) == model.parameter_count
    _, again = pretrained.load(tmp_path / "ours")
    assert again.settings == processor.settings


@pytest.mark.long
@pytest.mark.parametrize("timestamps", [False, True], ids=["text", "timestamps"])
@pytest.mark.parametrize("beams", [1, 4])
def test_transcripts_equal_those_of_transformers(timestamps, beams, tmp_path):
    torch, _ = torch_modules()
    # A random model would write timestamps in a text without them, and `transformers` would read on from there.
    times = () if timestamps else range(NO_TIMESTAMPS, 360)
    reference = make_folder(tmp_path, scale=0.5, suppressed=times)
    model, processor = pretrained.load(tmp_path)
    features = torch.tensor(spectrograms().transpose(0, 2, 1))
    lengths = set()
    for language in ("de",):
        with torch.no_grad():
            expected = reference.generate(
                features, language=language, task="translate", return_timestamps=timestamps, num_beams=beams,
                length_penalty=0.0, do_sample=False, max_new_tokens=21 if timestamps else 20,
            )  # fmt: skip
        transcriber = Transcriber(
            model, processor, beam_size=beams, task="translate", timestamps=timestamps, language=language
        )
        tokens = transcriber.tokens(waveforms(), language=language)
        for ids, row in zip(tokens, expected.tolist(), strict=True):
            prompt = 3 if timestamps else 4
            row = row[prompt:] if row[0] == START else row
            row = row[: row.index(END)] if END in row else row
            assert ids == row
            lengths.add(len(ids))
    assert max(lengths) > 3


def test_parameter_counts_of_published_sizes():
    from flax import nnx

    counts = {  # as `transformers` counts them
        "tiny": 37_760_640, "base": 72_593_920, "small": 241_734_912, "medium": 763_857_920,
        "large": 1_543_304_960, "large-v3": 1_543_490_560, "large-v3-turbo": 808_878_080,
    }  # fmt: skip
    for name, count in counts.items():
        config = WhisperConfig.preset(name)
        model = jax.eval_shape(lambda config=config: Whisper(config, rngs=nnx.Rngs(0)))
        assert model.parameter_count == count, name
