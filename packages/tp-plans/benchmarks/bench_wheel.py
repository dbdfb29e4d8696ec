"""The size of the package in a wheel: its files, deflated one by one."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from pathlib import Path

import tp_plans

BOUND = 100_000


def main() -> None:
    root = Path(tp_plans.__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in files:
            wheel.write(path, path.relative_to(root.parent))
    size = len(archive.getvalue()) / 1000
    print(f"\n{len(files)} files, deflated {size:.0f} kB; to hold: {BOUND // 1000} kB with metadata")
    parts: Counter[str] = Counter()
    for info in zipfile.ZipFile(archive).infolist():
        inside = Path(info.filename).parts[1:]
        parts[inside[0] if len(inside) > 1 else "(top)"] += info.compress_size
    for part, size in parts.most_common():
        print(f"  {part:16} {size / 1000:6.1f} kB")


if __name__ == "__main__":
    main()
