"""Fail unless a package is ready to be released: ``release.py PACKAGE VERSION``, from the root, with dist/ made anew.

Looks at the changelog, the version, what is in the wheel and the sdist, and the metadata: an SPDX licence and bounds
on every dependency, so that an SBOM made from it is complete.
"""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from urllib.parse import urlsplit

from check_artifacts import problems as problems_inside

#: Hosts that metadata may point at; each is there.
HOSTS = {"github.com"}


def problems(folder: Path, version: str, dist: Path) -> Iterator[str]:
    """What is wrong with releasing the package in a folder under a version, from what lies in ``dist``."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    name = project["project"]["name"]
    yield from _changelog(folder / "CHANGELOG.md", version)
    source = folder / project["tool"]["hatch"]["version"]["path"]
    found = re.search(r'^__version__ = "(.+)"$', source.read_text(), flags=re.MULTILINE)
    if found is None or found[1] != version:
        yield f"{source}: __version__ is {found and found[1]!r}, and {version} is to be released"
    stem = f"{name.replace('-', '_')}-{version}"
    wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    for artifact in (wheel, sdist):
        if artifact.exists():
            yield from problems_inside(artifact)
        else:
            yield f"{artifact} is missing: run nox -s dist"
    if wheel.exists():
        yield from _metadata(_read_metadata(wheel), wheel.name, name, version)


def _changelog(path: Path, version: str) -> Iterator[str]:
    headings = re.findall(r"^## (\S+) \((.+)\)$", path.read_text(), flags=re.MULTILINE)
    dates = [date for number, date in headings if number == version]
    if not dates:
        yield f"{path}: no entry for {version}; there are {[number for number, _ in headings]}"
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", dates[0]):
        yield f"{path}: {version} has the date {dates[0]!r}: write the day of the release, as 2026-01-31"


def _metadata(metadata: Message, where: str, name: str, version: str) -> Iterator[str]:
    expected = {"Name": name, "Version": version, "License-Expression": "Apache-2.0", "License-File": "LICENSE"}
    for field, value in expected.items():
        if metadata[field] != value:
            yield f"{where}: {field} is {metadata[field]!r} and not {value!r}"
    for field in ("Summary", "Requires-Python", "Description-Content-Type"):
        if not metadata[field]:
            yield f"{where}: no {field}"
    for requirement in metadata.get_all("Requires-Dist", []):
        if not re.search(">=|==|~=", requirement.partition(";")[0]):
            yield f"{where}: {requirement!r} has no lower bound"
    for url in metadata.get_all("Project-URL", []):
        parts = urlsplit(url.partition(",")[2].strip())
        if parts.scheme != "https" or parts.hostname not in HOSTS:
            yield f"{where}: {url!r} is not under https at one of {sorted(HOSTS)}"


def _read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: release.py PACKAGE VERSION, as tp-plans 0.1.0")
    package, wanted = sys.argv[1:]
    sys.exit("\n".join(problems(Path("packages", package), wanted, Path("dist"))) or 0)
