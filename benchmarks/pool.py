"""What a pool with holes costs: its size over the bytes that are live in it.

    python benchmarks/pool.py --output benchmarks/pool.md

The first table: three steps of each kind are recorded, from the start of the
program, every block of 1 kB or more that is asked for and given back. They are
replayed in pools of kmem's own and of TensorFlow's `GPUBFCAllocator`, and the
smallest of each kind in which every block finds a place is found by halving.

With `--traces`, recorded steps are simulated under DTR, with and without a
pool of the size of the threshold.

Then DTR trains in a pool of the size of its threshold, in a process of its
own, and the losses are those of plain eager steps. Last, with `--budgets`,
`remat` and `memory_budget` train in a pool of the size of their budget.
"""

import argparse
import json
import pathlib
import tempfile
import time

import table

NUM_STEPS = 3
MODELS = ("ResNet50", "transformer")
MODES = ("graph", "eager", "remat", "dtr")
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
# Of the peak: what `remat` and `dtr` are given in the first table.
BUDGET = 0.7


def train(name, mode, threshold=None):
    """Trains; returns the losses, the seconds of each step and statistics."""
    import dtr_models
    import keras

    import kmem

    keras.utils.set_random_seed(0)
    model, batches = dtr_models.MODELS[name]()
    model = kmem.wrap(model)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=mode == "eager",
        jit_compile=False,
    )
    x, y = batches[0]
    options = {
        "remat": {"remat": threshold or BUDGET},
        "dtr": {"dtr": threshold},
        "memory_budget": {"memory_budget": threshold},
    }
    seconds = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.perf_counter() - self.start)

    history = model.fit(
        x,
        y,
        batch_size=len(x),
        epochs=NUM_STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[Clock()],
        **options.get(mode, {}),
    ).history
    found = {"losses": history["loss"], "seconds": min(seconds)}
    if mode == "dtr":
        statistics = kmem.dtr.statistics()
        found["evictions"] = statistics.num_evictions
        found["recomputations"] = statistics.num_recomputations
        found["heuristic"] = statistics.heuristic
    return found


def replayed(name, mode, threshold):
    """Live peak, and the least pools, of a program that is recorded."""
    import numpy as np

    from kmem.base import bindings
    from kmem.base import native

    library = native.allocator()
    with tempfile.NamedTemporaryFile() as file:
        library.kmem_begin_recording(0)
        train(name, mode, threshold)
        if not library.kmem_end_recording(0, file.name.encode()):
            raise OSError(file.name)
        events = np.fromfile(file.name, "int64").reshape(-1, 2)
    given = events.ctypes.data, len(events)
    return {
        "blocks": int((events[:, 1] > 0).sum()),
        "live": library.kmem_live_peak(*given),
        "own": library.kmem_least_pool(bindings.OWN_POOL, *given),
        "bfc": library.kmem_least_pool(bindings.BFC_POOL, *given),
    }


def in_pool(name, threshold, pool, mode="dtr"):
    """DTR at a threshold; in a pool of that size unless `pool` is False.

    Or `remat` or `memory_budget` with a budget.
    """
    import tensorflow as tf

    import kmem

    if pool:
        kmem.memory.limit(threshold, device="CPU", pool=pool)
    try:
        found = train(name, mode, threshold)
    except (tf.errors.ResourceExhaustedError, ValueError) as error:
        return {"error": str(error)[:300]}
    usage = kmem.memory.pool("CPU")
    return {
        **found,
        "peak": kmem.memory.peak("CPU"),
        "peak_chunks": usage.peak_chunks if usage else 0,
    }


def child(name, what, argument):
    threshold = int(argument)
    mode, _, kind = what.rpartition(":")
    if what in MODES:
        found = replayed(name, what, threshold)
    else:
        kind = {"none": False, "own": True, "bfc": "bfc"}[kind]
        found = in_pool(name, threshold, kind, mode or "dtr")
    print("RESULT", json.dumps(found))


def result_of(name, what, argument=0):
    for line in table.lines_of(__file__, "--child", name, what, argument):
        if line.startswith("RESULT"):
            return json.loads(line.removeprefix("RESULT"))
    raise RuntimeError(f"{name} {what} has no result")


def in_mb(num_bytes):
    return f"{num_bytes / 1e6:.1f}"


