"""The files for deployments: valid by the schemas of their tools, and consistent with each other."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.run_containerfile import read_steps

from antiphon.config.loading import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SECRETS = {"ANTIPHON_STORE", "ANTIPHON_SEAL_KEYS", "ANTIPHON_METRICS_KEY", "UPSTREAM_API_KEY"}
ENVIRONMENT = {
    "ANTIPHON_STORE": "postgresql://antiphon:secret@db/antiphon",
    "ANTIPHON_SEAL_KEYS": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
    "ANTIPHON_METRICS_KEY": "m" * 32,
    "UPSTREAM_API_KEY": "sk-upstream",
    "HOME": "/nonexistent",
}
USER = 10001


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def read_manifest(kind: str) -> Any:
    (found,) = [manifest for path in MANIFESTS if (manifest := read_yaml(path))["kind"] == kind]
    return found


# The image


def test_image_runs_as_an_ordinary_user_with_a_health_check() -> None:
    steps = read_steps(DEPLOY / "Containerfile")
    last_stage = steps[max(index for index, (name, _) in enumerate(steps) if name == "FROM") :]
    arguments = dict(last_stage)
    assert arguments["USER"] == f"{USER}:{USER}"
    assert arguments["VOLUME"] == "/var/lib/antiphon"
    assert "/readyz" in arguments["HEALTHCHECK"]
    assert json.loads(arguments["ENTRYPOINT"]) == ["antiphon"]
    assert [name for name, _ in last_stage].index("USER") > [name for name, _ in last_stage].index("RUN")


def test_image_has_exact_base_images_and_copies_existing_files() -> None:
    steps = read_steps(DEPLOY / "Containerfile")
    bases = [argument.split()[0] for name, argument in steps if name == "FROM"]
    assert all(re.search(r":\d+\.\d+", base) for base in bases)
    copied = [argument.split()[:-1] for name, argument in steps if name == "COPY" and "--from" not in argument]
    assert all((ROOT / name).exists() for names in copied for name in names)


def test_build_context_excludes_large_and_private_files() -> None:
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    copied = {
        name
        for step, argument in read_steps(DEPLOY / "Containerfile")
        if step == "COPY" and "--from" not in argument
        for name in argument.split()[:-1]
    }
    assert {line.removeprefix("!") for line in ignored[1:]} == copied


# Settings


def test_settings_of_compose_and_kubernetes_are_accepted(tmp_path: Path) -> None:
    in_kubernetes = tmp_path / "antiphon.toml"
    in_kubernetes.write_text(read_manifest("ConfigMap")["data"]["antiphon.toml"])
    for path in (DEPLOY / "antiphon.toml", in_kubernetes):
        settings = load(path, ENVIRONMENT, {})
        assert settings.warnings == ()
        assert (settings.host, settings.metrics, settings.store) == ("0.0.0.0", True, ENVIRONMENT["ANTIPHON_STORE"])
    assert tomllib.loads(in_kubernetes.read_text()) == tomllib.loads((DEPLOY / "antiphon.toml").read_text())


def test_times_to_stop_are_longer_than_the_grace_period() -> None:
    grace = load(DEPLOY / "antiphon.toml", ENVIRONMENT, {}).shutdown_grace_seconds
    pod = read_manifest("Deployment")["spec"]["template"]["spec"]
    sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    unit = (DEPLOY / "systemd" / "antiphon.service").read_text()
    compose = read_yaml(DEPLOY / "compose.yaml")
    # After the grace period, the server sends final events for 5 seconds and closes its parts for 15 seconds. With
    # workers, it has 25 seconds.
    after = 25
    assert pod["terminationGracePeriodSeconds"] >= grace + sleep + after
    assert int(re.findall(r"^TimeoutStopSec=(\d+)s$", unit, re.MULTILINE)[0]) >= grace + after
    assert int(compose["services"]["node1"]["stop_grace_period"].removesuffix("s")) >= grace + after


# Compose


def test_compose_file_is_valid() -> None:
    pytest.importorskip("check_jsonschema")
    jsonschema = pytest.importorskip("jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(read_yaml(DEPLOY / "compose.yaml"), json.loads(schema.read_text()))


def test_compose_has_two_hardened_nodes_behind_the_proxy() -> None:
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    assert set(services) == {"db", "node1", "node2", "proxy"}
    for name in ("node1", "node2"):
        node = services[name]
        assert (node["read_only"], node["cap_drop"]) == (True, ["ALL"])
        assert set(node["environment"]) == SECRETS
        assert "ports" not in node
        # Podman has no option for the owner of a tmpfs. The volumes of the image belong to its user.
        assert node["tmpfs"] == ["/tmp"]
    variables = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert variables == set(re.findall(r"^(\w+)=", (DEPLOY / "example.env").read_text(), re.MULTILINE))
    assert all(port.startswith("127.0.0.1:") for port in services["proxy"]["ports"])


# Kubernetes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_is_valid(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(read_yaml(path), "1.33", strict=True)


def test_manifests_refer_to_each_other() -> None:
    pod = read_manifest("Deployment")["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert read_manifest(kind)["spec"]["selector"]["matchLabels"].items() <= labels
    service = read_manifest("Service")
    assert service["spec"]["selector"].items() <= labels
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == 8484
    assert read_manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "antiphon"
    assert set(read_manifest("Secret")["stringData"]) == SECRETS
    assert container["envFrom"] == [{"secretRef": {"name": read_manifest("Secret")["metadata"]["name"]}}]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_pod_gets_no_service_variables_and_no_rights() -> None:
    pod = read_manifest("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, USER)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    probed = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probed == {"/healthz", "/readyz"}


# systemd, Prometheus


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "antiphon.service"
    command = tmp_path / "antiphon"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    text = (DEPLOY / "systemd" / "antiphon.service").read_text()
    unit.write_text(text.replace("/opt/antiphon/bin/antiphon", str(command)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "antiphon" in line]) == (0, [])


def test_systemd_unit_reloads_and_stops_gracefully() -> None:
    unit = (DEPLOY / "systemd" / "antiphon.service").read_text()
    lines = set(unit.splitlines())
    assert {"ExecReload=/bin/kill -HUP $MAINPID", "KillMode=mixed", "ProtectSystem=strict", "DynamicUser=yes"} <= lines


def test_alerts_use_metrics_that_exist() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "guides" / "metrics.md").read_text(), re.MULTILINE))
    alerts = (DEPLOY / "prometheus" / "alerts.yaml").read_text()
    used = {name.removesuffix("_bucket") for name in re.findall(r"\b(?:antiphon|process)_\w+", alerts)}
    assert used
    assert used <= listed
    rules = yaml.safe_load(alerts)["groups"][0]["rules"]
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)


def test_proxy_hides_metrics_and_does_not_buffer() -> None:
    text = (DEPLOY / "nginx" / "proxy.conf").read_text()
    assert "proxy_buffering off;" in text
    assert "location = /metrics {\n    return 404;" in text
    assert "non_idempotent" not in text
    assert text.count("proxy_request_buffering off;") == 1
