"""Where there is a GPU, Keras compiles by XLA unless one says otherwise."""

import keras
import numpy as np
import pytest

import kmem

OPTIONS = (
    {"dtr": True},
    {"sharding": "full"},
    {"sharding": "full", "microbatches": 2},
    {"sharding": "optimizer", "gradient_accumulation_steps": 2},
    {"sharding": "full", "remat": "auto"},
)


def trained(jit_compile: bool, **options) -> list[np.ndarray]:
    """Weights after two epochs, and what the model said of XLA at the end."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            *(keras.layers.Dense(64, "tanh") for _ in range(4)),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    assert model.jit_compile is jit_compile
    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    kmem.wrap(model).fit(
        *(x, x[:, :1]), batch_size=8, epochs=2, verbose=0, **options
    )
    assert model.jit_compile is jit_compile
    return model.get_weights()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Keras decides for `jit_compile="auto"` what it does beside a GPU."""
    monkeypatch.setattr(
        keras.Model, "_resolve_auto_jit_compile", lambda model: True
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_default_is_not_taken_for_a_wish(options, request):
    without = trained(False, **options)
    request.getfixturevalue("as_on_a_gpu")

    with pytest.warns(UserWarning, match="without XLA") as told:
        weights = trained(True, **options)

    assert len([w for w in told if "XLA" in str(w.message)]) == 1
    for one, other in zip(without, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_options_are_compiled(as_on_a_gpu, recwarn):
    trained(True, microbatches=2)

    assert not [w for w in recwarn if "XLA" in str(w.message)]
