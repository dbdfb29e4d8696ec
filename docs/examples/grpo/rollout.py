"""The generator: a plain ``transformers`` model that takes streamed weights and samples. It stands in for vLLM."""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from batch import Sample
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import fsdp_runtime
import rl_logprobs

UNFINISHED = "…"
"""What the text of a completion ends with if it never reached its end-of-text token; no right answer does."""


class Generator:
    """A full copy of the policy that samples with a key/value cache.

    Args:
        model: A causal language model of ``transformers``, in the dtype in which the trainer computes, so that the
            log-probs of the two agree.
        tokenizer: Its tokenizer, which must have an end-of-text token and a padding token.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.device = model.device
        takes = inspect.signature(model.forward).parameters
        self.cache = "cache" if "cache" in takes else "past_key_values"  # the name until transformers 5.23
        self.is_mixture = hasattr(model.config.get_text_config(), "num_experts_per_tok")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over streamed weights, one tensor at a time.

        Args:
            weights: Full tensors by the model's own names. A tied weight may come once or under both names.

        Raises:
            KeyError: A name that the model does not have, or a weight that did not come.
        """
        self.require_all(self.load_some(weights))

    @torch.no_grad()
    def load_some(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take over a part of the weights; the names that came.

        Raises:
            KeyError: A name that the model does not have.
        """
        targets = self.model.state_dict()
        came = set()
        for name, tensor in weights:
            if name not in targets:
                raise KeyError(f"the stream holds {name!r}, which the generator's model does not have")
            targets[name].copy_(tensor)
            came.add(name)
        return came

    def require_all(self, came: set[str]) -> None:
        """Check that nothing was left out.

        Raises:
            KeyError: A weight did not come, under any of its names.
        """
        # state_dict() lists a tied weight under both of its names; the two share one storage.
        targets = self.model.state_dict()
        filled = {targets[name].data_ptr() for name in came}
        missing = [name for name, target in targets.items() if target.data_ptr() not in filled]
        if missing:
            raise KeyError(f"the stream left out {len(missing)} of {len(targets)} weights, first {missing[0]!r}")

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        temperature: float,
        rng: torch.Generator | None = None,
        top_p: float = 1.0,
    ) -> list[Sample]:
        """Continue every prompt up to its end-of-text token, or by ``max_new_tokens``.

        Args:
            prompts: The texts to continue, at least one.
            max_new_tokens: The most tokens to add to a prompt.
            temperature: What to divide the logits by; 0 takes the likeliest token every time.
            rng: The source of randomness, on the generator's device.
            top_p: Sample from the most probable tokens that together reach this probability.

        Returns:
            The samples in the prompts' order. Their log-probs are those of the distribution that was sampled from,
            and at temperature 0 those of temperature 1. With ``top_p`` below 1 they have the ids that were kept, and
            those of a mixture the experts of each token.
        """
        inputs = self.tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
        tokens, mask = inputs["input_ids"].to(self.device), inputs["attention_mask"].to(self.device)
        prompt_ids = [row[kept.bool()].tolist() for row, kept in zip(tokens, mask, strict=True)]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        running = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        sampling = rl_logprobs.SamplingFilter(top_p=top_p) if top_p < 1 else None
        cache, sampled, logprobs, alive = None, [], [], []
        kept: list[list[list[int]]] = [[] for _ in prompts]
        routes: list[torch.Tensor] = []

        for _ in range(max_new_tokens):
            with fsdp_runtime.record_routes(self.model) if self.is_mixture else nullcontext() as recorded:
                given = {"attention_mask": mask, "position_ids": positions, self.cache: cache}
                output = self.model(tokens, **given, use_cache=True)
            if recorded is not None:
                routes.append(recorded.stacked().unflatten(1, tokens.shape))  # [layers, batch, tokens, k]
            cache = output[self.cache]
            scores = (output.logits[:, -1].float() / (temperature or 1.0)).log_softmax(dim=-1)
            if sampling is not None:
                kept_tokens = rl_logprobs.sampling_mask(scores, sampling)
                scores = _among_kept(scores, kept_tokens)
                for row, ids in zip(kept, kept_tokens.ids.split(kept_tokens.offsets.diff().tolist()), strict=True):
                    row.append(ids.tolist())
            if temperature == 0:
                token = scores.argmax(dim=-1)
            else:
                token = torch.multinomial(scores.exp(), 1, generator=rng).squeeze(1)
            sampled.append(token)
            logprobs.append(scores.gather(1, token[:, None]).squeeze(1))
            alive.append(running)
            running = running & (token != self.tokenizer.eos_token_id)
            if not running.any():
                break
            tokens, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)

        lengths = torch.stack(alive).sum(dim=0).tolist()
        rows = zip(
            prompt_ids, torch.stack(sampled, 1).tolist(), torch.stack(logprobs, 1).tolist(), kept, lengths, strict=True
        )
        samples = [Sample(prompt, ids[:n], scores[:n], sets[:n]) for prompt, ids, scores, sets, n in rows]
        return _with_routes(samples, torch.cat(routes, 2)) if routes else samples

    def completion_text(self, sample: Sample) -> str:
        """A sample's completion as text: without its end-of-text token, or with a mark at the end if it has none."""
        *body, last = sample.completion
        if last == self.tokenizer.eos_token_id:
            return str(self.tokenizer.decode(body))
        return str(self.tokenizer.decode(sample.completion)) + UNFINISHED


def _with_routes(samples: Sequence[Sample], routes: torch.Tensor) -> list[Sample]:
    """The samples with their experts out of ``[layers, batch, padded prompt and completion, k]``."""
    padded_prompt = max(len(sample.prompt) for sample in samples)
    by_sample = routes.permute(1, 2, 0, 3).cpu()
    found = []
    for sample, own in zip(samples, by_sample, strict=True):
        start = padded_prompt - len(sample.prompt)
        found.append(replace(sample, routes=own[start : padded_prompt + len(sample.completion) - 1].clone()))
    return found


def _among_kept(scores: torch.Tensor, kept_tokens: rl_logprobs.KeptTokens) -> torch.Tensor:
    """Log-probs renormalised over the kept ids, ``-inf`` for the others."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[kept_tokens.rows(), kept_tokens.ids] = True
    return scores.masked_fill(~kept, float("-inf")).log_softmax(dim=-1)
