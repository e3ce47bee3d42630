"""Deployment files: Ray, AWS and Kubernetes accept every field, and raycl's guarantees hold."""

import copy
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start
from typer.main import get_command

import raycl
from raycl.cli.main import app

ROOT = Path(__file__).parent.parent
FILES = sorted([ROOT / "cluster.yaml", *(ROOT / "deploy").iterdir()])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RAY = next(each for each in map(Requirement, PROJECT["project"]["dependencies"]) if each.name == "ray")

LAUNCHED = yaml.safe_load((ROOT / "cluster.yaml").read_text())
NODES: dict[str, Any] = LAUNCHED["available_node_types"]
HEAD = NODES[LAUNCHED["head_node_type"]]
WORKERS = {name: node for name, node in NODES.items() if node is not HEAD}

OBJECTS = {
    each["kind"]: each
    for path in (ROOT / "deploy").glob("*.yaml")
    for each in yaml.safe_load_all(path.read_text())
}
CLUSTER = OBJECTS["RayCluster"]["spec"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
PODS = {"head": CLUSTER["headGroupSpec"]["template"]} | {k: group["template"] for k, group in GROUPS.items()}

Schema = dict[str, Any]


def closed(required: str, **fields: Schema) -> Schema:
    """The schema of an object with only these fields."""
    keys = {"properties": fields, "required": required.split(), "additionalProperties": False}
    return {"type": "object"} | keys


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
COUNT: Schema = {"type": "integer", "minimum": 0}
TRUTH: Schema = {"type": "boolean"}

# Ray's launcher passes this to EC2 unchecked and does not detect misspelled fields.
NODE_CONFIG = closed(
    "InstanceType ImageId IamInstanceProfile MetadataOptions BlockDeviceMappings",
    InstanceType={"pattern": r"^[a-z]\w+\.\w+$"},
    InstanceMarketOptions=closed("MarketType", MarketType={"const": "spot"}),
    ImageId={"pattern": "^(ami-|resolve:ssm:/)"},
    IamInstanceProfile=closed("Name", Name=TEXT),
    MetadataOptions=closed("HttpTokens", HttpTokens={"const": "required"}),
    BlockDeviceMappings=list_of(
        closed(
            "DeviceName Ebs",
            DeviceName=TEXT,
            Ebs=closed(
                "VolumeSize VolumeType Encrypted DeleteOnTermination",
                VolumeSize=COUNT,
                VolumeType={"const": "gp3"},
                Encrypted={"const": True},
                DeleteOnTermination={"const": True},
            ),
        )
    ),
)

# The fields used here, from KubeRay's schema of one megabyte.
AMOUNTS: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^\d+(m|[KMG]i)?$"},
}
CONTAINER = closed(
    "name image resources securityContext",
    name=TEXT,
    image=TEXT,
    env=list_of(closed("name value", name=TEXT, value=TEXT)),
    ports=list_of(closed("name containerPort", name={"maxLength": 15}, containerPort=COUNT)),
    resources=closed("requests limits", requests=AMOUNTS, limits=AMOUNTS),
    securityContext=closed(
        "allowPrivilegeEscalation capabilities",
        allowPrivilegeEscalation={"const": False},
        capabilities=closed("drop", drop={"const": ["ALL"]}),
    ),
)
POD = closed(
    "serviceAccountName securityContext containers",
    serviceAccountName=TEXT,
    automountServiceAccountToken=TRUTH,
    nodeSelector=TEXTS,
    securityContext=closed(
        "runAsNonRoot runAsUser seccompProfile",
        runAsNonRoot={"const": True},
        runAsUser={"type": "integer", "minimum": 1},
        seccompProfile=closed("type", type={"const": "RuntimeDefault"}),
    ),
    tolerations=list_of(closed("key operator effect", key=TEXT, operator=TEXT, effect=TEXT)),
    containers=list_of(CONTAINER),
)
NODE = {
    "rayStartParams": TEXTS,
    "labels": TEXTS,
    "template": closed("metadata spec", metadata=closed("labels", labels=TEXTS), spec=POD),
}
RAY_CLUSTER = closed(
    "rayVersion authOptions enableInTreeAutoscaling autoscalerOptions headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=closed("mode", mode={"enum": ["token", "disabled"]}),
    enableInTreeAutoscaling=TRUTH,
    autoscalerOptions=closed("version idleTimeoutSeconds", version={"const": "v2"}, idleTimeoutSeconds=COUNT),
    headGroupSpec=closed("serviceType rayStartParams labels template", serviceType=TEXT, **NODE),
    workerGroupSpecs=list_of(
        closed(
            "groupName replicas minReplicas maxReplicas rayStartParams labels template",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            **NODE,
        )
    ),
)
RAY_JOB = closed(
    "entrypoint shutdownAfterJobFinishes rayClusterSpec",
    entrypoint=TEXT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=TRUTH,
    ttlSecondsAfterFinished=COUNT,
    rayClusterSpec=RAY_CLUSTER,
)
SELECTOR = closed("matchLabels", matchLabels=TEXTS)
NETWORK_POLICY = closed(
    "podSelector policyTypes ingress",
    podSelector=SELECTOR,
    policyTypes={"const": ["Ingress"]},
    ingress=list_of(
        closed(
            "from",
            ports=list_of(closed("port protocol", port=COUNT, protocol={"const": "TCP"})),
            **{"from": list_of(closed("podSelector", podSelector=SELECTOR, namespaceSelector=closed("")))},
        )
    ),
)
SPECS = {
    "RayJob": ("ray.io/v1", RAY_JOB),
    "RayCluster": ("ray.io/v1", RAY_CLUSTER),
    "NetworkPolicy": ("networking.k8s.io/v1", NETWORK_POLICY),
    "ServiceAccount": ("v1", None),
}


