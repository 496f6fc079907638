"""Named values are returned and replaced, for every translator and decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.oracles.attention import attention as oracle
from transformer_jax.interpretability.ablation import ablate_head, patch
from transformer_jax.interpretability.activations import activations, exact, replaced
from transformer_jax.layers import named_points
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import DECODERS, TRANSLATORS

B, S, T, V = 2, 7, 5, 31
MODELS = [*((name, TRANSLATORS) for name in TRANSLATORS), *((name, DECODERS) for name in DECODERS)]


def make(name, models, compute=ComputeOptions(), **changes):
    entry = models[name]
    model = entry.module(entry.preset("mini", V, **changes), rngs=nnx.Rngs(0), compute=compute)
    # Initial zeros would hide the effect of a head.
    return jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), model)


def inputs(models):
    rng = np.random.default_rng(3)
    source, target = (jnp.asarray(rng.integers(4, V, (B, n))) for n in (S, T))
    return (source, target) if models is TRANSLATORS else (target,)


@pytest.mark.long
@pytest.mark.parametrize(("name", "models"), others_soak(MODELS, MODELS[0], MODELS[-2]))
def test_every_model_returns_its_named_values_and_the_same_output(name, models):
    model, tokens = make(name, models), inputs(models)
    output, seen = activations(model, *tokens)
    np.testing.assert_allclose(output, model(*tokens), atol=1e-5)
    assert not any(np.isnan(np.asarray(x, np.float32)).any() for x in seen.values())
    layers = getattr(model.config, "layers", None)
    if name == "transformer":
        layers = model.config.decoder_layers
    if name in ("transformer", "gpt", "llama", "modern_gpt"):
        width, heads = model.config.width, model.config.heads
        shapes = {
            "decoder/embedding": (B, T, width),
            "decoder/self_attention/weights": (layers, B, heads, T, T),
            "decoder/self_attention/heads": (layers, B, T, heads, width // heads),
            "decoder/self_attention/attention_output": (layers, B, T, width),
            "decoder/feed_forward_output": (layers, B, T, width),
            "decoder/residual": (layers, B, T, width),
        }
        if name == "transformer":
            shapes |= {
                "encoder/residual": (layers, B, S, width),
                "encoder/self_attention/weights": (layers, B, heads, S, S),
                "decoder/cross_attention/weights": (layers, B, heads, T, S),
            }
        assert {key: seen[key].shape for key in shapes} == shapes
        assert list(seen)[-1] == "decoder/residual", "in the order of computation"
    if name in ("bahdanau", "hard_attention"):
        assert seen["decoder/cross_attention/weights"].shape == (T, B, 1, S)
    if name in ("lstm", "gru"):
        assert seen["decoder/states"].shape[-2:] == (T, model.config.hidden)


@pytest.mark.parametrize("name", others_soak(["transformer", "luong", "bahdanau", "gpt"], "transformer"))
def test_weights_equal_those_that_the_model_returns(name):
    models = TRANSLATORS if name in TRANSLATORS else DECODERS
    model, tokens = make(name, models), inputs(models)
    _, weights = model(*tokens, return_weights=True)  # (B, L, H, T, S)
    attention = "self" if models is DECODERS else "cross"
    _, seen = activations(model, *tokens, only=f"decoder/{attention}_attention/weights")
    (seen_weights,) = seen.values()
    if name in ("luong", "bahdanau"):  # these compute one query at a time, and time is the first axis
        seen_weights = seen_weights[:, :, 0].swapaxes(0, 1)[None, :, None]
    np.testing.assert_allclose(seen_weights.swapaxes(0, 1), weights, atol=1e-6)


@pytest.mark.parametrize("implementation", ["plain", "chunked", "fused"])
def test_weights_and_heads_equal_the_oracle_in_every_implementation(implementation):
    """The oracle uses each layer's input and parameters; all models are inspected with plain attention."""
    model = make("gpt", DECODERS, ComputeOptions(attention=implementation))
    (tokens,) = inputs(DECODERS)
    _, seen = activations(model, tokens)
    stream = np.concatenate([seen["decoder/embedding"][None], seen["decoder/residual"][:-1]]).astype(np.float64)
    attention = model.blocks.attention
    for layer in range(model.config.layers):
        x = stream[layer]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + model.config.norm_epsilon)
        norm = model.blocks.attention_norm
        x = x * np.asarray(norm.scale[...][layer]) + np.asarray(norm.bias[...][layer])
        query, key, value = (
            np.einsum("btd,dhk->bthk", x, np.asarray(part.kernel[...][layer]))
            + np.asarray(part.bias[...][layer])
            for part in (attention.query, attention.key, attention.value)
        )
        output, weights = oracle(query, key, value, mask=np.tri(T, dtype=bool))
        np.testing.assert_allclose(seen["decoder/self_attention/weights"][layer], weights, atol=1e-5)
        np.testing.assert_allclose(seen["decoder/self_attention/heads"][layer], output, atol=1e-5)
    np.testing.assert_allclose(exact(model)(tokens), model(tokens), atol=1e-5)
    assert model.blocks.attention.implementation == implementation, "the model itself is unchanged"