def write_replays(write, names):
    """Returns the live peak of each model in each mode."""
    write(
        "\n## Pool needed / live peak, replayed\n\n"
        f"`remat` and `dtr` are given {BUDGET} of the peak (of `dtr`: the "
        "eager one).\n\n"
        "| model | mode | blocks | live peak, MB | kmem's pool, MB | / live "
        "| BFC, MB | / live |\n|---|---|---|---|---|---|---|---|\n"
    )
    peaks = {}
    for name in names:
        for mode in MODES:
            threshold = int(BUDGET * peaks.get((name, "eager"), 0))
            found = result_of(name, mode, threshold)
            live = found["live"]
            peaks[name, mode] = live
            write(
                f"| {name} | {mode} | {found['blocks']} | {in_mb(live)} "
                f"| {in_mb(found['own'])} | {found['own'] / live:.3f} "
                f"| {in_mb(found['bfc'])} | {found['bfc'] / live:.3f} |\n"
            )
    return peaks


def write_simulated(write, paths):
    from kmem.dtr.simulator import BudgetFailed
    from kmem.dtr.simulator import simulate
    from kmem.dtr.trace import read_program

    write(
        "\n## DTR, simulated\n\n"
        "The time of a step over that without a threshold, and how many "
        "operators ran again. The threshold is a share of the step's peak, "
        "and the size of the pool.\n\n"
        "| step | threshold | dtr_eq, no pool | in the pool "
        "| auto, no pool | in the pool |\n|---|---|---|---|---|---|\n"
    )
    for path in paths:
        program = read_program(path)
        peak = simulate(program).peak_bytes
        for share in (0.9, 0.7, 0.5, 0.4, 0.3):
            row = []
            for heuristic in ("dtr_eq", "auto"):
                for in_pool in (False, True):
                    try:
                        found = simulate(
                            program,
                            int(share * peak),
                            heuristic,
                            slowdown_limit=7,
                            in_pool=in_pool,
                        )
                    except BudgetFailed:
                        row.append("fails")
                        continue
                    row.append(
                        f"{found.slowdown:.3f} ({found.num_recomputations})"
                    )
            name = path.name.split(".")[0]
            write(f"| {name} | {share} | {' | '.join(row)} |\n")


def write_dtr(write, name, peak, shares):
    plain = result_of(name, "none", 4 * peak)["losses"]
    for share in shares:
        for kind in ("none", "own", "bfc"):
            found = result_of(name, kind, int(share * peak))
            row = f"| {name} | {in_mb(share * peak)} ({share}) | {kind} "
            if "error" in found:
                write(f"{row}| does not train | | | | | |\n")
                continue
            same = "yes" if found["losses"] == plain else "NO"
            write(
                f"{row}| {found['seconds']:.2f} | {found['heuristic']} "
                f"| {found['evictions']} "
                f"| {found['recomputations']} "
                f"| {in_mb(found['peak_chunks'])} | {same} |\n"
            )


def write_budgets(write, peaks, names, shares):
    write(
        "\n## Plans in a pool of the size of their budget\n\n"
        "The budget, also as a share of the live peak of graph steps. Beside "
        "it the same budget without a pool. `ends`: whether all steps ran in "
        "a pool of exactly the budget, with which losses.\n\n"
        "| model | option | budget, MB | ends | peak in the pool, MB "
        "| s a step | live peak without, MB | s a step |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for name in names:
        for option in ("remat", "memory_budget"):
            for share in shares:
                budget = int(share * peaks[name, "graph"])
                row = f"| {name} | {option} | {in_mb(budget)} ({share}) "
                without, within = (
                    result_of(name, f"{option}:{kind}", budget)
                    for kind in ("none", "own")
                )
                if "error" in within or "error" in without:
                    both = [each.get("error", "") for each in (within, without)]
                    write(f"{row}| NO: {both} | | | | |\n")
                    continue
                same = within["losses"] == without["losses"]
                write(
                    f"{row}| {'same losses' if same else 'other losses'} "
                    f"| {in_mb(within['peak_chunks'])} "
                    f"| {within['seconds']:.2f} | {in_mb(without['peak'])} "
                    f"| {without['seconds']:.2f} |\n"
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--budgets", nargs="*", type=float, default=[])
    parser.add_argument("--traces", nargs="*", type=pathlib.Path, default=[])
    table.add_output(parser)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    header = f"# Pools with holes\n\n{table.made_by(__file__)}\n"
    write = table.writer(args.output, header)
    peaks = write_replays(write, args.models)
    if args.traces:
        write_simulated(write, args.traces)
    write(
        "\n## DTR in a pool of the size of its threshold\n\n"
        "The threshold, also as a share of the live peak of eager steps. "
        "`none`: no pool, memory has no holes. Seconds are those of the "
        "fastest of three steps; evictions and operators that ran again are "
        "those of all three.\n\n"
        "| model | threshold, MB | pool | s a step | heuristic | evictions "
        "| ran again | peak in the pool, MB | plain losses |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    for name in args.models:
        write_dtr(write, name, peaks[name, "eager"], args.shares)
    if args.budgets:
        write_budgets(write, peaks, args.models, args.budgets)


if __name__ == "__main__":
    main()
