"""The manifests: against the schemas of Kubernetes and of the Dask operator, and through the operator's own code."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from dask.utils import parse_bytes

from tests.support.deploy_help import CLUSTER, TOP, documents, parse

kubernetes_validate = pytest.importorskip("kubernetes_validate")
operator_package = pytest.importorskip("dask_kubernetes")

FOLDER = CLUSTER / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
MANIFESTS = [(path.name, document) for path in FILES for document in documents(path)]
ALL = [pytest.param(document, id=f"{name}-{document['kind']}") for name, document in MANIFESTS]
VERSION = "1.31"
CRDS = Path(operator_package.__file__).parent / "operator/deployment/helm/dask-kubernetes-operator/crds"

# The Prometheus operator has no package with its schemas: the fields that we use, as its documentation gives them.
ENDPOINT = {
    "type": "object",
    "required": ["port", "path"],
    "additionalProperties": False,
    "properties": {
        "port": {"const": "http-dashboard"},
        "path": {"const": "/metrics"},
        "interval": {"type": "string", "pattern": r"^\d+s$"},
        "scrapeTimeout": {"type": "string", "pattern": r"^\d+s$"},
    },
}


def monitor(endpoints: str) -> dict[str, Any]:
    labels = {"type": "object", "required": ["matchLabels"], "additionalProperties": False,
              "properties": {"matchLabels": {"type": "object"}}}  # fmt: skip
    return {
        "type": "object",
        "required": ["selector", endpoints],
        "additionalProperties": False,
        "properties": {
            "jobLabel": {"type": "string"},
            "selector": labels,
            endpoints: {"type": "array", "minItems": 1, "items": ENDPOINT},
        },
    }


MONITORS = {"ServiceMonitor": monitor("endpoints"), "PodMonitor": monitor("podMetricsEndpoints")}


def strict(schema: Any) -> Any:
    """A schema of a custom resource that also refuses fields it does not know."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(part) for name, part in schema.items()}
    if isinstance(found.get("properties"), dict) and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def crd_schema(kind: str) -> dict[str, Any]:
    (crd,) = documents(CRDS / f"{kind.lower()}.yaml")
    schema = strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    schema["properties"] |= {name: {} for name in ("apiVersion", "kind", "metadata")}
    return dict(schema)


def check(document: dict[str, Any]) -> None:
    """Raise unless the schema of its kind knows every field."""
    kind = document["kind"]
    if document["apiVersion"] == "kubernetes.dask.org/v1":
        jsonschema.Draft202012Validator(crd_schema(kind)).validate(document)
    elif document["apiVersion"] == "monitoring.coreos.com/v1":
        jsonschema.validate(document["spec"], MONITORS[kind])
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)