def test_names_do_not_change_the_program(monkeypatch):
    """A model compiles to the same program with and without names."""

    def program():
        model = make("transformer", TRANSLATORS)
        return jax.jit(lambda model, *tokens: model(*tokens)).lower(model, *inputs(TRANSLATORS)).as_text()

    with_names = program()
    for module in ("attention.plain", "attention.multi_head", "blocks", "stack"):
        monkeypatch.setattr(f"transformer_jax.layers.{module}.named", lambda x, name: x)
    assert program() == with_names


@pytest.mark.long
@pytest.mark.parametrize(
    "compute", [ComputeOptions(unroll=1), ComputeOptions(unroll=2), ComputeOptions(remat="blocks")]
)
def test_values_inside_loops_and_rematerialisation(compute):
    tokens = inputs(TRANSLATORS)
    _, expected = activations(make("transformer", TRANSLATORS), *tokens)
    _, seen = activations(make("transformer", TRANSLATORS, compute), *tokens)
    assert list(seen) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(seen[name], value, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("name", "models"), others_soak(MODELS, MODELS[0], MODELS[-2]))
def test_values_replaced_by_themselves_change_nothing(name, models):
    model, tokens = make(name, models), inputs(models)
    replacing = replaced(model, {"*": lambda value, layer: value})
    np.testing.assert_allclose(replacing(*tokens), model(*tokens), atol=1e-5)


def test_ablating_a_head_equals_a_zero_output_matrix():
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)
    without = replaced(model, {"decoder/self_attention/heads": ablate_head(1, 2)})
    expected = jax.tree.map(jnp.copy, model)
    kernel = expected.blocks.attention.output.kernel
    kernel[...] = kernel[...].at[1, 2].set(0.0)
    np.testing.assert_allclose(without(tokens), expected(tokens), atol=1e-5)
    assert np.abs(np.asarray(without(tokens) - model(tokens))).max() > 1e-4
    # Returned values include the replacement.
    _, seen = activations(without, tokens)
    assert not np.asarray(seen["decoder/self_attention/heads"])[1, :, :, 2].any()


def test_patching_the_stream_of_another_text_gives_its_logits():
    model = make("llama", DECODERS)
    (tokens,) = inputs(DECODERS)
    other_tokens = tokens[::-1]
    _, seen = activations(model, other_tokens, only="decoder/residual")
    last = model.config.layers - 1
    positions = [0, 3]
    patched = replaced(model, {"decoder/residual": patch(last, seen["decoder/residual"], positions=positions)})
    logits, expected = patched(tokens), np.array(model(tokens))
    expected[:, positions] = np.asarray(model(other_tokens))[:, positions]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_replacement_works_with_jit_grad_and_vmap():
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)

    @jax.jit
    def loss(model, head):
        logits = replaced(model, {"*/heads": ablate_head(0, head)})(tokens)
        return jax.nn.logsumexp(logits, axis=-1).mean()

    gradient = jax.grad(loss)(model, 1)
    kernel = np.asarray(gradient.blocks.attention.output.kernel[...])
    assert not kernel[0, 1].any()
    assert np.abs(kernel[0, 2]).max() > 0
    losses = jax.vmap(loss, in_axes=(None, 0))(model, jnp.arange(4))
    assert len(np.unique(losses)) == 4


def test_a_function_of_a_model_that_uses_a_name_repeatedly():
    """A decoder's step runs its blocks in turn, so that every block uses the same names."""
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)

    def first_step(model, tokens):
        return model.step_function()(model.start(B, max_length=T), tokens)[0].logits

    logits, seen = activations(first_step, model, tokens)
    np.testing.assert_allclose(logits, model(tokens), atol=1e-5)
    assert seen["decoder/residual"].shape == (model.config.layers, B, T, model.config.width)
    call_numbers = []
    record = {"decoder/residual": lambda value, layer: (call_numbers.append(layer), value)[1]}
    replaced(first_step, record)(model, tokens)
    assert call_numbers == list(range(model.config.layers))
    # Calls of a separately compiled function continue the count.
    block = jax.jit(lambda x: named_points.named(jnp.sin(x), "wave"))
    call_numbers.clear()
    replaced(lambda x: block(block(x)), {"wave": lambda value, n: (call_numbers.append(n), value)[1]})(1.0)
    assert call_numbers == [0, 1]


