"""KerasHub's GPT-2 without logits and without scores of attention."""

import keras
import numpy as np
import pytest

import kmem
from kmem.attention import blocks

keras_hub = pytest.importorskip("keras_hub")

WORDS, LENGTH = 4000, 128


def gpt2():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        *(WORDS, 1, 4, 16, 32),
        dropout=0.0,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[
            keras_hub.metrics.Perplexity(from_logits=True),
            "accuracy",
        ],
    )
    return kmem.wrap(model)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gpt2_trains_with_the_numbers_of_keras_in_less_memory():
    ids = np.random.default_rng(0).integers(0, WORDS, (4, LENGTH))
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    weights = np.random.default_rng(1).random((4, LENGTH))
    results, peaks = [], []
    for options in ({}, {"chunked_loss": True, "chunked_attention": True}):
        model = gpt2()
        arguments = dict(y=ids, sample_weight=weights, verbose=0)
        logs = model.fit(x, **arguments, **options).history
        with kmem.memory.track("CPU") as usage:
            model.fit(x, **arguments, **options)
        results.append((logs, model.get_weights()))
        peaks.append(usage.peak_bytes - usage.start_bytes)

    (want, plain), (got, chunked) = results
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, 1e-5, err_msg=name)
    for some, others in zip(chunked, plain, strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-4, atol=1e-6)
    logits = 4 * 4 * LENGTH * WORDS
    assert peaks[0] > logits
    assert peaks[1] < logits / 2


def rotary(kind):
    """Models whose attention is a layer of KerasHub's own."""
    keras.utils.set_random_seed(0)
    sizes = dict(vocabulary_size=20, num_layers=1, hidden_dim=16)
    sizes |= dict(intermediate_dim=32, num_query_heads=4)
    if kind == "Gemma":
        sizes |= dict(num_key_value_heads=1, head_dim=4)
    else:
        sizes |= dict(num_key_value_heads=2)
    backbone = getattr(keras_hub.models, f"{kind}Backbone")(**sizes)
    model = getattr(keras_hub.models, f"{kind}CausalLM")(
        backbone, preprocessor=None
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return kmem.wrap(model)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["Llama", "Gemma", "Mistral"])
def test_attention_that_keras_hub_computes_itself_is_reached(kind, monkeypatch):
    ids = np.random.default_rng(0).integers(1, 20, (4, 12))
    mask = np.arange(12)[None] < [[5], [8], [12], [12]]
    x = {"token_ids": ids, "padding_mask": mask}
    attention, lengths, weights = blocks.attention, [], []

    def counted(query, *arguments, **others):
        lengths.append(query.shape[2])
        return attention(query, *arguments, **others)

    monkeypatch.setattr(blocks, "attention", counted)
    for chunked in (None, True):
        model = rotary(kind)
        model.fit(x, ids, epochs=2, verbose=0, chunked_attention=chunked)
        weights.append(model.get_weights())

    assert lengths == [4]
    for got, want in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
