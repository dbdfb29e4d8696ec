"""The same GRPO run under truncated sampling, scored over the vocabulary and over kept sets; draws both curves.

One process and a table for a policy, so that a run takes seconds: token ``t`` depends on its position and on token
``t - 1``. The reward is the share of tokens that equal a hidden sequence. The generator samples with top-p, and its
log-probs are those of the old policy in the ratio that PPO clips, as in asynchronous training.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import torch

import rl_logprobs

VOCABULARY, LENGTH, PROMPTS, GROUP, UPDATES = 16, 16, 8, 8, 2
SAMPLING = rl_logprobs.SamplingFilter(top_p=0.5, top_k=VOCABULARY - 1)


class Figures(NamedTuple):
    """A step's mean reward, entropy in nats, and mean ratio of trainer and generator before the update."""

    reward: float
    entropy: float
    ratio: float


class Rollout(NamedTuple):
    """Token ids ``[samples, length + 1]``, log-probs and kept ids of all but the first."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    kept_tokens: rl_logprobs.KeptTokens


@torch.no_grad()
def generate(policy: torch.Tensor, seed: int) -> Rollout:
    """Sample every response, with what an engine returns."""
    samples = PROMPTS * GROUP
    tokens, logprobs = torch.zeros(samples, 1, dtype=torch.int64), []
    rows: list[list[list[int]]] = [[] for _ in range(samples)]
    for position in range(LENGTH):
        logits = policy[position][tokens[:, -1]]
        kept_tokens = rl_logprobs.sampling_mask(logits, SAMPLING)
        drawn = rl_logprobs.sample_tokens(logits, seed=seed * LENGTH + position, sampling=SAMPLING)
        logprobs.append(rl_logprobs.token_logprobs(logits, drawn, kept_tokens=kept_tokens))
        for row, ids in zip(rows, kept_tokens.ids.split(kept_tokens.offsets.diff().tolist()), strict=True):
            row.append(ids.tolist())
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    kept_tokens = rl_logprobs.KeptTokens.from_completions(rows, [0] * samples, LENGTH)
    return Rollout(tokens, torch.stack(logprobs, 1), kept_tokens)


def run(kept_sets: bool, steps: int, lr: float, seed: int) -> list[Figures]:
    """Train, and return the figures of every step."""
    generator = torch.Generator().manual_seed(seed)
    policy = (0.5 * torch.randn(LENGTH, VOCABULARY, VOCABULARY, generator=generator)).requires_grad_()
    hidden = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
    optimizer = torch.optim.Adam([policy], lr=lr)
    prompts, positions = torch.arange(PROMPTS).repeat_interleave(GROUP), torch.arange(LENGTH)
    figures = []
    for step in range(steps):
        rollout = generate(policy, seed * steps + step)
        mask = torch.ones_like(rollout.logprobs)
        targets = rollout.tokens[:, 1:]
        rewards = (targets == hidden).float().mean(1)
        advantages = rl_logprobs.group_advantages(rewards, prompts, PROMPTS)
        for update in range(UPDATES):
            logits = policy[positions, rollout.tokens[:, :-1]]
            kept_tokens = rollout.kept_tokens if kept_sets else None
            found = rl_logprobs.token_statistics(logits, targets, kept_tokens=kept_tokens)
            if update == 0:
                metrics = rl_logprobs.ratio_metrics(found.logprobs.detach(), rollout.logprobs, mask).values()
                entropy = rl_logprobs.token_statistics(logits.detach(), targets, entropy=True).entropy
            loss = rl_logprobs.ppo_loss(found.logprobs, rollout.logprobs, advantages[:, None], mask).loss
            optimizer.zero_grad()
            rl_logprobs.global_mean(loss, mask).backward()
            optimizer.step()
        figures.append(Figures(rewards.mean().item(), entropy.mean().item(), metrics["ratio_mean"].item()))
    return figures


def curve(values: list[float], top: float, left: float, colour: str) -> str:
    """A line of one panel, 300 by 160, as SVG."""
    step = 300 / max(1, len(values) - 1)
    points = " ".join(f"{left + i * step:.1f},{190 - 160 * value / top:.1f}" for i, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def draw(runs: dict[bool, list[list[Figures]]], path: Path) -> None:
    """Write rewards and entropies of all runs as SVG."""
    colours = {False: "#c0392b", True: "#2471a3"}
    highest = max(figures.entropy for group in runs.values() for found in group for figures in found)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 250" font-family="sans-serif" font-size="12">']
    for left, name, top in ((40, "reward", 1.0), (400, "entropy", highest)):
        parts.append(f'<text x="{left}" y="20">{name} (0 to {top:.2g})</text>')
        parts.append(f'<rect x="{left}" y="30" width="300" height="160" fill="none" stroke="#999"/>')
        parts.append(f'<text x="{left + 300}" y="205" text-anchor="end">step</text>')
        parts += [
            curve([getattr(figures, name) for figures in found], top, left, colours[kept_sets])
            for kept_sets, group in runs.items()
            for found in group
        ]
    for row, (kept_sets, text) in enumerate(((True, "over kept sets"), (False, "over the vocabulary"))):
        parts.append(f'<rect x="40" y="{215 + 16 * row}" width="18" height="3" fill="{colours[kept_sets]}"/>')
        parts.append(f'<text x="64" y="{220 + 16 * row}">log-probs {text}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main() -> None:
    """Run both ways with several seeds, print the last steps and draw all of them."""
    parser = ArgumentParser(description="GRPO under truncated sampling, with and without kept sets.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("truncated-sampling.svg"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[bool, list[list[Figures]]] = {False: [], True: []}
    for seed in range(options.seeds):
        for kept_sets, group in runs.items():
            group.append(run(kept_sets, options.steps, options.lr, seed))
            first, last = group[-1][0], group[-1][-1]
            print(
                f"seed {seed}, {'kept sets' if kept_sets else 'vocabulary'}: reward {first.reward:.2f} to "
                f"{last.reward:.2f}, entropy {first.entropy:.2f} to {last.entropy:.2f}, first ratio {first.ratio:.2f}",
                flush=True,
            )
    draw(runs, options.output)


if __name__ == "__main__":
    main()
