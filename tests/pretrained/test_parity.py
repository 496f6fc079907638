"""Published decoders against `transformers` on PyTorch, read and written, and a real trained model."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from transformer_jax import pretrained
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.generation import Generator, Sampling
from transformer_jax.decoding.text_generation import TextGenerator

V, B, T = 97, 3, 29


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.characters([[chr(65 + n) for n in range(V)]])


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    return pytest.importorskip("transformers", reason="parity needs transformers")


def tiny_gpt2(transformers, **changes):
    sizes = dict(vocab_size=V, n_positions=64, n_embd=48, n_layer=3, n_head=6, bos_token_id=0, eos_token_id=96)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | changes)))


LLAMA_SIZES = dict(
    vocab_size=V, hidden_size=48, intermediate_size=67, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=64, eos_token_id=96,
)  # fmt: skip


def tiny_llama(transformers, **changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA_SIZES | changes)))


def tiny_mistral(transformers, **changes):
    """The prompts are shorter and the texts longer than the window."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(LLAMA_SIZES | changes)))


LLAMA3 = dict(rope_type="llama3", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=16,
              low_freq_factor=1.0, high_freq_factor=4.0)  # fmt: skip
CASES = {
    "gpt2": (tiny_gpt2, {}),
    "gpt2-untied": (tiny_gpt2, dict(tie_word_embeddings=False, n_inner=53, activation_function="gelu")),
    "gpt2-relu": (tiny_gpt2, dict(activation_function="relu", layer_norm_epsilon=1e-3)),
    "llama-grouped": (tiny_llama, {}),
    "llama-tied": (tiny_llama, dict(tie_word_embeddings=True, num_key_value_heads=6, rms_norm_eps=1e-4)),
    "llama-one-group": (tiny_llama, dict(num_key_value_heads=1, head_dim=10)),
    "llama-biases": (tiny_llama, dict(attention_bias=True, mlp_bias=True)),
    "llama-theta": (tiny_llama, dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))),
    "llama-linear": (
        tiny_llama, dict(rope_parameters=dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)),
    ),
    "llama-llama3": (tiny_llama, dict(rope_parameters=LLAMA3)),
    "mistral": (tiny_mistral, dict(sliding_window=5)),
    "mistral-wide": (tiny_mistral, dict(sliding_window=128)),
    "llama-yarn": (
        tiny_llama,
        dict(rope_parameters=dict(
            rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=16,
        )),
    ),
}  # fmt: skip


def noisy(model):
    """Add noise to all parameters, because initial values of 0 and 1 would hide errors."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def their_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def their_greedy(model, prompt, count):
    import torch

    tokens = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        max_new_tokens=count, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_both_ways(transformers, tokenizer, tmp_path, rng, case):
    make, changes = CASES[case]
    model = noisy(make(transformers, **changes))
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs" / "tokenizer.json")
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    expected = their_logits(model, tokens)
    ours, _ = pretrained.load(tmp_path / "theirs")
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(ours, tokens), expected, atol=1e-4)
    prompts = [tokens[0, :7].tolist(), tokens[1, :3].tolist()]
    generator = Generator(ours, sampling=Sampling(temperature=0))
    greedy = generator(prompts, 30, [jax.random.key(0)] * 2)
    assert greedy == [their_greedy(model, prompt, 30) for prompt in prompts]
    # Written by us, to one file and to several.
    for name, size in (("single", 5_000_000_000), ("sharded", 50_000)):
        pretrained.save(tmp_path / name, ours, tokenizer, largest_file=size)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="float32").eval()
        assert type(reloaded) is type(model)
        np.testing.assert_allclose(their_logits(reloaded, tokens), expected, atol=1e-4)
        reread, _ = pretrained.load(tmp_path / name)
        assert reread.config == ours.config
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(reread), jax.tree.leaves(ours))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2


def test_transformers_reads_our_tokenizer(transformers, tmp_path, shared):
    model, tokenizer = pretrained.load(shared / "weights/stories260K")
    pretrained.save(tmp_path / "out", model, tokenizer)
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert reloaded("Once upon a time")["input_ids"] == tokenizer.encode_prompts(["Once upon a time"])[0]


def test_rotary_scaling_in_the_format_of_version_4(transformers, tokenizer, tmp_path, rng):
    """Version 4 has `rope_theta` and `rope_scaling` at the top level, and "type" instead of "rope_type"."""
    model = noisy(tiny_llama(transformers, rope_parameters=LLAMA3))
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    expected, _ = pretrained.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    for key in ("rope_type", "type"):
        scaling = {key: "llama3"} | {k: v for k, v in rope.items() if k != "rope_type"}
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
        ours, _ = pretrained.load(tmp_path)
        assert ours.config == expected.config
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": None, "rope_theta": 5e5}))
    plain, _ = pretrained.load(tmp_path)
    assert plain.config == dataclasses.replace(expected.config, rotary_scaling=None, rotary_theta=5e5)


def test_older_gpt2_files_with_a_mask_and_without_prefix(transformers, tokenizer, tmp_path):
    from safetensors.numpy import load_file, save_file

    model = noisy(tiny_gpt2(transformers))
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    expected, _ = pretrained.load(tmp_path)
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    ours, _ = pretrained.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(expected))


def test_stories260k_continues_a_prompt_exactly(shared):
    folder = shared / "weights/stories260K"
    expected = json.loads((folder / "expected_greedy.json").read_text())
    model, tokenizer = pretrained.load(folder)
    assert model.parameter_count == 260_032
    generate = TextGenerator(model, tokenizer, sampling=Sampling(temperature=0))
    ((output,),) = generate([expected["prompt"]], max_new_tokens=expected["new_tokens"])
    assert output.token_ids == expected["token_ids"]
    assert output.text == expected["text"]


def test_stories260k_from_other_prompts(transformers, shared):
    folder = shared / "weights/stories260K"
    model, tokenizer = pretrained.load(folder)
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    prompts = ["The dog", "Lily and Tom went to the", '"No!" said the', "One day, a big bear", "é"]
    generate = TextGenerator(model, tokenizer, sampling=Sampling(temperature=0), ends=())
    outputs = generate(prompts, max_new_tokens=60)
    for prompt, (output,) in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode_prompts([prompt])[0]
        assert output.token_ids == ids + their_greedy(torch_model, ids, 60)


def test_bfloat16_and_a_mesh(shared):
    folder = shared / "weights/stories260K"
    model, _ = pretrained.load(folder)
    tokens = np.arange(16, dtype=np.int32)[None]
    expected = jax.jit(lambda m, x: m(x))(model, tokens)
    low_precision, _ = pretrained.load(folder, dtype="bfloat16")
    assert (
        low_precision.blocks.attention.query.kernel[...].dtype
        == low_precision.embedding.table.embedding[...].dtype
        == "bfloat16"
    )
    assert low_precision.norm.scale[...].dtype == "float32"
    logits = jax.jit(lambda m, x: m(x))(low_precision, tokens)
    assert logits.dtype == "float32"
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded, _ = pretrained.load(folder, mesh=mesh)
    kernel = sharded.blocks.attention.query.kernel[...]  # (layers, width, heads, head width)
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)
    assert kernel.addressable_shards[0].data.shape == (5, 32, 2, 8)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(sharded), jax.tree.leaves(model))
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(sharded, tokens), expected, atol=1e-4)
