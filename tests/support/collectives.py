"""Runs every collective: what each of several processes runs in a test."""

import tensorflow as tf

from kmem.sharding.engine import engine

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")

# No multiple of what is sent at a time.
LARGE = 2**20 + 3


def main():
    group = engine()
    results = {"rank": group.rank, "size": group.size}
    for dtype in DTYPES:
        own = tf.cast(tf.range(3) + group.rank * 10, dtype)
        rows = tf.cast(
            tf.reshape(tf.range(group.size * 2), [group.size, 2]), dtype
        )

        def collectives(own=own, rows=rows, dtype=dtype):
            return [
                group.gather(own, "gather"),
                group.reduce_scatter(rows, "scatter"),
                group.all_reduce(own, "reduce"),
                group.all_reduce(own, "reduce", "Max"),
            ]

        for mode in (collectives, tf.function(collectives)):
            found = [tf.cast(t, tf.float64).numpy().tolist() for t in mode()]
            results.setdefault(dtype, []).append(found)
    large = tf.range(LARGE) % 7 + 10 * group.rank
    rows = tf.cast([large + rank for rank in range(group.size)], "float32")
    results["large"] = [
        scatter(rows, "large").numpy()
        for scatter in (group.reduce_scatter, tf.function(group.reduce_scatter))
    ]
    for dtype in ("float32", "bfloat16", "bool", "uint32", "int8"):
        sent = group.broadcast(tf.cast([1, group.rank], dtype), "state")
        results[f"broadcast {dtype}"] = tf.cast(sent, tf.int32).numpy().tolist()
    group.all_reduce(tf.zeros([1]), "end")
    return results