def test_a_name_with_two_shapes_is_an_error_only_if_it_is_returned():
    """Decoding uses a name with two shapes, for the prompt and for each token."""
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)

    def two_lengths(model, tokens):
        return model(tokens), model(tokens[:, :3])

    with pytest.raises(ValueError, match="no value is named 'encoder"):
        activations(two_lengths, model, tokens, only="encoder/*")
    (long, short) = replaced(two_lengths, {"*/heads": ablate_head(0, 1)})(model, tokens)
    assert long.shape[1] == T
    assert short.shape[1] == 3
    with pytest.raises(ValueError, match=r"decoder/embedding names 2 values with shapes \(2, 5, 128\), \(2, 3"):
        activations(two_lengths, model, tokens, only="decoder/embedding")


def test_models_are_found_in_any_argument():
    chunked = make("gpt", DECODERS, ComputeOptions(attention="chunked"))
    (tokens,) = inputs(DECODERS)
    for function, arguments, options in (
        (lambda x, model: model(x), (tokens,), {"model": chunked}),
        (lambda x, models: models["it"](x), (tokens, {"it": chunked}), {}),
        (chunked.__call__, (tokens,), {}),
        (jax.tree_util.Partial(lambda model, x: model(x), chunked), (tokens,), {}),
    ):
        output, seen = activations(function, *arguments, only="*/weights", **options)
        assert seen["decoder/self_attention/weights"].shape[-1] == T
        np.testing.assert_allclose(output, chunked(tokens), atol=1e-5)


def test_returning_no_weights_saves_their_memory():
    """Returning the residual stream of a long text from chunked attention needs no array of (T, T)."""
    model = make("gpt", DECODERS, ComputeOptions(attention="chunked"), max_length=4_096)
    tokens = jax.ShapeDtypeStruct((1, 4_096), jnp.int32)

    def memory(only):
        program = jax.jit(lambda x: activations(model, x, only=only)[1]).lower(tokens).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert memory("decoder/residual") < memory("*/weights") / 4


def test_gradients_of_rematerialised_models_keep_the_replacement():
    (tokens,) = inputs(DECODERS)

    def gradient(model, tokens):
        return jax.grad(lambda model: jax.nn.logsumexp(model(tokens), axis=-1).mean())(model)

    gradients = [
        replaced(gradient, {"decoder/self_attention/heads": ablate_head(1, 2)})(
            make("gpt", DECODERS, ComputeOptions(remat=remat)), tokens
        )
        for remat in ("none", "blocks")
    ]
    for plain, rematerialised in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(rematerialised, plain, atol=1e-6)
    assert not np.asarray(gradients[1].blocks.attention.output.kernel[...])[1, 2].any()


def test_a_missing_layer_or_head_is_an_error():
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)
    heads = "decoder/self_attention/heads"
    for layer, head, message in (
        (-1, 0, "has layers 0 to 3: there is no layer -1"),
        (4, 0, "has layers 0 to 3: there is no layer 4"),
        (0, 4, "has heads 0 to 3: there is no head 4"),
        (0, -1, "has heads 0 to 3: there is no head -1"),
    ):
        with pytest.raises(ValueError, match=f"{heads} {message}"):
            replaced(model, {heads: ablate_head(layer, head)})(tokens)
    with pytest.raises(ValueError, match="the other run has layers 0 to 2: there is no layer 3"):
        patch(3, np.zeros((3, B, T, 128)))


def test_errors_list_the_names():
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)
    with pytest.raises(ValueError, match=r"no value is named 'encoder/\*': choose from decoder/embedding, "):
        activations(model, tokens, only="encoder/*")
    with pytest.raises(ValueError, match="no value is named 'heads'"):
        replaced(model, {"heads": ablate_head(0, 0)})(tokens)
    with pytest.raises(ValueError, match=r"decoder/residual has shape \(5, 128\): return shape \(2, 5, 128\)"):
        replaced(model, {"decoder/residual": lambda value, layer: value[0]})(tokens)
    with pytest.raises(ValueError, match="the function names none"):
        activations(jnp.sin, 1.0)


def test_names_of_points_are_unique():
    values = [
        v for k, v in vars(named_points).items() if k.isupper() and not k.startswith("_") and isinstance(v, str)
    ]
    assert len(values) == len(set(values))
