"""Draw what verl's file logger wrote: ``python draw.py OUT.svg LOG.jsonl ...``, one line a log."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PANELS = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "rollout and engine differ by": "training/rollout_probs_diff_max",
}


def read(path: Path) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    return [json.loads(line)["data"] for line in path.read_text().splitlines()]


def draw(logs: list[Path], out: Path) -> None:
    """Write one picture with a panel for each metric."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, (title, metric) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for index, log in enumerate(logs):
            values = [step[metric] for step in read(log) if metric in step]
            axes.plot(range(1, len(values) + 1), values, "-" if index == 0 else "--", label=log.stem)
        axes.set(title=title, xlabel="update")
        if "differ" in title:
            axes.set_yscale("log")
    figure.axes[0].legend()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    draw([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
