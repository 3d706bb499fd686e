"""The manifests fit the schemas, agree with themselves, and speak our command line.

The schemas come from files, so no cluster is needed. What a schema cannot say (that counts agree,
that mounted names exist, that the shell script hands over options that exist) is said here.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource
from tests.suites import each_case

import paramserve
from deploy import certificates
from paramserve.cli import cli

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.37.0-local-strict"
KUBERAY = Path(__file__).with_name("kuberay.schema.json")
MANIFESTS = ["kubernetes.yaml", "kuberay.yaml"]
FREE = {"labels", "matchLabels", "selector", "data", "requests", "limits", "rayStartParams"}
"""Maps whose keys are ours to choose."""
PROGRAM = Path(sys.executable).with_name("paramserve")
READ = {
    "RANK",
    "WORLD_SIZE",
    "PARAMSERVE_ADDRESS",
    "PARAMSERVE_TOKEN_FILE",
    "PARAMSERVE_TLS_CERTIFICATE",
    "PARAMSERVE_TLS_KEY",
    "PARAMSERVE_TLS_AUTHORITY",
}
"""What `ps.from_environment` reads."""

Document = dict[str, Any]


@cache
def documents(name: str) -> tuple[Document, ...]:
    return tuple(yaml.safe_load_all((DEPLOY / name).read_text()))


def one(manifest: str, kind: str) -> Document:
    (found,) = (document for document in documents(manifest) if document["kind"] == kind)
    return found


@cache
def validator(kind: str, api_version: str) -> Draft202012Validator:
    """Kubernetes' own schema without room for unknown fields, or the one of KubeRay's kinds."""
    definitions = Resource.from_contents(json.loads((SCHEMAS / "_definitions.json").read_text()))
    if api_version.startswith("ray.io/"):
        schema = json.loads(KUBERAY.read_text())
    else:
        group = api_version.replace("/", "-")
        schema = json.loads((SCHEMAS / f"{kind.lower()}-{group}.json").read_text())
    return Draft202012Validator(schema, registry=definitions @ Registry())


def check(document: Document) -> None:
    validator(document["kind"], document["apiVersion"]).validate(document)


def keys(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys whose names a schema decides."""
    if isinstance(node, dict):
        for key, below in node.items():
            yield (*path, key)
            if key not in FREE or (key == "selector" and "matchLabels" in below):
                yield from keys(below, (*path, key))
    elif isinstance(node, list):
        for index, below in enumerate(node):
            yield from keys(below, (*path, index))


def misspelt(document: Document, path: tuple[Any, ...]) -> Document:
    """A copy in which the key at `path` has one letter too many."""
    changed = copy.deepcopy(document)
    *above, key = path
    place: Any = changed
    for step in above:
        place = place[step]
    place[f"{key}x"] = place.pop(key)
    return changed


