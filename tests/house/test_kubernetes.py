"""What can be said about the manifests without a cluster: they name each other rightly, and the service as it is."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.__main__ import EXIT_SECONDS
from app.main import create_app
from app.settings import Settings, unknown_variables

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
SECRET = yaml.safe_load((DIRECTORY / "secret.example.yaml").read_text())
APPLIED = [
    document for file in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((DIRECTORY / file).read_text())
]
PORT = 8080


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [it for it in APPLIED if (it["kind"], it["metadata"]["name"]) == (kind, name)]
    return dict(found)


API, WORKER = named("Deployment", "toolcrib-api"), named("StatefulSet", "toolcrib-worker")
BOTH = pytest.mark.parametrize("workload", [API, WORKER], ids=["api", "worker"])


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    [container] = pod_of(workload)["containers"]
    return dict(container)


def environment_of(workload: dict[str, Any]) -> dict[str, str]:
    """Return what the container's variables come to, the Secret's as those of its example."""
    assert container_of(workload)["envFrom"] == [
        {"configMapRef": {"name": "toolcrib"}},
        {"secretRef": {"name": SECRET["metadata"]["name"]}},
    ]
    given = {it["name"]: it["value"] for it in container_of(workload)["env"] if "value" in it}
    return {**named("ConfigMap", "toolcrib")["data"], **SECRET["stringData"], **given}


def selected(selector: dict[str, str]) -> list[str]:
    """Return the workloads whose pods have all labels of a selector."""
    return [
        it["metadata"]["name"]
        for it in (API, WORKER)
        if selector and selector.items() <= it["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_every_manifest_but_the_example_of_the_secret_is_applied():
    files = {file.name for file in DIRECTORY.iterdir()}
    assert files - set(KUSTOMIZATION["resources"]) == {"kustomization.yaml", "secret.example.yaml"}
    assert [image["name"] for image in KUSTOMIZATION["images"]] == [container_of(API)["image"]]
    assert container_of(API)["image"] == container_of(WORKER)["image"]


def test_the_example_of_the_secret_starts_nothing():
    assert set(SECRET["stringData"].values()) == {""}


@BOTH
def test_variables_of_the_containers_are_settings(workload: dict[str, Any]):
    assert unknown_variables(environment_of(workload)) == []


@BOTH
def test_no_variable_of_kubernetes_is_taken_for_a_setting(workload: dict[str, Any]):
    # The Service `toolcrib` makes TOOLCRIB_PORT=tcp://… in every pod that has links.
    assert pod_of(workload)["enableServiceLinks"] is False
    assert pod_of(workload)["automountServiceAccountToken"] is False


def test_the_api_answers_and_a_worker_says_where_it_is_reached():
    assert environment_of(API)["TOOLCRIB_ROLE"] == "api"
    assert (container_of(API)["args"], container_of(WORKER)["args"]) == (["serve"], ["worker"])
    service = WORKER["spec"]["serviceName"]
    assert environment_of(WORKER)["TOOLCRIB_ADVERTISE_URL"] == f"http://$(POD_NAME).{service}:{PORT}"
    # A variable is put into those that come after it.
    assert [it["name"] for it in container_of(WORKER)["env"]] == ["POD_NAME", "TOOLCRIB_ADVERTISE_URL"]
    headless = named("Service", service)["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)


def test_selectors_find_the_pods_they_are_meant_for():
    for workload in (API, WORKER):
        name = workload["metadata"]["name"]
        assert selected(workload["spec"]["selector"]["matchLabels"]) == [name]
        [spread] = pod_of(workload)["topologySpreadConstraints"]
        assert selected(spread["labelSelector"]["matchLabels"]) == [name]
        assert selected(named("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"]) == [name]
    assert selected(named("Service", "toolcrib")["spec"]["selector"]) == ["toolcrib-api"]
    assert selected(named("Service", "toolcrib-worker")["spec"]["selector"]) == ["toolcrib-worker"]


def test_only_api_pods_reach_workers():
    policy = named("NetworkPolicy", "toolcrib-worker")["spec"]
    assert selected(policy["podSelector"]["matchLabels"]) == ["toolcrib-worker"]
    assert policy["policyTypes"] == ["Ingress"]
    [rule] = policy["ingress"]
    [source] = rule["from"]
    assert set(source) == {"podSelector"}
    assert selected(source["podSelector"]["matchLabels"]) == ["toolcrib-api"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]


def test_ports_are_named_alike_and_are_the_port_of_the_service():
    for workload, environment in ((API, environment_of(API)), (WORKER, environment_of(WORKER))):
        assert container_of(workload)["ports"] == [{"name": "http", "containerPort": PORT}]
        assert environment["TOOLCRIB_PORT"] == str(PORT)
    for name in ("toolcrib", "toolcrib-worker"):
        [port] = named("Service", name)["spec"]["ports"]
        assert (port["name"], port["targetPort"]) == ("http", "http")
    # The address of a pod without a Service's port in between: what a worker says is the port it listens on.
    assert named("Service", "toolcrib-worker")["spec"]["ports"][0]["port"] == PORT
    [rule] = named("Ingress", "toolcrib")["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert path["backend"] == {"service": {"name": "toolcrib", "port": {"name": "http"}}}


@BOTH
def test_probes_ask_paths_that_the_service_has(workload: dict[str, Any]):
    container = container_of(workload)
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert {probe["path"] for probe in probes.values()} <= set(routes())


@functools.cache
def routes() -> list[str]:
    return list(create_app(Settings()).openapi()["paths"])


@BOTH
def test_a_pod_has_the_time_that_the_service_needs_to_stop(workload: dict[str, Any]):
    command = (
        container_of(workload).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    )
    assert command[0] == "sleep"
    assert pod_of(workload)["terminationGracePeriodSeconds"] > int(command[1]) + EXIT_SECONDS + 5


@BOTH
def test_a_pod_has_no_more_rights_than_it_needs(workload: dict[str, Any]):
    pod, container = pod_of(workload), container_of(workload)
    image_user = 10001
    assert f"--uid {image_user} " in (DIRECTORY.parents[1] / "Dockerfile").read_text()
    volume = {"fsGroup": image_user, "fsGroupChangePolicy": "OnRootMismatch"} if workload is WORKER else {}
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": image_user,
        "runAsGroup": image_user,
        "seccompProfile": {"type": "RuntimeDefault"},
        **volume,
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@BOTH
def test_what_is_written_is_on_a_volume(workload: dict[str, Any]):
    volumes = {it["name"] for it in pod_of(workload)["volumes"]}
    claims = {it["metadata"]["name"] for it in workload["spec"].get("volumeClaimTemplates", [])}
    mounts = {it["mountPath"]: it["name"] for it in container_of(workload)["volumeMounts"]}
    assert set(mounts.values()) == volumes | claims
    assert set(mounts) == ({"/data", "/tmp"} if workload is WORKER else {"/tmp"})
    # In the volume and not the volume itself, whose root belongs to root.
    assert Path(environment_of(workload)["TOOLCRIB_DATA_DIR"]).parent == Path("/data")


def test_a_worker_takes_its_volume_for_its_own_before_it_starts(tmp_path: Path):
    [relocate] = pod_of(WORKER)["initContainers"]
    same = ("image", "envFrom", "securityContext", "volumeMounts")
    assert {key: relocate[key] for key in same} == {key: container_of(WORKER)[key] for key in same}
    program = tmp_path / "toolcrib"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TOOLCRIB_DATA_DIR": str(tmp_path / "data")}

    def started() -> tuple[int, str, str]:
        ran = subprocess.run(
            [*relocate["command"], *relocate["args"]], env=environment, capture_output=True, text=True, check=False
        )
        return ran.returncode, ran.stdout, ran.stderr

    assert started() == (0, "", "")  # a volume that is new
    (tmp_path / "data").mkdir()
    assert started() == (0, "", "")
    (tmp_path / "data" / "node").write_text("node_01\n")
    assert started() == (0, "db relocate --node node_01\n", "")


def test_workers_keep_their_volumes():
    assert [it["metadata"]["name"] for it in WORKER["spec"]["volumeClaimTemplates"]] == ["data"]
    assert WORKER["spec"]["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}


def test_the_ingress_lets_streams_and_uploads_flow():
    prefix = "nginx.ingress.kubernetes.io/proxy-"
    annotations = named("Ingress", "toolcrib")["metadata"]["annotations"]
    given = {name.removeprefix(prefix): value for name, value in annotations.items()}
    assert given == {
        "body-size": "10g",
        "buffering": "off",
        "connect-timeout": "2",
        "http-version": "1.1",
        "read-timeout": "300",
        "request-buffering": "off",
        "send-timeout": "300",
    }


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="needs the package kubernetes-validate, which has the schemas of Kubernetes (100 MB) and is installed by hand",
)
def test_manifests_fit_the_schemas_of_kubernetes():
    files = [str(DIRECTORY / file) for file in (*KUSTOMIZATION["resources"], "secret.example.yaml")]
    checked = subprocess.run(
        [sys.executable, "-m", "kubernetes_validate", "--strict", *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
