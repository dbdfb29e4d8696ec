"""Make a page of the documentation from each package's README and CHANGELOG.

``nox -s compatibility`` writes the table of versions from test runs; until then a placeholder page stands for it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGES = ("tp-plans", "fsdp-runtime", "rl-logprobs")
NO_RUNS = "# Compatibility\n\n`nox -s compatibility` writes this page from reports of test runs; none are here yet.\n"
TO_SIBLING = re.compile(r"\]\(\.\./([a-z-]+)\)")
TO_DOCS = "](../../docs/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add ``packages/NAME.md`` and ``packages/NAME-changes.md``; rewrite links to other READMEs and to docs/."""
    if files.get_file_from_path("compatibility.md") is None:
        files.append(File.generated(config, "compatibility.md", content=NO_RUNS))
    for name in PACKAGES:
        folder = Path(config.config_file_path).parent / "packages" / name
        for source, page in (("README.md", f"{name}.md"), ("CHANGELOG.md", f"{name}-changes.md")):
            text = TO_SIBLING.sub(r"](\1.md)", (folder / source).read_text()).replace(TO_DOCS, "](../")
            files.append(File.generated(config, f"packages/{page}", content=text))
    return files