def started(commands: list[str]) -> dict[str, Any]:
    """Return the flags of the last command as parsed by ``ray start``; unknown flags are an error."""
    _, _, flags = commands[-1].partition("ray start ")
    return ray_start.make_context("ray start", shlex.split(flags)).params


def environment_of(commands: list[str]) -> dict[str, str]:
    """Return the environment of ``ray start`` in the last command, in the launcher's shell."""
    return run_on_a_node(f"ray() {{ env; }}; {commands[-1]}", OMP_NUM_THREADS="1")


def run_on_a_node(command: str, **environment: str) -> dict[str, str]:
    """Run a command in bash; return the printed NAME=VALUE lines."""
    environment = {"PATH": os.environ["PATH"]} | environment
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def container_of(pod: Any) -> Any:
    return pod["spec"]["containers"][0]


def test_the_ray_cluster_launcher_accepts_the_cluster_file() -> None:
    validate_config(prepare_config(copy.deepcopy(LAUNCHED)))


@pytest.mark.parametrize("name", NODES)
def test_node_settings_use_only_fields_known_to_aws(name: str) -> None:
    jsonschema.validate(NODES[name]["node_config"], NODE_CONFIG)


def test_worker_groups_scale_up_from_zero_and_back_when_idle() -> None:
    assert {node["min_workers"] for node in WORKERS.values()} == {0}
    assert 0 < LAUNCHED["idle_timeout_minutes"] <= 10
    assert LAUNCHED["provider"]["cache_stopped_nodes"] is False
    assert sum(node["max_workers"] for node in WORKERS.values()) == LAUNCHED["max_workers"]


def test_only_nodes_that_a_run_may_lose_are_spot_instances() -> None:
    spot = {node["labels"]["raycl.io/role"] for node in NODES.values() if "InstanceMarketOptions" in node["node_config"]}  # fmt: skip
    assert spot == {"gpu", "data"}


def test_the_head_runs_no_training_and_no_task_blocks_a_memory_node() -> None:
    assert HEAD["resources"] == {"CPU": 0, "GPU": 0}
    assert HEAD["labels"] == {"raycl.io/role": "head"}
    assert not HEAD["node_config"]["InstanceType"].startswith(("g", "p"))
    assert NODES["memory.ondemand"]["resources"] == {"CPU": 0}


def test_ray_start_accepts_the_flags_and_the_dashboard_stays_on_loopback() -> None:
    head, worker = (started(LAUNCHED[f"{node}_start_ray_commands"]) for node in ("head", "worker"))
    assert head["head"]
    assert head["dashboard_host"] == "127.0.0.1"
    assert "--dashboard-host" in LAUNCHED["head_start_ray_commands"][-1]  # explicit rather than Ray's default
    assert head["autoscaling_config"] == "~/ray_bootstrap_config.yaml"
    assert not worker["head"]
    assert worker["address"] == f"$RAY_HEAD_IP:{head['port']}"
    assert "0.0.0.0" not in (ROOT / "cluster.yaml").read_text()
    assert "security_group" not in LAUNCHED["provider"]  # Ray's default allows only ssh


