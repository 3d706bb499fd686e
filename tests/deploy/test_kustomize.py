"""The base is the manifest as it is, and the README's overlay changes what it says, together.

`kubectl kustomize` builds both where kubectl is installed (it asks no cluster); what the overlay
names is looked up in the manifest in any case.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.test_manifests import DEPLOY, Document, check, documents, environment, pods

KUBECTL = shutil.which("kubectl")
NAMED = re.compile(r"\[(\w+)=(.*)\]")


def base() -> Document:
    return yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())


def overlay() -> Document:
    """The one in the README."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (DEPLOY / "README.md").read_text(), re.M | re.S)
    (found,) = (each for each in map(yaml.safe_load, blocks) if each["kind"] == "Kustomization")
    return found


def selected(kind: str, name: str) -> Document:
    (found,) = (
        each
        for each in documents("kubernetes.yaml")
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def at(document: Document, path: str) -> Any:
    """What a path of kustomize leads to; `[name=x]` is the one of a list with that name."""
    place: Any = document
    for step in path.split("."):
        named = NAMED.fullmatch(step)
        if named is None:
            place = place[step]
        else:
            (place,) = (each for each in place if each[named[1]] == named[2])
    return place


def paths(replacement: Document) -> Iterator[tuple[Document, str]]:
    for target in replacement["targets"]:
        for path in target["fieldPaths"]:
            yield selected(**target["select"]), path


def built(folder: Path) -> list[Document]:
    if KUBECTL is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def by_name(found: list[Document]) -> dict[tuple[str, str], Document]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_base_has_the_manifest_and_changes_nothing() -> None:
    assert base() == {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kubernetes.yaml"],
    }


def test_overlay_names_what_the_manifest_has() -> None:
    given = overlay()
    images = {
        c["image"].rpartition(":")[0]
        for d in documents("kubernetes.yaml")
        for p in pods(d)
        for c in p["containers"]
    }
    assert {each["name"] for each in given["images"]} == images
    assert all(selected("StatefulSet", each["name"]) for each in given["replicas"])
    for patch in given["patches"]:
        for change in yaml.safe_load(patch["patch"]):
            at(selected(**patch["target"]), change["path"].strip("/").replace("/", "."))
    for replacement in given["replacements"]:
        source = dict(replacement["source"])
        value = at(selected(kind=source["kind"], name=source["name"]), source["fieldPath"])
        for document, path in paths(replacement):
            assert str(at(document, path)) == str(value), f"{path} does not agree as it stands"


def test_built_base_is_the_manifest() -> None:
    assert by_name(built(DEPLOY)) == by_name(list(documents("kubernetes.yaml")))


def test_built_overlay_fits_the_schemas_and_its_counts_agree(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (mine := tmp_path / "mine").mkdir()
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(overlay()))
    found = by_name(built(mine))
    assert found.keys() == by_name(list(documents("kubernetes.yaml"))).keys()
    for document in found.values():
        check(document)
        assert document["metadata"]["namespace"] == "training"
        for pod in pods(document):
            images = {each["image"] for each in pod["containers"]}
            assert images == {"registry.example.com/paramserve:0.1.0"}
    servers = found["StatefulSet", "paramserve"]
    workers = found["Job", "paramserve-train"]
    (server,), (worker,) = next(pods(servers))["containers"], next(pods(workers))["containers"]
    assert servers["spec"]["replicas"] == 3
    assert (environment(server)["SERVERS"], environment(server)["WORKERS"]) == ("3", "4")
    assert (workers["spec"]["completions"], workers["spec"]["parallelism"]) == (4, 4)
    assert environment(worker)["WORLD_SIZE"] == "4"
