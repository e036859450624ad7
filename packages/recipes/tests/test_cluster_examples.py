"""The examples for clusters: the SLURM script with stand-ins that write down what they are asked, the RayJob against KubeRay's fields,
the schema of its pods, and Ray's own reader."""

import copy
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from offbeat_recipes.cli._hydra import compose_run

EXAMPLES = Path(__file__).parents[3] / "examples" / "cluster"
WAIT_S = 600.0
KUBERNETES = "1.37"
ASKED = ("task=arithmetic", "engine.num_ranks=2", "name=a run")
# Each writes down its name and words, and does what the real one would as far as the script can see.
STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node%s\\n" 1 2 3; fi',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 10.1.2.3 10.9.9.9",
    "ray": 'case "$1" in start) exec sleep 600 ;; status) [ -e "$0.up" ] || { touch "$0.up"; exit 1; } ;; esac',
    "offbeat-train": 'trap "exit 130" TERM; touch "$0.begun"; if [ "$CODE" != wait ]; then exit "$CODE"; fi; while true; do sleep 0.1; done',
}


class Job:
    """The script on three nodes; `offbeat-train` ends with `code`, or waits for SIGTERM."""

    def __init__(self, folder, code, **changed):
        self.bin, self.log = folder / "bin", folder / "asked"
        self.bin.mkdir()
        for name, body in {**STAND_INS, **changed}.items():
            command = self.bin / name
            command.write_text(
                f'#!/bin/bash\necho "{name}" "${{@@Q}}" >> {shlex.quote(str(self.log))}\n{body}\n'
            )
            command.chmod(0o755)
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "VENV": str(folder), "CODE": code, "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "node[1-3]", "RUN_DIR": str(folder / "a run"),
        }  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", EXAMPLES / "slurm.sh", *ASKED], env=environment, cwd=folder, start_new_session=True
        )

    def wait_for(self, file):
        deadline = time.monotonic() + WAIT_S
        while not (self.bin / file).exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self):
        """Return the exit code and all that was asked, each as its words."""
        try:
            code = self.process.wait(WAIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # as SLURM ends what a job leaves behind
        return code, [shlex.split(line) for line in self.log.read_text().splitlines()]


def test_the_slurm_script_is_one():
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)


@pytest.mark.spawns
def test_a_slurm_job_starts_ray_on_every_node_and_the_run_on_the_first(tmp_path):
    code, asked = Job(tmp_path, "0").end()
    assert code == 0
    started = [words for words in asked if words[:2] == ["ray", "start"]]
    (head,) = [words for words in started if "--head" in words]
    (other,) = [words for words in started if "--head" not in words]
    port = next(word for word in head if word.startswith("--port=")).partition("=")[2]
    assert "--node-ip-address=10.1.2.3" in head
    assert f"--address=10.1.2.3:{port}" in other
    where = [words for words in asked if words[0] == "srun"]
    assert any({"--nodes=1", "--nodelist=node1", "ray", "--head"} <= {*words} for words in where)
    assert any({"--nodes=2", "--ntasks=2", "--exclude=node1", "ray"} <= {*words} for words in where)
    (run,) = [words for words in asked if words[0] == "offbeat-train"]
    config = compose_run(run[1:])
    assert (config.cluster.ray_address, config.device) == (f"10.1.2.3:{port}", "cuda")
    assert (config.run_dir, config.resume, config.name) == (str(tmp_path / "a run"), "auto", "a run")
    assert not [words for words in asked if "requeue" in words]


@pytest.mark.spawns
def test_a_slurm_job_whose_time_is_over_lets_the_run_end_and_queues_itself_again(tmp_path):
    job = Job(tmp_path, "wait")
    job.wait_for("offbeat-train.begun")
    job.process.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B: does
    code, asked = job.end()
    assert code == 130
    assert ["scontrol", "requeue", "12345"] in asked


