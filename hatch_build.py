"""The project's URLs in the metadata of the package, all of them from one constant."""

from __future__ import annotations

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Address of the public repository, without a slash at its end. The owner fills it in before the
# first release; until then the metadata has no URLs. The pages are read there as Markdown.
REPOSITORY = ""
# Pages by the name that package indexes show.
PAGES = {
    "Documentation": "/blob/main/docs/index.md",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Source": "",
    "Issues": "/issues",
}


class ProjectUrls(MetadataHookInterface):
    """Fills in the dynamic field `urls` of pyproject.toml."""

    def update(self, metadata: dict) -> None:
        """Adds `urls` to the metadata."""
        metadata["urls"] = {name: REPOSITORY + page for name, page in PAGES.items() if REPOSITORY}
