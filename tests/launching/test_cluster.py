"""What the environment says of a cluster."""

import json

import pytest

from kmem.launching import cluster

TWO_WORKERS = cluster.tf_config(["a:1", "b:1"], 1)


def slurm(rank, node, local, nodes, tasks_per_node, num_tasks, **more):
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **more,
    }


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": cluster.tf_config(["localhost:1"], 0)},
        # A batch script, or a shell: no task of `srun`.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        slurm(0, 0, 0, "a", "1", 1),
    ],
)
def test_a_process_alone_is_in_no_cluster(environment):
    before = dict(environment)
    assert not cluster.join(environment)
    assert environment == before


def test_tf_config_is_taken_as_it_is():
    environment = {"TF_CONFIG": TWO_WORKERS}
    assert cluster.join(environment)
    assert environment == {"TF_CONFIG": TWO_WORKERS}


def test_a_chief_is_a_worker():
    config = json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1"]}})
    assert cluster.join({"TF_CONFIG": config})


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        "null",
        "3",
        '{"cluster": 3}',
        '{"cluster": {"worker": "a:1"}}',
        '{"cluster": {"worker": [1, 2]}}',
    ],
)
def test_a_wrong_tf_config_is_refused(config):
    with pytest.raises(ValueError, match="TF_CONFIG must be a JSON object"):
        cluster.join({"TF_CONFIG": config})


def test_tasks_of_slurm_have_one_list_of_addresses():
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    found = []
    for rank, (node, local) in enumerate(places):
        environment = slurm(rank, node, local, "n[09-10],big", "2(x2),1", 5)
        assert cluster.join(environment)
        config = json.loads(environment["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": rank}
        found.append(config["cluster"]["worker"])
    assert found == [found[0]] * 5
    hosts, ports = zip(*(x.split(":") for x in found[0]), strict=True)
    assert hosts == ("n09", "n09", "n10", "n10", "big")
    assert len(set(found[0])) == 5
    assert all(1024 < int(port) < 32768 for port in ports)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("one", ["one"]),
        ("a,b-1", ["a", "b-1"]),
        ("a[08-10,12],b", ["a08", "a09", "a10", "a12", "b"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_lists_of_hosts_are_expanded(text, hosts):
    count = len(hosts)
    environment = slurm(0, 0, 0, text, f"2(x{count})", 2 * count)

    assert cluster.join(environment)

    workers = json.loads(environment["TF_CONFIG"])["cluster"]["worker"]
    assert [each.rsplit(":", 1)[0] for each in workers[::2]] == hosts


def test_tasks_that_are_not_in_blocks_are_refused():
    with pytest.raises(ValueError, match="--distribution=block"):
        cluster.join(slurm(1, 1, 0, "n[1-2]", "2(x2)", 4))


@pytest.mark.parametrize("task", [None, [], {"type": "ps", "index": 0}])
@pytest.mark.parametrize("index", [2, -1, None, "first"])
def test_a_task_must_be_one_of_the_cluster(task, index):
    if isinstance(task, dict) and index is not None:
        task = {"type": "worker", "index": index}
    config = json.loads(TWO_WORKERS) | {"task": task}
    with pytest.raises(ValueError, match="which of them this process is"):
        cluster.Cluster(json.dumps(config)).rank  # noqa: B018


def test_a_chief_is_the_first():
    jobs = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    task = {"type": "worker", "index": "1"}
    config = json.dumps({"cluster": jobs, "task": task})
    assert cluster.Cluster(config).rank == 2


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("SLURM_PROCID", "9", "one of the step's 2 tasks. .*SLURM_PROCID=9"),
        ("SLURM_PROCID", "-1", "must be a number. Received: SLURM_PROCID=-1"),
        ("SLURM_LOCALID", "x", "must be a number. Received: SLURM_LOCALID=x"),
        ("SLURM_STEP_NUM_TASKS", "", "SLURM_STEP_NUM_TASKS must be a number"),
    ],
)
def test_a_wrong_variable_of_slurm_is_named(name, value, message):
    environment = slurm(0, 0, 0, "a", "2", 2) | {name: value}
    with pytest.raises(ValueError, match=message):
        cluster.join(environment)


def test_a_variable_of_slurm_that_is_missing_is_named():
    environment = slurm(0, 0, 0, "a", "2", 2)
    del environment["SLURM_LOCALID"]
    with pytest.raises(ValueError, match="SLURM_LOCALID must be set"):
        cluster.join(environment)


@pytest.mark.parametrize(
    "gpus, seen",
    [("0,1", "1"), ("4,5,6", "5"), ("7", "7"), ("NoDevFiles", "NoDevFiles")],
)
def test_tasks_that_see_the_gpus_of_their_node_take_one_each(gpus, seen):
    environment = slurm(1, 0, 1, "a", "2", 2, CUDA_VISIBLE_DEVICES=gpus)
    assert cluster.join(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    "value, gpus",
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("1,0", ["1", "0"]),
        ("GPU-ab,MIG-cd", ["GPU-ab", "MIG-cd"]),
        ("0,-1,2", ["0"]),
    ],
)
def test_gpus_are_named_as_cuda_reads_them(value, gpus):
    assert cluster.visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == gpus
    assert cluster.visible_gpus({}) is None
