"""Unpack the oldest release of a package that another still supports: ``oldest_release.py PACKAGE DEPENDENT FOLDER``.

Releases are git tags, ``tp-plans-v0.1.0``.  Prints the folder of the package; where nothing has been released within
the bounds, that is the one in this tree, and a note on stderr says so.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def bounds(package: str, dependent: str, root: Path = Path()) -> Requirement | None:
    """What the dependent asks for of the package, if anything."""
    project = tomllib.loads((root / "packages" / dependent / "pyproject.toml").read_text())["project"]
    return next((r for r in map(Requirement, project["dependencies"]) if r.name == package), None)


def oldest(package: str, wanted: Requirement | None, root: Path = Path()) -> str | None:
    """The tag of the oldest release within the bounds; of any release where there are none."""
    listed = subprocess.run(
        ["git", "tag", "--list", f"{package}-v*"], cwd=root, capture_output=True, text=True, check=True
    )
    tags = {Version(tag.removeprefix(f"{package}-v")): tag for tag in listed.stdout.split()}
    within = [version for version in tags if wanted is None or wanted.specifier.contains(version)]
    return tags[min(within)] if within else None


def main(package: str, dependent: str, folder: Path) -> Path:
    """Where the oldest supported release of the package lies, unpacked if it is not this tree."""
    tag = oldest(package, bounds(package, dependent))
    if tag is None:
        print(f"no release of {package} that {dependent} supports: testing with this tree", file=sys.stderr)
        return Path("packages", package)
    archive = subprocess.run(["git", "archive", tag, f"packages/{package}"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "packages" / package


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