def pods(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(role, pod spec) of everything that a manifest runs."""
    spec = document.get("spec", {})
    if document["kind"] == "DaskJob":
        cluster = spec["cluster"]["spec"]
        return [("client", spec["job"]["spec"]), *((role, cluster[role]["spec"]) for role in ("scheduler", "worker"))]
    if document["kind"] == "DaskCluster":
        return [(role, spec[role]["spec"]) for role in ("scheduler", "worker")]
    if document["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    return [("client", spec["template"]["spec"])] if "template" in spec else []


PODS = [
    pytest.param(document, role, pod, id=f"{name}-{role}")
    for name, document in MANIFESTS
    for role, pod in pods(document)
]


@pytest.mark.parametrize("document", ALL)
def test_every_field_is_known(document: dict[str, Any]) -> None:
    check(document)
    broken = copy.deepcopy(document)
    if "spec" in broken:
        broken["spec"]["replica"] = 3
        with pytest.raises(jsonschema.ValidationError):
            check(broken)


@pytest.mark.parametrize(("document", "role", "pod"), PODS)
def test_commands_and_certificates(document: dict[str, Any], role: str, pod: dict[str, Any], certs: Path) -> None:
    (container,) = pod["containers"]
    moved = {"/tls": certs, "/opt/och/pipelines": TOP / "pipelines"}
    found = parse(container["args"], moved)
    given = {entry["name"]: entry["value"] for entry in container.get("env", [])}
    namespace, name = document["metadata"]["namespace"], document["metadata"]["name"]
    own_cluster = document["kind"].startswith("Dask")
    address = f"tls://{name if own_cluster else 'och'}-scheduler.{namespace}.svc.cluster.local:8786"
    if role == "scheduler":
        assert (found["port"], found["protocol"]) == ("8786", "tls")
    elif role == "worker":
        assert container["args"][:2] == ["dask", "worker"]
        assert given["DASK_SCHEDULER_ADDRESS"] == address
        memory = container["resources"]["limits"]["memory"]
        assert int(found["n_workers"]) * parse_bytes(found["memory_limit"]) < parse_bytes(f"{memory}B")
        assert int(found["n_workers"]) * found["nthreads"] <= int(container["resources"]["limits"]["cpu"])
    else:
        assert given["DASK_OCH__SCHEDULER"] == address
        assert found["grace"] < pod["terminationGracePeriodSeconds"]
    for port in container.get("ports", []):
        expected = {"tcp-comm": 8786, "http-dashboard": 8788 if role == "worker" else 8787}[port["name"]]
        assert port["containerPort"] == expected
    tls = {*re.findall(r"/tls/([\w.]+)", " ".join([*container["args"], *given.values()]))}
    assert tls == {"ca.pem", f"{role}.pem", f"{role}.key"}


@pytest.mark.parametrize(("document", "role", "pod"), PODS)
def test_pods_are_poor_and_bounded(document: dict[str, Any], role: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["tls"]["secret"] == {"secretName": f"och-tls-{role}", "defaultMode": 0o440}
    for secret in (entry["secretRef"]["name"] for entry in container.get("envFrom", [])):
        assert secret in {document["metadata"]["name"] for _, document in MANIFESTS if document["kind"] == "Secret"}


def test_the_operator_makes_valid_objects_of_them() -> None:
    made = pytest.importorskip("dask_kubernetes.operator.controller.controller")
    for _, document in MANIFESTS:
        if not document["kind"].startswith("Dask"):
            continue
        name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
        spec = document["spec"]
        if document["kind"] == "DaskJob":
            job = made.build_job_pod_spec(name, name, namespace, spec["job"]["spec"], {}, {})
            kubernetes_validate.validate(job, VERSION, strict=True)
            spec = spec["cluster"]["spec"]
            check(made.build_cluster_spec(name, spec["worker"], spec["scheduler"], {}, {}))
        objects = [
            made.build_scheduler_deployment_spec(name, spec["scheduler"]["spec"], {}, {}),
            made.build_scheduler_service_spec(name, spec["scheduler"]["service"], {}, {}),
            made.build_worker_deployment_spec(f"{name}-default", namespace, name, "1", spec["worker"]["spec"], {}, {}),
        ]
        for found in objects:
            kubernetes_validate.validate(found, VERSION, strict=True)
        assert objects[1]["metadata"]["name"] == f"{name}-scheduler"
        environment = objects[2]["spec"]["template"]["spec"]["containers"][0]["env"]
        addresses = [entry["value"] for entry in environment if entry["name"] == "DASK_SCHEDULER_ADDRESS"]
        assert addresses == [f"tls://{name}-scheduler.{namespace}.svc.cluster.local:8786"]


def test_the_kustomization_names_what_is_there(certs: Path) -> None:
    (found,) = documents(FOLDER / "kustomization.yaml")
    assert set(found) == {"apiVersion", "kind", "resources", "secretGenerator", "generatorOptions"}
    assert all((FOLDER / name).exists() for name in found["resources"])
    assert found["generatorOptions"] == {"disableNameSuffixHash": True}
    held = {secret["name"]: {Path(file).name for file in secret["files"]} for secret in found["secretGenerator"]}
    for role in ("scheduler", "worker", "client"):
        assert held[f"och-tls-{role}"] == {"ca.pem", f"{role}.pem", f"{role}.key"}
    assert all((certs / name).exists() for names in held.values() for name in names)
    claims = {document["metadata"]["name"] for _, document in MANIFESTS if document["kind"].endswith("Claim")}
    for _, document in MANIFESTS:
        for _, pod in pods(document):
            named = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]
                     if "persistentVolumeClaim" in volume]  # fmt: skip
            assert set(named) <= claims


def test_exit_codes_decide_about_retries() -> None:
    from och_dist import errors

    lost = {errors.IncompleteError.exit_code, errors.ClusterError.exit_code}
    for _, document in MANIFESTS:
        spec = document["spec"]["jobTemplate"]["spec"] if document["kind"] == "CronJob" else document.get("spec", {})
        if "podFailurePolicy" in spec:
            fatal = set(spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"])
            assert fatal == {2, 3, 4, 6}
            assert not fatal & lost
            assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == "och"
