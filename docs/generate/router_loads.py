"""Run the GRPO example on a mixture with and without RouterBalance, and draw its loads as docs/guides/router-loads.svg.

    python docs/generate/router_loads.py      # one process on a CPU, some minutes

Two runs of the example (warm-up, then 25 steps of 2 updates) on a GLM-4.5 mixture of two layers, 16 experts and 2 for
each token.  Loads are counted in every update.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "examples" / "grpo"))

import checkpoint  # noqa: E402
import train  # noqa: E402
import trainer  # noqa: E402
from settings import parse_settings  # noqa: E402
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM  # noqa: E402
from warmup import warm_up  # noqa: E402

from fsdp_runtime.steps import RouterBalance, load_table  # noqa: E402
from fsdp_runtime.steps.routing.routes import Routes  # noqa: E402

WIDTH, LEFT, TOP, BOTTOM = 720, 56, 28, 226
COLORS = {"without": "#c2410c", "with": "#1d4ed8"}
#: Updates at the end of a run with their mean loads drawn by expert.
LAST = 10
#: Rows of a table by layer and update.
Tables = list[list[dict[str, Any]]]


class Counting(trainer.Trainer):
    """The example's trainer, which counts the loads of its updates and may move the biases."""

    rate = 0.0

    def reset_optimizer(self) -> None:
        """Build the optimizer with the hook of a fresh balance."""
        super().reset_optimizer()
        self.balance = RouterBalance(self.model, rate=self.rate)
        self.tables: list[list[dict[str, Any]]] = []
        self.optimizer.register_step_pre_hook(self.balance.step)
        self.optimizer.register_step_post_hook(lambda *_: self.tables.append(load_table(self.balance.loads)))

    def logprobs(self, batch: Any, temperature: float = 1.0) -> torch.Tensor:
        """Count the generator's routes, or the routes of a supervised step."""
        if not torch.is_grad_enabled():
            return super().logprobs(batch, temperature)
        if batch.routes is None:
            with self.balance.counting():
                return super().logprobs(batch, temperature)
        paths = self.balance._routers
        self.balance.count(Routes(dict(zip(paths, batch.routes, strict=True))))
        return super().logprobs(batch, temperature)


def write_mixture(folder: Path) -> None:
    """Write a GLM-4.5 mixture of random weights and the example's tokenizer."""
    tokenizer = checkpoint.byte_tokenizer()
    small = checkpoint.small_config(tokenizer).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range")
    names += ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    config = Glm4MoeConfig(
        **{name: small[name] for name in names},
        n_routed_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        first_k_dense_replace=0,
    )
    torch.manual_seed(0)
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def loads_of_a_run(folder: Path, rate: float) -> tuple[Tables, float]:
    """Train, and return the tables of all updates and the mean reward of the last steps."""
    Counting.rate, train.Trainer = rate, Counting
    options = ["--model", str(folder / "mixture"), "--output", str(folder / str(rate)), "--tp", "1", "--held-out", "64"]
    run = train.set_up(parse_settings([*options, "--device", "cpu", "--score-every", "100"]))
    warm_up(run)
    train.optimise(run)
    return run.trainer.tables, sum(step.reward for step in run.report.steps[-5:]) / 5


def line(values: list[float], color: str, low: float) -> str:
    """Return a polyline of values from ``low`` to 1."""
    across, down = (WIDTH - LEFT - 20) / (len(values) - 1), (BOTTOM - TOP) / (1 - low)
    points = " ".join(f"{LEFT + across * x:.1f},{TOP + down * (1 - y):.1f}" for x, y in enumerate(values))
    return f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>'


def chart(runs: dict[str, Tables]) -> Iterator[str]:
    """Yield the entropy by update, a line for each layer and run."""
    low = min(row["entropy"] for run in runs.values() for layer in run for row in layer) // 0.1 / 10
    for tick in (low, (1 + low) / 2, 1.0):
        y = TOP + (BOTTOM - TOP) * (1 - tick) / (1 - low)
        yield f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d4d4d4"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.2f}</text>'
    for place, (name, run) in enumerate(runs.items()):
        yield from (line([row["entropy"] for row in layer], COLORS[name], low) for layer in run)
        yield f'<text x="{LEFT + 190 * place}" y="16" fill="{COLORS[name]}">{name} RouterBalance</text>'
    updates = len(next(iter(runs.values()))[0])
    yield f'<text x="{LEFT}" y="{BOTTOM + 20}">entropy of the load, by update (1 to {updates}) and layer</text>'


def heat(runs: dict[str, Tables]) -> Iterator[str]:
    """Yield the mean loads of the last updates, relative to equal loads: a cell for each layer and expert."""
    y = BOTTOM + 40
    for name, run in runs.items():
        for layer, rows in enumerate(run):
            loads = torch.tensor([row["loads"] for row in rows[-LAST:]], dtype=torch.float64).sum(0)
            cell = (WIDTH - LEFT - 20) / len(loads)
            yield f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end" fill="{COLORS[name]}">{layer}</text>'
            for expert, load in enumerate((loads / loads.mean()).tolist()):
                x, opacity = LEFT + cell * expert, min(load / 3, 1)
                box = f'x="{x:.1f}" y="{y}" width="{cell - 2:.1f}" height="22"'
                yield f'<rect {box} fill="{COLORS[name]}" fill-opacity="{opacity:.2f}" stroke="#d4d4d4"/>'
                yield f'<text x="{x + cell / 2 - 1:.1f}" y="{y + 15}" text-anchor="middle">{load:.1f}</text>'
            y += 26
        y += 8
    yield f'<text x="{LEFT}" y="{y + 8}">load over the mean, by layer and expert, in the last {LAST} updates</text>'


def picture(runs: dict[str, Tables]) -> Iterator[str]:
    """Yield the lines of an SVG."""
    height = BOTTOM + 64 + sum(26 * len(run) + 8 for run in runs.values())
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    yield f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    yield from chart(runs)
    yield from heat(runs)
    yield "</svg>"


def main() -> None:
    """Run both, print a table and write the picture."""
    runs: dict[str, Tables] = {}
    with tempfile.TemporaryDirectory() as name:
        write_mixture(Path(name) / "mixture")
        for label, rate in (("without", 0.0), ("with", 1e-2)):
            tables, reward = loads_of_a_run(Path(name), rate)
            runs[label] = [list(rows) for rows in zip(*tables, strict=True)]
            for layer, rows in enumerate(runs[label]):
                first, last = rows[0], rows[-1]
                print(label, layer, len(rows), *(f"{first[k]:.3f} {last[k]:.3f}" for k in ("entropy", "most", "least")))
            print(label, f"reward {reward:.3f}")
    target = ROOT / "docs" / "guides" / "router-loads.svg"
    target.write_text("\n".join(picture(runs)) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
