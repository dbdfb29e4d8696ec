"""Fail unless each wheel and sdist given holds its package, types marker and licence, and nothing else.

``check_artifacts.py dist/*``
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path


def problems(artifact: Path) -> list[str]:
    """What is missing from one wheel or sdist, and what should not be there."""
    name, version = re.match(r"(\w+)-([\w.]+?)(-py3|\.tar\.gz)", artifact.name).group(1, 2)
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as archive:
            members = archive.namelist()
        info = f"{name}-{version}.dist-info"
        required = {f"{name}/py.typed", f"{info}/licenses/LICENSE"}
        allowed = (f"{name}/", f"{info}/")
    else:
        with tarfile.open(artifact) as archive:
            members = archive.getnames()
        root = f"{name}-{version}"
        files = {f"{root}/{file}" for file in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml")}
        required = files | {f"{root}/src/{name}/py.typed"}
        allowed = (f"{root}/src/{name}/", f"{root}/PKG-INFO", f"{root}/.gitignore", *files)
    missing = [f"{artifact.name}: no {file}" for file in sorted(required - set(members))]
    surplus = [f"{artifact.name}: unexpected {file}" for file in members if not file.startswith(allowed)]
    return missing + surplus


if __name__ == "__main__":
    found = [problem for argument in sys.argv[1:] for problem in problems(Path(argument))]
    sys.exit("\n".join(found) or 0)
