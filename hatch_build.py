"""The project's links on the package index: of the repository whose workflow builds the release. Other builds have none."""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Links(MetadataHookInterface):  # type: ignore[misc]
    """Fills in `urls`. hatchling calls it for each build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the links from the variables that GitHub gives each step of a workflow."""
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        if not (server and repository):
            return
        source = f"{server}/{repository}"
        metadata["urls"] = {
            "Source": source,
            "Documentation": f"{source}/tree/main/docs",
            "Changelog": f"{source}/blob/main/CHANGELOG.md",
            "Issues": f"{source}/issues",
        }
