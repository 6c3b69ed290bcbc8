"""Tells from the environment whether this process is one of many already.

TF_CONFIG, which Kubernetes' TFJob sets, is taken as it is; under SLURM it is
made from what `srun` gives each task. Every task then has the same list of
addresses, so tasks must be distributed over the nodes in blocks, as they are
by default. What this module does not do: reach another host.
"""

import json
import re
from collections.abc import MutableMapping
from typing import Any

# Set in processes that join by themselves: those that `kmem launch` starts.
LAUNCHED = "KMEM_LAUNCHED"

# Below the ports that Linux gives to outgoing connections. Each job of a node
# that several jobs share gets its own range, with room for a node's tasks.
_FIRST_PORT = 12000
_PORTS_OF_JOB = 128
_NUM_RANGES = 150


def join(environment: MutableMapping[str, str]) -> bool:
    """Makes the environment that of one worker of a cluster, if it is one.

    Args:
        environment: Usually `os.environ`. Under SLURM, TF_CONFIG is set in
            it, and CUDA_VISIBLE_DEVICES is narrowed to the task's own GPU.

    Returns:
        Whether a cluster has started this process as one of several.

    Raises:
        ValueError: If what the cluster says cannot be right.
    """
    if environment.get("TF_CONFIG"):
        return Cluster(environment["TF_CONFIG"]).size > 1
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return False
    try:
        if _integer(environment, "SLURM_STEP_NUM_TASKS") < 2:
            return False
        _join_slurm(environment)
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]} must be set in a task of SLURM, as `srun` does. "
            "Received: an environment without it"
        ) from error
    return True


def tf_config(addresses: list[str], index: int) -> str:
    """The TF_CONFIG of one worker."""
    return json.dumps(
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
    )


def visible_gpus(environment: MutableMapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names; `None` if it is not set."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    # CUDA ignores what follows the first name that is no device.
    named = re.match(r"(?!-1|NoDevFiles)[^,]+(,(?!-1)[^,]+)*", value.strip())
    return named[0].split(",") if named else []


class Cluster:
    """What a TF_CONFIG says; `jobs` are the addresses of the tasks of each
    kind. A `ValueError` if it is none."""

    def __init__(self, config: str):
        self._config = config
        try:
            self._content: dict = json.loads(config)
            self.jobs: dict[str, list[str]] = self._content.get("cluster", {})
            is_right = all(
                isinstance(job, list) and all(isinstance(x, str) for x in job)
                for job in self.jobs.values()
            )
        except (AttributeError, ValueError, RecursionError):
            is_right = False
        if not is_right:
            raise self._error()

    @property
    def size(self) -> int:
        """How many processes train together."""
        return sum(len(self.jobs.get(job, ())) for job in ("chief", "worker"))

    @property
    def task(self) -> tuple[str, int]:
        """The kind of this process, and its number among those; a `ValueError`
        if it is none of the cluster's."""
        task: Any = self._content.get("task")
        try:
            kind, index = task["type"], int(task["index"])
            if index in range(len(self.jobs[kind])):
                return kind, index
        except (KeyError, TypeError, ValueError):
            pass
        raise self._error()

    @property
    def rank(self) -> int:
        """This process's number among all."""
        kind, index = self.task
        before = len(self.jobs.get("chief", ())) if kind == "worker" else 0
        return before + index

    def _error(self) -> ValueError:
        return ValueError(
            "TF_CONFIG must be a JSON object with the addresses of all "
            "workers, and which of them this process is, such as "
            '{"cluster": {"worker": ["a:2222", "b:2222"]}, '
            '"task": {"type": "worker", "index": 0}}. '
            f"Received: {self._config}"
        )


def _join_slurm(environment: MutableMapping[str, str]) -> None:
    # Such as "a[08-10,12],b".
    nodes = environment["SLURM_STEP_NODELIST"]
    patterns = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    hosts = [host for each in patterns for host in _expanded(each)]
    # "2(x3),1" is 2, 2, 2 and 1.
    tasks_per_node = environment["SLURM_STEP_TASKS_PER_NODE"]
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    counts = [int(n) for n, times in groups for _ in range(int(times or 1))]
    rank = _integer(environment, "SLURM_PROCID")
    node = _integer(environment, "SLURM_NODEID")
    local = _integer(environment, "SLURM_LOCALID")
    tasks = [
        (index, each)
        for index, count in enumerate(counts)
        for each in range(count)
    ]
    if rank not in range(len(tasks)):
        raise ValueError(
            "SLURM_PROCID must be the number of one of the step's "
            f"{len(tasks)} tasks. Received: SLURM_PROCID={rank}"
        )
    if len(hosts) != len(counts) or tasks[rank] != (node, local):
        raise ValueError(
            "SLURM must distribute the tasks in blocks: "
            "`srun --distribution=block`. Received: task "
            f"{rank} is number {local} on node {node} of {len(hosts)}, with "
            f"{environment['SLURM_STEP_TASKS_PER_NODE']} tasks per node"
        )
    job = _integer(environment, "SLURM_JOB_ID")
    job += _integer(environment, "SLURM_STEP_ID")
    port = _FIRST_PORT + job % _NUM_RANGES * _PORTS_OF_JOB
    addresses = [f"{hosts[index]}:{port + each}" for index, each in tasks]
    environment["TF_CONFIG"] = tf_config(addresses, rank)
    gpus = visible_gpus(environment) or []
    if 1 < counts[node] <= len(gpus):
        environment["CUDA_VISIBLE_DEVICES"] = gpus[local]


def _integer(environment: MutableMapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name} must be a number. Received: {name}={text}")
    return int(text)


def _expanded(pattern: str) -> list[str]:
    """`"a[08-10,12]"` is a08, a09, a10 and a12."""
    match = re.search(r"\[([^\]]*)\]", pattern)
    if match is None:
        return [pattern]
    expanded = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            name = f"{number:0{len(first)}d}"
            rest = _expanded(pattern[match.end() :])
            expanded += [pattern[: match.start()] + name + x for x in rest]
    return expanded