def test_every_node_has_the_token_and_requires_it() -> None:
    assert LAUNCHED["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "chmod 600 ~/.ray/auth_token" in LAUNCHED["setup_commands"]
    for node in ("head", "worker"):
        environment = environment_of(LAUNCHED[f"{node}_start_ray_commands"])
        assert environment["RAY_AUTH_MODE"] == "token"
        assert "OMP_NUM_THREADS" not in environment  # otherwise every Ray process would use one thread


def test_a_shell_on_a_node_finds_raycl_and_has_the_token(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    for command in LAUNCHED["setup_commands"][-2:] * 2:
        run_on_a_node(command, **home)
    shell = run_on_a_node("source ~/.bashrc; env", **home)
    assert shell["RAY_AUTH_MODE"] == "token"
    assert shell["PATH"] == f"{tmp_path}/raycl/.venv/bin:{os.environ['PATH']}"
    assert len((tmp_path / ".bashrc").read_text().splitlines()) == 1


def test_a_stopped_job_has_time_to_save_its_checkpoint() -> None:
    patience_s = environment_of(LAUNCHED["head_start_ray_commands"])["RAY_JOB_STOP_WAIT_TIME_S"]
    assert patience_s == "120"
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": patience_s} in container_of(PODS["head"])["env"]


def test_every_node_installs_the_ray_version_required_by_raycl() -> None:
    commands = "\n".join(LAUNCHED["setup_commands"])
    assert re.search(r"uv sync .*--frozen", commands)
    assert "default" in RAY.extras  # required for the dashboard and jobs
    assert not re.search(r"\bray(\[|=)", commands)  # another version would replace it


def test_no_default_command_of_the_launcher_runs_on_a_node() -> None:
    ready = prepare_config(copy.deepcopy(LAUNCHED))
    for kind in ("setup_commands", "start_ray_commands"):
        ours = [
            *LAUNCHED["setup_commands"],
            *LAUNCHED.get(f"head_{kind}", []),
            *LAUNCHED.get(f"worker_{kind}", []),
        ]
        assert set(ready[f"head_{kind}"] + ready[f"worker_{kind}"]) <= set(ours)
    assert ready["initialization_commands"] == []


def test_only_the_files_of_the_package_are_copied_to_the_nodes() -> None:
    copied = {source for target, source in LAUNCHED["file_mounts"].items() if target.startswith("~/raycl/")}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied == {"pyproject.toml", PROJECT["project"]["readme"], "uv.lock", *packages}
    assert all(
        target == f"~/raycl/{source}"
        for target, source in LAUNCHED["file_mounts"].items()
        if source in copied
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_contains_a_secret_key(path: Path) -> None:
    text = path.read_text()
    assert not re.search(
        r"AKIA\w{16}|AWS_(ACCESS|SECRET|SESSION)|aws_(access|secret|session|credentials)", text
    )
    assert not re.search(r"ssh_private_key|auth_token:|RAY_AUTH_TOKEN(=(?!\$\(kubectl)|:)|BEGIN \w*", text)


@pytest.mark.parametrize("kind", OBJECTS)
def test_kubernetes_objects_have_only_existing_fields(kind: str) -> None:
    version, spec = SPECS[kind]
    metadata = closed("name", name={"pattern": "^[a-z][-a-z0-9]{0,46}$"}, annotations=TEXTS)
    fields = {"apiVersion": {"const": version}, "kind": TEXT, "metadata": metadata}
    fields |= {"spec": spec} if spec else {}
    jsonschema.validate(OBJECTS[kind], closed(" ".join(fields), **fields))


def test_the_cluster_of_a_job_equals_the_permanent_cluster() -> None:
    assert set(OBJECTS) == set(SPECS)
    assert OBJECTS["RayJob"]["spec"]["rayClusterSpec"] == CLUSTER
    assert OBJECTS["RayJob"]["spec"]["shutdownAfterJobFinishes"]


def test_all_pods_use_one_image_with_the_ray_version_required_by_raycl() -> None:
    version = CLUSTER["rayVersion"]
    assert RAY.specifier.contains(version)
    images = {container_of(pod)["image"] for pod in PODS.values()}
    assert images == {f"registry.example.com/raycl:{PROJECT['project']['version']}"}
    manual = (ROOT / "deploy" / "README.md").read_text()
    assert f"FROM rayproject/ray:{version}-py311\n" in manual
    assert images.pop() in manual


def test_pod_groups_scale_up_from_zero_and_the_head_offers_no_cpus() -> None:
    assert CLUSTER["enableInTreeAutoscaling"]
    assert CLUSTER["autoscalerOptions"]["idleTimeoutSeconds"] <= 600
    assert {(group["replicas"], group["minReplicas"]) for group in GROUPS.values()} == {(0, 0)}
    assert all(group["maxReplicas"] > 0 for group in GROUPS.values())
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    known = {flag.removeprefix("--") for parameter in ray_start.params for flag in parameter.opts}
    for group in (CLUSTER["headGroupSpec"], *GROUPS.values()):
        assert set(group["rayStartParams"]) <= known


def test_node_labels_are_the_same_on_aws_and_kubernetes() -> None:
    roles = {"head": CLUSTER["headGroupSpec"]} | GROUPS
    assert {name: group["labels"] for name, group in roles.items()} == {
        name: {"raycl.io/role": name} for name in ("head", "gpu", "data")
    }
    assert {node["labels"]["raycl.io/role"] for node in NODES.values()} == {*roles, "memory"}


def test_only_training_pods_have_a_gpu_and_requests_equal_limits() -> None:
    for name, pod in PODS.items():
        resources = container_of(pod)["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["limits"].get("nvidia.com/gpu") == ("1" if name == "gpu" else None)
        on_spot = pod["spec"]["nodeSelector"]["karpenter.sh/capacity-type"] == "spot"
        assert on_spot == (name != "head")


def test_pods_require_a_token_and_access_s3_by_their_role() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    account = OBJECTS["ServiceAccount"]["metadata"]
    assert account["annotations"]["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::")
    assert {pod["spec"]["serviceAccountName"] for pod in PODS.values()} == {account["name"]}
    # Only the autoscaler in the head pod needs the Kubernetes API.
    assert {pod["spec"].get("automountServiceAccountToken", True) for pod in PODS.values()} == {True, False}
    assert "automountServiceAccountToken" not in PODS["head"]["spec"]


def test_only_kuberay_and_the_submitting_pod_can_reach_the_dashboard() -> None:
    assert CLUSTER["headGroupSpec"]["serviceType"] == "ClusterIP"
    policy = OBJECTS["NetworkPolicy"]["spec"]
    chosen = policy["podSelector"]["matchLabels"]
    for pod in PODS.values():
        assert chosen.items() <= pod["metadata"]["labels"].items()
    within, from_outside = policy["ingress"]
    assert within == {"from": [{"podSelector": {"matchLabels": chosen}}]}
    operator, submitter = (each["podSelector"]["matchLabels"] for each in from_outside["from"])
    assert operator == {"app.kubernetes.io/component": "kuberay-operator"}
    assert submitter == {"batch.kubernetes.io/job-name": OBJECTS["RayJob"]["metadata"]["name"]}
    ports = {port["name"]: port["containerPort"] for port in container_of(PODS["head"])["ports"]}
    assert from_outside["ports"] == [{"port": ports["dashboard"], "protocol": "TCP"}]


def test_the_deployed_jobs_run_valid_raycl_commands() -> None:
    texts = [(ROOT / name).read_text() for name in ("cluster.yaml", "deploy/README.md")]
    unfolded = "\n".join(re.sub(r"\\\n#?\s*", "", text) for text in texts)
    lines = re.findall(r"python jobs/train\.py (.*)", unfolded)
    assert len(lines) == 2
    _, _, entrypoint = OBJECTS["RayJob"]["spec"]["entrypoint"].partition("raycl train ")
    door: Any = get_command(app)
    train = door.commands["train"]
    for line in [*lines, entrypoint]:
        flags = train.make_context("train", shlex.split(line)).params
        config = raycl.override(raycl.recipe(flags["recipe"]), flags["settings"])
        assert config.autoscaling  # otherwise the run is refused on a cluster without workers
        assert flags["gpu"]


def test_a_run_restarted_by_kuberay_resumes() -> None:
    job = OBJECTS["RayJob"]["spec"]
    assert job["backoffLimit"] > 0
    assert "--resume" in shlex.split(job["entrypoint"])
