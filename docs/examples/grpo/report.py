"""What the run shows: a progress bar with a growing table, the closing figures, and a plot of the rewards."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rl_logprobs.drift.report import DriftReport


@dataclass(frozen=True)
class Step:
    """The figures of one GRPO step.

    Attributes:
        step: Counted from one.
        reward: Mean over the step's samples.
        logprob_diff_mean: Mean over tokens of the absolute difference between trainer and generator, in nats.
        logprob_diff_max: The largest of them.
        grad_norm: Mean over the step's updates, before clipping.
        tokens_per_second: Prompt and completion tokens of the step's samples, over the step's whole duration.
    """

    step: int
    reward: float
    logprob_diff_mean: float
    logprob_diff_max: float
    grad_norm: float
    tokens_per_second: float


@dataclass(frozen=True)
class Score:
    """The share of held-out questions that the policy answers exactly.

    Attributes:
        after: How many GRPO steps had been taken; -1 before the warm-up.
        sampled: From one sample for each question, drawn at temperature 1.
        greedy: From the likeliest tokens.
    """

    after: int
    sampled: float
    greedy: float


@dataclass(frozen=True)
class Reloaded:
    """How the policy fares that was read back from its saved checkpoint.

    Attributes:
        logprob_diff: Largest absolute difference to the trained policy's log-probs of the greedy answers, in nats;
            infinite if an answer differs.
        greedy: Its greedy held-out score.
    """

    logprob_diff: float
    greedy: float


COLUMNS: list[tuple[str, Callable[[Step], str]]] = [
    ("step", lambda row: f"{row.step}"),
    ("reward", lambda row: f"{row.reward:.3f}"),
    ("|Δ log-prob| mean", lambda row: f"{row.logprob_diff_mean:.1e}"),
    ("max", lambda row: f"{row.logprob_diff_max:.1e}"),
    ("grad norm", lambda row: f"{row.grad_norm:.2f}"),
    ("tokens/s", lambda row: f"{row.tokens_per_second:,.0f}"),
]


@dataclass
class Report:
    """Collects a run's figures and shows them; one rank shows, the others stay silent.

    Attributes:
        visible: Whether this rank shows anything.
        every: Steps between two rows of the table.
    """

    visible: bool
    every: int = 1
    steps: list[Step] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    reloaded: Reloaded | None = None
    drift: DriftReport | None = None

    def __post_init__(self) -> None:
        self._console = Console(quiet=not self.visible, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, markup=False)

    def progress(self, description: str, total: int) -> "Bar":
        """A progress bar, to be used as a context manager."""
        return Bar(self._console, description, total)

    def add_step(self, step: Step) -> None:
        """Record a step, and print it if its turn has come."""
        if not self.steps:
            self.say("  ".join(f"{title:>{_width(title)}}" for title, _ in COLUMNS))
        self.steps.append(step)
        if step.step == 1 or step.step % self.every == 0:
            self.say("  ".join(f"{show(step):>{_width(title)}}" for title, show in COLUMNS))

    def add_score(self, score: Score, when: str) -> None:
        """Record and print a held-out score."""
        self.scores.append(score)
        self.say(f"held-out exact match {when}: {score.sampled:.3f} sampled, {score.greedy:.3f} greedy")

    def add_drift(self, drift: DriftReport) -> None:
        """Record and print which causes move log-probs between trainer and generator."""
        self.drift = drift
        self.say(str(drift))

    def add_reload(self, reloaded: Reloaded) -> None:
        """Record and print what reloading the saved checkpoint gave."""
        self.reloaded = reloaded
        self.say(
            f"reloaded by AutoModelForCausalLM: {reloaded.greedy:.3f} greedy, "
            f"log-probs within {reloaded.logprob_diff:.1e} of the trained policy's"
        )

    def write(self, folder: Path) -> None:
        """Write ``metrics.json`` and ``reward.png``."""
        figures = {
            "steps": [asdict(step) for step in self.steps],
            "scores": [asdict(score) for score in self.scores],
            "reloaded": asdict(self.reloaded) if self.reloaded else None,
            "drift": json.loads(self.drift.to_json()) if self.drift else None,
        }
        (folder / "metrics.json").write_text(json.dumps(figures, indent=1) + "\n")
        plot_rewards(self.steps, self.scores, folder / "reward.png")


class Bar:
    """A progress bar that knows what it counts."""

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            # Where nobody watches, as in a log file, the printed lines are enough.
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task(description, total=total, note="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, note: str) -> None:
        """One more is done; ``note`` is shown behind the bar."""
        self._progress.update(self._task, advance=1, note=note)


def plot_rewards(steps: list[Step], scores: list[Score], path: Path) -> None:
    """Draw each step's mean reward and the held-out scores into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([step.step for step in steps], [step.reward for step in steps], label="training reward", alpha=0.6)
    shown = [score for score in scores if score.after >= 0]
    after = [score.after for score in shown]
    axes.plot(after, [score.sampled for score in shown], "o-", label="held-out exact match, sampled")
    axes.plot(after, [score.greedy for score in shown], "s--", label="held-out exact match, greedy")
    axes.set(xlabel="GRPO step", ylabel="share of exact answers", ylim=(0, 1), title="Order the digits")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _width(title: str) -> int:
    return max(len(title), 8)