def pods(document: Document) -> Iterator[Document]:
    """The specs of all pods that a document leads to."""
    if document["kind"] == "RayJob":
        cluster = document["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]
    elif document["kind"] in {"StatefulSet", "Job"}:
        yield document["spec"]["template"]["spec"]


def container_of(kind: str) -> Document:
    """The one of a kind's pod in kubernetes.yaml."""
    (pod,) = pods(one("kubernetes.yaml", kind))
    (found,) = pod["containers"]
    return found


def all_pods() -> list[Any]:
    return [
        pytest.param(pod, id=pod["containers"][0]["name"])
        for manifest in MANIFESTS
        for document in documents(manifest)
        for pod in pods(document)
    ]


def environment(container: Document) -> dict[str, str]:
    """Plain values, and "field:<path>" for what Kubernetes fills in."""
    return {
        entry["name"]: entry["value"]
        if "value" in entry
        else f"field:{entry['valueFrom']['fieldRef']['fieldPath']}"
        for entry in container["env"]
    }


@each_case("manifest", MANIFESTS)
def test_manifest_every_document_fits_its_schema(manifest: str) -> None:
    assert documents(manifest)
    for document in documents(manifest):
        check(document)


@each_case("manifest", MANIFESTS)
def test_manifest_any_misspelt_key_is_refused(manifest: str) -> None:
    """The checker checks: one letter more in any key that a schema decides must fail."""
    passed = []
    for document in documents(manifest):
        for path in keys(document):
            if path in {("apiVersion",), ("kind",)}:
                continue  # these choose the schema
            try:
                check(misspelt(document, path))
            except ValidationError:
                continue
            passed.append((document["kind"], path))
    assert not passed


@each_case("pod", all_pods())
def test_pod_runs_without_privileges(pod: Document) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["limits"]["memory"]


@each_case("pod", all_pods())
def test_pod_mounts_only_volumes_that_it_has(pod: Document) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@each_case("kind", ["StatefulSet", "Job"])
def test_kubernetes_root_file_system_is_read_only_and_kernels_are_cached(kind: str) -> None:
    container = container_of(kind)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    cache_folder = environment(container)["NUMBA_CACHE_DIR"]
    writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert any(cache_folder.startswith(f"{folder}/") for folder in writable)


def test_kubernetes_secrets_are_named_and_not_held() -> None:
    held = {document["kind"] for manifest in MANIFESTS for document in documents(manifest)}
    assert "Secret" not in held
    readme = (DEPLOY / "README.md").read_text()
    for kind in ("StatefulSet", "Job"):
        (pod,) = pods(one("kubernetes.yaml", kind))
        (credentials,) = (v for v in pod["volumes"] if v["name"] == "credentials")
        assert credentials["projected"]["defaultMode"] == 0o440
        for source in credentials["projected"]["sources"]:
            assert f"create secret generic {source['secret']['name']}" in readme


def test_kubernetes_counts_agree() -> None:
    servers, workers = one("kubernetes.yaml", "StatefulSet"), one("kubernetes.yaml", "Job")
    server, worker = container_of("StatefulSet"), container_of("Job")
    assert environment(server)["SERVERS"] == str(servers["spec"]["replicas"])
    ranks = environment(server)["WORKERS"]
    assert environment(worker)["WORLD_SIZE"] == ranks
    assert str(workers["spec"]["completions"]) == ranks
    assert str(workers["spec"]["parallelism"]) == ranks


def test_kubernetes_worker_environment_is_all_that_is_read() -> None:
    job = one("kubernetes.yaml", "Job")
    assert job["spec"]["completionMode"] == "Indexed"
    found = environment(container_of("Job"))
    assert found.keys() >= READ
    assert not {name for name in found.keys() - READ if name.startswith("PARAMSERVE")}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["RANK"] == f"field:{index}"


def test_kubernetes_files_named_are_files_mounted() -> None:
    for kind in ("StatefulSet", "Job"):
        (pod,) = pods(one("kubernetes.yaml", kind))
        (container,) = pod["containers"]
        (credentials,) = (v for v in pod["volumes"] if v["name"] == "credentials")
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "credentials")
        mounted = {
            f"{mount['mountPath']}/{item['path']}"
            for source in credentials["projected"]["sources"]
            for item in source["secret"]["items"]
        }
        text = " ".join([*container.get("args", []), *environment(container).values()])
        named = {word for word in text.split() if word.startswith(mount["mountPath"])}
        assert named == mounted


