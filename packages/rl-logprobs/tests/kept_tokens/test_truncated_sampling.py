"""Truncated sampling: equal policies have ratio 1 over kept sets, and the kept mass without."""

import pytest
import torch

from rl_logprobs import (
    KeptTokens,
    SamplingFilter,
    importance_weights,
    next_token_targets,
    ratio_metrics,
    sample_tokens,
    sampling_mask,
    token_logprobs,
)

VOCAB, BATCH, LENGTH = 64, 24, 17
#: Sampling, kept mass and mean ratio without the kept sets, of Qwen2.5-1.5B-Instruct in huggingface/trl#7269.
PUBLISHED = [(SamplingFilter(top_p=0.8, top_k=60), 0.895, 0.896), (SamplingFilter(top_k=20), 0.965, 0.965)]


class TinyModel:
    """Next-token logits that depend on the last two tokens, scaled until a sampler keeps a given mass."""

    def __init__(self, sampling, mass):
        generator = torch.Generator().manual_seed(0)
        self.tables = torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        self.scale, low, high = 1.0, 0.05, 6.0
        contexts = torch.randint(0, VOCAB, (32, 16), generator=generator)
        for _ in range(16):
            self.scale = (low + high) / 2
            low, high = (self.scale, high) if self.kept_mass(contexts, sampling) < mass else (low, self.scale)

    def __call__(self, tokens):
        previous = torch.nn.functional.pad(tokens, (1, 0))[:, :-1]
        return self.scale * (self.tables[0][tokens] + 0.5 * self.tables[1][previous])

    def kept_mass(self, tokens, sampling):
        logits = self(tokens)
        kept_tokens = sampling_mask(logits, sampling)
        return logits.softmax(-1).flatten(0, 1)[kept_tokens.rows(), kept_tokens.ids].sum() / tokens.numel()

    def generate(self, sampling):
        """Token ids, and what an engine returns for each completion: log-probabilities and kept ids."""
        tokens = torch.zeros(BATCH, 1, dtype=torch.int64)
        logprobs, rows = [], [[] for _ in range(BATCH)]
        for step in range(LENGTH - 1):
            logits = self(tokens)[:, -1]
            drawn = sample_tokens(logits, seed=step, sampling=sampling)
            logprobs.append(token_logprobs(logits, drawn, sampling=sampling))
            kept = sampling_mask(logits, sampling)
            for row, (start, end) in zip(rows, kept.offsets.unfold(0, 2, 1).tolist(), strict=True):
                row.append(kept.ids[start:end].tolist())
            tokens = torch.cat([tokens, drawn[:, None]], 1)
        return tokens, torch.stack(logprobs, 1), rows


@pytest.mark.parametrize(("sampling", "kept_mass", "published_ratio"), PUBLISHED, ids=["top_p=0.8", "top_k=20"])
def test_the_published_bias_is_the_kept_mass_and_kept_sets_remove_it(sampling, kept_mass, published_ratio):
    model = TinyModel(sampling, kept_mass)
    tokens, generated, rows = model.generate(sampling)
    mask = torch.ones_like(generated)
    targets = next_token_targets(tokens)

    full = token_logprobs(model(tokens), targets)[:, :-1]
    biased = ratio_metrics(full, generated, mask).values()
    found_mass = model.kept_mass(tokens[:, :-1], sampling)
    torch.testing.assert_close(biased["ratio_mean"], found_mass, rtol=1e-12, atol=0)  # the ratio *is* the mass
    assert biased["ratio_mean"].item() == pytest.approx(published_ratio, abs=0.02)
    assert importance_weights(full, generated, mask).mean() < 0.98

    kept_tokens = KeptTokens.from_completions(rows, starts=[1] * BATCH, length=LENGTH)
    replayed = token_logprobs(model(tokens), tokens, shift=True, kept_tokens=kept_tokens)[:, :-1]
    cured = ratio_metrics(replayed, generated, mask).values()
    for name, exact in (("ratio_min", 1), ("ratio_max", 1), ("ess", 1), ("chi2", 0), ("kl_k1", 0)):
        assert cured[name].item() == pytest.approx(exact, abs=1e-12), name


def test_kept_tokens_keep_boundary_tokens_that_a_recomputed_filter_loses():
    sampling = SamplingFilter(top_p=0.8)
    model = TinyModel(sampling, 0.895)
    tokens, _, rows = model.generate(sampling)
    noise = torch.randn(BATCH, LENGTH, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer_logits = model(tokens) + 0.3 * noise  # the trainer rounds differently
    targets = next_token_targets(tokens)
    recomputed = token_logprobs(trainer_logits, targets, sampling=sampling)
    kept_tokens = KeptTokens.from_completions(rows, starts=[1] * BATCH, length=LENGTH).next_token()
    replayed = token_logprobs(trainer_logits, targets, kept_tokens=kept_tokens)
    assert (recomputed == -torch.inf).any()
    assert replayed.isfinite().all()
