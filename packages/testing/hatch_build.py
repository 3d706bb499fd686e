"""What the metadata takes from paramserve's: its version, the only one that this goes with, and the
Pythons. They stand in one file, the pyproject.toml of the repository. A source distribution lacks
that file: there hatchling reads them from PKG-INFO.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class OfParamserve(MetadataHookInterface):
    """Fills the dynamic fields of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        file = Path(self.root).parents[1] / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        for field in ("version", "requires-python", "classifiers"):
            metadata[field] = project[field]
        metadata["dependencies"] = [f"paramserve=={project['version']}", "greenlet>=3.1"]
