"""Processes that train one model together: their start, and what they save.

`launch` starts one process for each device of this machine, or joins those
that a cluster has started, like torchrun and MegEngine's launcher. They find
each other by TF_CONFIG, as TensorFlow's own clusters do, and join before
TensorFlow's first operation. What this module does not do: share a model
between them; that is `fit(sharding=...)`.
"""

import functools
import importlib
import os
import pickle
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any
from typing import Literal

import tensorflow as tf

from kmem.base import checks
from kmem.launching import cluster
from kmem.launching import ranks
from kmem.launching.ranks import RankFailed as RankFailed
from kmem.sharding.agreeing import save_weights as save_weights
from kmem.sharding.checkpoint import load as load
from kmem.sharding.checkpoint import save as save
from kmem.sharding.engine import join_at_first_operation
from kmem.sharding.engine import join_no_more


def launch(
    main: Callable,
    num_processes: int | None = None,
    *,
    restarts: int = 0,
    network: Literal["private", "host"] = "private",
    grace_seconds: float = 5.0,
) -> list:
    """Runs a function in several processes that can train together.

    Each starts as a fresh Python, imports the module of `main` and calls it.
    What it prints is passed on line by line, with `[0] ` before a line of
    rank 0. Call it under `if __name__ == "__main__":`, as everything that
    starts processes. A function of a notebook is copied instead, with what it
    uses of the notebook, which needs the package cloudpickle.

    Where TF_CONFIG names several workers, as Kubernetes' TFJob sets it, or
    in a task of SLURM's `srun`, this process is one of several already: `main`
    is called in it, and the other arguments are left to the cluster.

    Args:
        main: A function of a module, script or notebook, called without
            arguments; `functools.partial` gives it some.
        num_processes: How many, each with a GPU of its own on a machine that
            has some. `None` is one for each GPU.
        restarts: How often to start all of them again after one has failed.
            `main` is to go on from its last checkpoint.
        network: `"private"` is one that only these processes are in, as
            TensorFlow's server listens on every interface and asks nobody for
            a password. There is no internet in it, and setuid programs do not
            work; files keep their owners. Where the kernel does not allow it,
            a warning says so. `"host"` is this machine's network.
        grace_seconds: What the other processes are given to end once one has
            failed, and all of them after Ctrl-C.

    Returns:
        A list of what `main` returned in each rank; on a cluster, of what it
        returned in this one.

    Raises:
        RankFailed: If a process fails. The message names the first that did,
            with its traceback; `exit_code` is what a shell would show.
        ValueError: If an argument is not of this form.
        ImportError: If cloudpickle is missing in a notebook.

    Example:

    <!-- not run: a function of the example itself is in no module -->
    ```python
    import kmem


    def main():
        model = build_and_compile()
        return kmem.wrap(model).fit(x, y, sharding="full").history


    if __name__ == "__main__":
        histories = kmem.distributed.launch(main, num_processes=2)
    ```
    """
    check(restarts, network, grace_seconds)
    if cluster.join(os.environ):
        join_at_first_operation()
        try:
            return [main()]
        finally:
            join_no_more()
    gpus = visible_gpus()
    return ranks.run(
        *(_function_task(main), how_many(num_processes, gpus), gpus),
        *(restarts, network == "private", grace_seconds),
    )


def check(restarts: int, network: str, grace_seconds: float) -> None:
    """Refuses what is not of the form that `launch` takes."""
    is_count = checks.is_integer(restarts) and restarts >= 0
    checks.must_be(is_count, restarts, "restarts", "an integer, 0 or more")
    checks.one_of(network, "network", ("private", "host"))
    is_time = checks.is_real(grace_seconds, 0.0)
    kind = "a number of seconds, 0 or more"
    checks.must_be(is_time, grace_seconds, "grace_seconds", kind)


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that there are for the ranks."""
    named = cluster.visible_gpus(os.environ)
    if named is not None:
        return named
    gpus = tf.config.list_physical_devices("GPU")
    return list(map(str, range(len(gpus))))


def how_many(num_processes: int | None, gpus: list[str]) -> int:
    """The number of processes, each of which has a device."""
    if num_processes is None:
        if not gpus:
            raise ValueError(
                "`num_processes` must be given on a machine without a GPU. "
                "Received: num_processes=None"
            )
        return len(gpus)
    number = checks.positive_int(num_processes, "num_processes")
    if gpus and number > len(gpus):
        raise ValueError(
            f"`num_processes` must be at most {len(gpus)}, the number of "
            "GPUs: each process has one. Set CUDA_VISIBLE_DEVICES to nothing "
            f"to train on the CPU. Received: num_processes={number}"
        )
    return number


def _function_task(main: Callable) -> dict:
    """What `rank.py` needs to call a function in a fresh process."""
    # What `multiprocessing` hands to a process that it spawns.
    preparation = spawn.get_preparation_data("rank")
    # A secret of this process's, which pickles only for its own children.
    del preparation["authkey"]
    pickler: Any = pickle
    content: Any = main
    if not any(name.startswith("init_main") for name in preparation):
        # A notebook: no file to import `main` from. kmem comes first, to join
        # the others before an operation of TensorFlow makes what `main` uses.
        subject = "To launch a function of a notebook"
        checks.require(subject, "notebook", "cloudpickle")
        pickler = importlib.import_module("cloudpickle")
        content = functools.partial(_call, main)
    try:
        function = pickler.dumps(content)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            "`main` must be a function of a module, a script or a notebook, "
            "which a new process can import or copy. "
            f"Received: main={main!r} ({error})"
        ) from error
    return {"function": function, "preparation": preparation}


def _call(main: Callable) -> Any:
    return main()


# Not in processes that this one may start: these are none of the ranks.
if os.environ.pop(cluster.LAUNCHED, None):
    join_at_first_operation()
