"""A budget is the size of a pool in which the steps run, holes and all."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("native_library")

# One process trains with all options, as a pool lasts until its end.
TRAIN = """
    import json

    import kmem
    if {pool}:
        kmem.memory.limit({pool}, device="CPU", pool=True)
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(0)
    stack = [keras.Input((32, 32, 1))]
    for _ in range(4):
        stack += [layers.Conv2D(16, 3, padding="same")]
        stack += [layers.Activation("gelu")]
    stack += [layers.GlobalAveragePooling2D(), layers.Dense(4)]
    model = kmem.wrap(keras.Sequential(stack))
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.variables]
    slots = [variable.numpy() for variable in model.optimizer.variables]
    x = np.random.default_rng(0).normal(size=(32, 32, 32, 1))
    y = np.zeros((32, 4))

    class Peak(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            kmem.memory.reset_peak("CPU")

        def on_epoch_end(self, epoch, logs=None):
            pool = kmem.memory.pool("CPU")
            self.bytes = pool.peak_chunks if pool else kmem.memory.peak("CPU")

    def trained(**options):
        for variable, value in zip(model.variables, before):
            variable.assign(value)
        for variable, value in zip(model.optimizer.variables, slots):
            variable.assign(value)
        peak = Peak()
        history = model.fit(
            x, y, epochs=3, verbose=0, callbacks=[peak], **options
        )
        return [loss.hex() for loss in history.history["loss"]], peak.bytes

    found = {{}}
    for name, value in {options}.items():
        found[name] = trained(**({{name: value}} if value else {{}}))
    if {pool}:
        from holes import step

        from kmem.budget import dry_run
        from kmem.sharding.engine import Engine

        plan = kmem.plan(model, (x.astype("float32"), y), {pool})
        print(plan.predicted_peak_bytes)
        held = kmem.memory.pool("CPU").chunks
        need = dry_run.measured(step, Engine()).peak_bytes
        print(need - held)
    print(json.dumps(found))
"""


def test_every_option_runs_in_a_pool_of_its_budget(python):
    status, output, errors = python.run(
        TRAIN.format(pool=0, options={"plain": None, "microbatches": 4})
    )
    assert status == 0, errors[-2000:]
    plain = json.loads(output)
    budget = int(0.7 * plain["plain"][1])
    options = dict.fromkeys(("remat", "memory_budget", "dtr"), budget)
    status, output, errors = python.run(
        TRAIN.format(pool=budget, options=options | {"microbatches": 4})
    )
    assert status == 0, errors[-2000:]
    predicted, need, found = map(json.loads, output.splitlines())
    for name, (losses, peak) in found.items():
        expected = plain.get(name, plain["plain"])[0]
        if name == "memory_budget":
            # It chooses micro-batches, whose sums end in other bits.
            losses, expected = (
                [float.fromhex(loss) for loss in each]
                for each in (losses, expected)
            )
            np.testing.assert_allclose(losses, expected, rtol=1e-6)
        else:
            assert losses == expected, name
        assert peak <= budget, name
    assert abs(found["remat"][1] - predicted) <= 0.03 * predicted
    # What a pool loses nothing to.
    assert found["microbatches"][1] <= 1.03 * plain["microbatches"][1]
    # Four blocks and a larger one, though two of them are free by then.
    megabyte = 1_000_000
    assert 11.9 * megabyte < need < 12.3 * megabyte
