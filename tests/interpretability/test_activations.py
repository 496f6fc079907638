"""Named values returned and replaced, for every model of the zoo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_long
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
    # Zeros at the beginning hide what a head does.
    return jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape), model)


def inputs(models):
    rng = np.random.default_rng(3)
    source, target = (jnp.asarray(rng.integers(4, V, (B, n))) for n in (S, T))
    return (source, target) if models is TRANSLATORS else (target,)


@pytest.mark.long
@pytest.mark.parametrize(("name", "models"), MODELS)
def test_every_model_tells_its_values_and_the_same_output(name, models):
    model, given = make(name, models), inputs(models)
    output, seen = activations(model, *given)
    np.testing.assert_allclose(output, model(*given), atol=1e-5)
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
        assert list(seen)[-1] == "decoder/residual", "in the order of their computation"
    if name in ("bahdanau", "hard_attention"):
        assert seen["decoder/cross_attention/weights"].shape == (T, B, 1, S)
    if name in ("lstm", "gru"):
        assert seen["decoder/states"].shape[-2:] == (T, model.config.hidden)


@pytest.mark.parametrize("name", others_long(["transformer", "luong", "bahdanau", "gpt"], "transformer"))
def test_weights_are_those_that_the_model_returns(name):
    models = TRANSLATORS if name in TRANSLATORS else DECODERS
    model, given = make(name, models), inputs(models)
    _, weights = model(*given, return_weights=True)  # (B, L, H, T, S)
    kind = "self" if models is DECODERS else "cross"
    _, seen = activations(model, *given, only=f"decoder/{kind}_attention/weights")
    (found,) = seen.values()
    if name in ("luong", "bahdanau"):  # time in front, one query at a time
        found = found[:, :, 0].swapaxes(0, 1)[None, :, None]
    np.testing.assert_allclose(found.swapaxes(0, 1), weights, atol=1e-6)


@pytest.mark.parametrize("implementation", ["plain", "chunked", "fused"])
def test_weights_and_heads_equal_the_oracle_whatever_the_form(implementation):
    """From each layer's input and its parameters, in NumPy; chunked and fused models are looked at exactly."""
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
    assert model.blocks.attention.implementation == implementation, "the model itself is as it was"


def test_names_cost_nothing(monkeypatch):
    """The program of a model with names is the one of a model without."""

    def program():
        model = make("transformer", TRANSLATORS)
        return jax.jit(lambda model, *given: model(*given)).lower(model, *inputs(TRANSLATORS)).as_text()

    with_names = program()
    for module in ("attention.plain", "attention.multi_head", "blocks", "stack"):
        monkeypatch.setattr(f"transformer_jax.layers.{module}.named", lambda x, name: x)
    assert program() == with_names


@pytest.mark.long
@pytest.mark.parametrize(
    "compute", [ComputeOptions(unroll=1), ComputeOptions(unroll=2), ComputeOptions(remat="blocks")]
)
def test_loops_and_rematerialisation_are_looked_into(compute):
    given = inputs(TRANSLATORS)
    _, expected = activations(make("transformer", TRANSLATORS), *given)
    _, found = activations(make("transformer", TRANSLATORS, compute), *given)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("name", "models"), MODELS)
def test_values_replaced_by_themselves_change_nothing(name, models):
    model, given = make(name, models), inputs(models)
    same = replaced(model, {"*": lambda value, layer: value})
    np.testing.assert_allclose(same(*given), model(*given), atol=1e-5)


def test_an_ablated_head_is_one_whose_output_matrix_is_zero():
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)
    without = replaced(model, {"decoder/self_attention/heads": ablate_head(1, 2)})
    expected = jax.tree.map(jnp.copy, model)
    kernel = expected.blocks.attention.output.kernel
    kernel[...] = kernel[...].at[1, 2].set(0.0)
    np.testing.assert_allclose(without(tokens), expected(tokens), atol=1e-5)
    assert np.abs(np.asarray(without(tokens) - model(tokens))).max() > 1e-4
    # The rest follows from the new value, and is seen.
    _, seen = activations(without, tokens)
    assert not np.asarray(seen["decoder/self_attention/heads"])[1, :, :, 2].any()


def test_a_patched_stream_gives_the_other_texts_logits():
    model = make("llama", DECODERS)
    (tokens,) = inputs(DECODERS)
    other = tokens[::-1]
    _, seen = activations(model, other, only="decoder/residual")
    last = model.config.layers - 1
    where = [0, 3]
    patched = replaced(model, {"decoder/residual": patch(last, seen["decoder/residual"], positions=where)})
    found, expected = patched(tokens), np.array(model(tokens))
    expected[:, where] = np.asarray(model(other))[:, where]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_gradients_and_compilation_go_through():
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