@pytest.mark.spawns
@pytest.mark.parametrize("changed", [{}, {"ray": "exit 1"}])
def test_a_slurm_job_that_fails_says_so_and_stays_out_of_the_queue(tmp_path, changed):
    code, asked = Job(tmp_path, "1", **changed).end()
    assert code == 1
    assert not [words for words in asked if "requeue" in words]
    assert bool([words for words in asked if words[0] == "offbeat-train"]) == (not changed)


# Of KubeRay's types (ray-operator/apis/ray/v1/rayjob_types.go and raycluster_types.go): no package carries their schema.
FIELDS = {
    "RayJobSpec": {
        "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "clusterSelector",
        "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode",
        "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes",
        "suspend",
    },
    "RayClusterSpec": {
        "headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions",
        "headServiceAnnotations", "suspend",
    },
    "HeadGroupSpec": {"serviceType", "headService", "enableIngress", "rayStartParams", "template"},
    "WorkerGroupSpec": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template", "scaleStrategy",
    },
}  # fmt: skip


def rayjob():
    """Return the spec of the example, of its cluster, and the groups of that."""
    job = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())
    assert {*job} == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    return job["spec"], cluster, cluster["headGroupSpec"], cluster["workerGroupSpecs"]


def check_pods(template):
    """Hold a group's `template` against the schema that Kubernetes publishes, in which no other field is allowed."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")  # of the workspace, not of the package
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}, "template": template}
    try:
        kubernetes_validate.validate(pods, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise ValueError(error.message) from error


def test_the_rayjob_has_kuberay_s_fields():
    spec, cluster, head, workers = rayjob()
    for section, kind in [(spec, "RayJobSpec"), (cluster, "RayClusterSpec"), (head, "HeadGroupSpec")]:
        assert {*section} <= FIELDS[kind]
    for group in workers:
        assert {*group} <= FIELDS["WorkerGroupSpec"]
        assert {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"} <= {*group}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert all(
        isinstance(value, str) for group in (head, *workers) for value in group["rayStartParams"].values()
    )


def test_the_pods_of_the_rayjob_are_those_of_kubernetes_and_their_volumes_are_there():
    _, _, head, workers = rayjob()
    for group in (head, *workers):
        check_pods(group["template"])
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {*mounts} == {volume["name"] for volume in pod["volumes"]}
        assert mounts["shm"] == "/dev/shm"
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pod: pod.update(volume=[]), "volume"),
        (lambda pod: pod["containers"][0].pop("name"), "name"),
        (lambda pod: pod["containers"][0]["env"][0].update(value=1), "1 is not of type"),
        (lambda pod: pod["volumes"][1]["emptyDir"].update(size="1Gi"), "size"),
    ],
)
def test_a_pod_that_kubernetes_would_not_take_is_found(spoil, says):
    template = copy.deepcopy(rayjob()[2]["template"])
    spoil(template["spec"])
    with pytest.raises(ValueError, match=says):
        check_pods(template)


def test_ray_reads_the_cluster_of_the_rayjob_as_it_does_under_kuberay():
    """By the code with which Ray's head reads its own cluster there, checked by Ray's schema."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    read = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "offbeat", "namespace": "default"}, "spec": rayjob()[1]}
    )
    nodes = {
        name: (node["resources"], node["min_workers"]) for name, node in read["available_node_types"].items()
    }
    gib = 1 << 30
    assert nodes == {
        "headgroup": ({"CPU": 8, "GPU": 0, "memory": 64 * gib}, 0),
        "gpus": ({"CPU": 64, "GPU": 8, "memory": 512 * gib}, 2),
    }


def test_the_run_of_the_rayjob_fits_its_cluster_and_writes_where_all_pods_do():
    spec = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())["spec"]
    program, *words = shlex.split(spec["entrypoint"])
    config = compose_run(words)
    assert (program, config.cluster.ray_address, config.resume) == ("offbeat-train", "auto", "auto")
    assert config.run_dir.startswith("/shared/")
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    gpus = sum(
        group["replicas"]
        * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for group in spec["rayClusterSpec"]["workerGroupSpecs"]
    )
    assert config.engine.num_ranks + config.rollout.num_replicas * config.rollout.tensor_parallel_size == gpus