def test_kubernetes_service_names_the_servers_and_their_port() -> None:
    service, servers = one("kubernetes.yaml", "Service"), one("kubernetes.yaml", "StatefulSet")
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    assert servers["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
    assert servers["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    server, worker = container_of("StatefulSet"), container_of("Job")
    (port,), (named,) = server["ports"], service["spec"]["ports"]
    assert named["targetPort"] == port["name"]
    assert named["port"] == port["containerPort"]
    first = f"{servers['metadata']['name']}-0.{service['metadata']['name']}:{named['port']}"
    assert environment(worker)["PARAMSERVE_ADDRESS"] == first
    assert f"--join {first}" in server["args"][0]
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["tcpSocket"]["port"] == port["name"]


def handed_over(folder: Path, pod_name: str, *, probe: bool = False) -> list[str]:
    """Run the servers' shell script, or their liveness probe's, with a `paramserve` that writes
    down what it is given."""
    stand_in = folder / "paramserve"
    stand_in.write_text('#!/bin/sh\nfor given in "$@"; do printf "%s\\0" "$given"; done\n')
    stand_in.chmod(0o700)
    server = container_of("StatefulSet")
    filled = environment(server)
    assert filled["POD_NAME"] == "field:metadata.name"
    started = [*server["command"], *server["args"]]
    output = subprocess.run(
        server["livenessProbe"]["exec"]["command"] if probe else started,
        env={**filled, "POD_NAME": pod_name, "PATH": f"{folder}:{os.defpath}"},
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    return output.decode().split("\0")[:-1]


def parsed_server(folder: Path, command: str, options: list[str]) -> dict[str, Any]:
    """What our own parser makes of a command, with types and choices; it is not called."""
    for name in ("token", "cert.pem", "key.pem", "ca.pem"):
        (folder / name).touch(mode=0o600)
    assert command in cli.commands, f"no command {command!r}: {sorted(cli.commands)}"
    here = [each.replace("/etc/paramserve", str(folder)) for each in options]
    return cli.commands[command].make_context(command, here).params


@each_case("pod_name", ["paramserve-0", "paramserve-1"])
def test_kubernetes_server_command_parses(tmp_path: Path, pod_name: str) -> None:
    command, *options = handed_over(tmp_path, pod_name)
    parsed = parsed_server(tmp_path, command, options)
    assert parsed["bind"] == "0.0.0.0:5555"
    assert parsed["advertise"] == f"{pod_name}.paramserve"
    if pod_name == "paramserve-0":
        assert (parsed["servers"], parsed["workers"]) == (2, 2)
        assert not parsed["join"]
    else:
        assert parsed["join"] == "paramserve-0.paramserve:5555"


def test_kubernetes_liveness_probe_asks_the_pods_own_server(tmp_path: Path) -> None:
    command, *options = handed_over(tmp_path, "paramserve-1", probe=True)
    parsed = parsed_server(tmp_path, command, options)
    assert (parsed["address"], parsed["probe"]) == ("paramserve-1.paramserve:5555", True)


def test_kubernetes_server_command_with_a_typo_is_refused(tmp_path: Path) -> None:
    command, *options = handed_over(tmp_path, "paramserve-0")
    options[options.index("--servers")] = "--serverz"
    with pytest.raises(click.UsageError, match="--serverz"):
        parsed_server(tmp_path, command, options)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kubernetes_commands_train_over_loopback_with_tls(tmp_path: Path) -> None:
    """What the pods run, run here: only hosts, ports and the folder of the secrets are others."""
    secrets = tmp_path / "secrets"
    certificates.make_certificates(secrets)
    made = CliRunner().invoke(cli, ["token", str(secrets / "token")])
    assert made.exit_code == 0, made.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    here = {"/etc/paramserve": str(secrets), "paramserve-0.paramserve:5555": f"localhost:{port}"}
    binds = {"paramserve-0": f"127.0.0.1:{port}", "paramserve-1": "127.0.0.1:0"}
    servers = []
    for pod_name, bind in binds.items():
        (folder := tmp_path / pod_name).mkdir()
        options = [replaced(each, here) for each in handed_over(folder, pod_name)]
        options[options.index("--bind") + 1] = bind
        options[options.index("--advertise") + 1] = "localhost"
        servers.append(started([str(PROGRAM), *options], dict(os.environ)))
    worker = container_of("Job")
    script = tmp_path / "train.py"
    script.write_text(one("kubernetes.yaml", "ConfigMap")["data"]["train.py"])
    given = {name: replaced(value, here) for name, value in environment(worker).items()}
    del given["NUMBA_CACHE_DIR"]  # this root file system is writable
    command = [sys.executable, str(script)]
    workers = [started(command, {**os.environ, **given, "RANK": str(rank)}) for rank in (0, 1)]
    try:
        told = [one_of.communicate(timeout=240)[0] for one_of in workers]
    finally:
        for process in (*workers, *servers):
            process.terminate()
        ends = [process.communicate(timeout=30)[0] for process in servers]
    assert [process.returncode for process in workers] == [0, 0], (told, ends)
    for rank, text in enumerate(told):
        loss = re.search(rf"^worker {rank} of 2: loss (\S+)$", text, re.MULTILINE)
        assert loss is not None, text
        assert float(loss[1]) < 1e-3
    assert [process.returncode for process in servers] == [0, 0], ends


def replaced(text: str, by: dict[str, str]) -> str:
    for old, new in by.items():
        text = text.replace(old, new)
    return text


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_readme_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (DEPLOY / "README.md").read_text().splitlines()
    begins = ("paramserve ", "python ")
    told = [shlex.split(line, comments=True) for line in lines if line.startswith(begins)]
    (program, command, *options), (_, script, *hosts) = told
    assert (program, command, script) == ("paramserve", "token", "deploy/certificates.py")
    cli.commands[command].make_context(command, options)
    servers = one("kubernetes.yaml", "StatefulSet")["spec"]["replicas"]
    names = [f"paramserve-{index}.paramserve" for index in range(servers)]
    assert certificates.parser().parse_args(hosts).hosts == names


@each_case(
    ("manifest", "uses"),
    [
        ("kubernetes.yaml", {"from_environment"}),
        ("kuberay.yaml", {"Async", "OnRay", "Worker", "run"}),
    ],
)
def test_script_uses_names_that_exist(manifest: str, uses: set[str]) -> None:
    """The scripts are Python, and every `ps.<name>` in them is public."""
    tree = ast.parse(one(manifest, "ConfigMap")["data"]["train.py"])
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "ps"
    }
    assert found == uses
    assert found <= set(paramserve.__all__)


@each_case(
    ("manifest", "kind", "command"),
    [("kubernetes.yaml", "Job", "command"), ("kuberay.yaml", "RayJob", "entrypoint")],
)
def test_script_is_mounted_where_it_is_started(manifest: str, kind: str, command: str) -> None:
    document, script = one(manifest, kind), one(manifest, "ConfigMap")
    pod = next(pods(document))
    (volume,) = (v for v in pod["volumes"] if v["name"] == "script")
    (container,) = pod["containers"]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "script")
    assert volume["configMap"]["name"] == script["metadata"]["name"]
    given = container[command] if kind == "Job" else document["spec"][command].split()
    assert given == ["python", f"{mount['mountPath']}/{next(iter(script['data']))}"]