def test_functions_of_models_and_values_in_a_row():
    """A decoder's step runs its blocks one by one: the same name again and again."""
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)

    def first_step(model, tokens):
        return model.step_function()(model.start(B, max_length=T), tokens)[0].logits

    logits, seen = activations(first_step, model, tokens)
    np.testing.assert_allclose(logits, model(tokens), atol=1e-5)
    assert seen["decoder/residual"].shape == (model.config.layers, B, T, model.config.width)
    numbers = []
    look = {"decoder/residual": lambda value, layer: (numbers.append(layer), value)[1]}
    replaced(first_step, look)(model, tokens)
    assert numbers == list(range(model.config.layers))
    # Compiled on its own, each call goes on counting.
    block = jax.jit(lambda x: named_points.named(jnp.sin(x), "wave"))
    numbers.clear()
    replaced(lambda x: block(block(x)), {"wave": lambda value, n: (numbers.append(n), value)[1]})(1.0)
    assert numbers == [0, 1]


def test_a_name_with_two_shapes_hinders_only_who_wants_it():
    """Decoding has them: a prompt, then a token."""
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)

    def two(model, tokens):
        return model(tokens), model(tokens[:, :3])

    with pytest.raises(ValueError, match="no value is named 'encoder"):
        activations(two, model, tokens, only="encoder/*")
    (long, short) = replaced(two, {"*/heads": ablate_head(0, 1)})(model, tokens)
    assert long.shape[1] == T
    assert short.shape[1] == 3
    with pytest.raises(
        ValueError, match=r"decoder/embedding is named 2 times, with shapes \(2, 5, 128\), \(2, 3"
    ):
        activations(two, model, tokens, only="decoder/embedding")


def test_models_are_found_wherever_they_are_given():
    chunked = make("gpt", DECODERS, ComputeOptions(attention="chunked"))
    (tokens,) = inputs(DECODERS)
    for function, given, options in (
        (lambda x, model: model(x), (tokens,), {"model": chunked}),
        (lambda x, models: models["it"](x), (tokens, {"it": chunked}), {}),
        (chunked.__call__, (tokens,), {}),
        (jax.tree_util.Partial(lambda model, x: model(x), chunked), (tokens,), {}),
    ):
        output, seen = activations(function, *given, only="*/weights", **options)
        assert seen["decoder/self_attention/weights"].shape[-1] == T
        np.testing.assert_allclose(output, chunked(tokens), atol=1e-5)


def test_who_wants_no_weights_does_not_pay_for_them():
    """A long text's stream from chunked attention: nothing of T x T entries."""
    model = make("gpt", DECODERS, ComputeOptions(attention="chunked"), max_length=4_096)
    tokens = jax.ShapeDtypeStruct((1, 4_096), jnp.int32)

    def needed(only):
        program = jax.jit(lambda x: activations(model, x, only=only)[1]).lower(tokens).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert needed("decoder/residual") < needed("*/weights") / 4


def test_gradients_of_rematerialised_models_keep_the_replacement():
    (tokens,) = inputs(DECODERS)

    def gradient(model, tokens):
        return jax.grad(lambda model: jax.nn.logsumexp(model(tokens), axis=-1).mean())(model)

    found = [
        replaced(gradient, {"decoder/self_attention/heads": ablate_head(1, 2)})(
            make("gpt", DECODERS, ComputeOptions(remat=remat)), tokens
        )
        for remat in ("none", "blocks")
    ]
    for plain, again in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(again, plain, atol=1e-6)
    assert not np.asarray(found[1].blocks.attention.output.kernel[...])[1, 2].any()


def test_what_is_not_there_is_not_silently_left_alone():
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


def test_errors_name_what_there_is():
    model = make("gpt", DECODERS)
    (tokens,) = inputs(DECODERS)
    with pytest.raises(ValueError, match=r"no value is named 'encoder/\*'; there are decoder/embedding, "):
        activations(model, tokens, only="encoder/*")
    with pytest.raises(ValueError, match="no value is named 'heads'"):
        replaced(model, {"heads": ablate_head(0, 0)})(tokens)
    with pytest.raises(ValueError, match=r"decoder/residual has shape \(2, 5, 128\), and .* \(5, 128\)"):
        replaced(model, {"decoder/residual": lambda value, layer: value[0]})(tokens)
    with pytest.raises(ValueError, match="there are none"):
        activations(jnp.sin, 1.0)


def test_points_have_names_of_their_own():
    values = [
        v for k, v in vars(named_points).items() if k.isupper() and not k.startswith("_") and isinstance(v, str)
    ]
    assert len(values) == len(set(values))
