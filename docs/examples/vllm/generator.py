"""The generator: a vLLM server that takes the trainer's weights live, and returns what it sampled from."""

from collections.abc import Sequence

import torch
from batch import Sample
from rollout import UNFINISHED
from transformers import PreTrainedTokenizerBase

from vllm_gloo import EngineClient

TOP_K = 50
"""Ids that a token is sampled from at the most, and so the number of log-probs that are asked for."""

LEAST_LOGPROB = -9999.0
"""What vLLM's server writes in the place of minus infinity: the log-prob of an id that was not kept."""


class VLLMGenerator:
    """Samples on a vLLM server, which was started with ``--logprobs-mode processed_logprobs``.

    Args:
        client: The server.
        model: The name that it serves the policy under.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, client: EngineClient, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.client, self.model, self.tokenizer = client, model, tokenizer
        self.device = torch.device("cpu")

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
            prompts: The texts to continue.
            max_new_tokens: The most tokens to add to a prompt.
            temperature: What to divide the logits by; 0 takes the likeliest token every time.
            rng: Not used: the server has a seed of its own. One seed for a request would give all samples of a prompt
                the same tokens.
            top_p: Sample from the most probable tokens that together reach this probability, at most ``TOP_K``.

        Returns:
            The samples in the prompts' order. Above temperature 0, with the ids that were kept and the log-probs among
            them.
        """
        ids = self.tokenizer(list(prompts))["input_ids"]
        sampling = {"top_p": top_p, "top_k": TOP_K} if temperature else {}
        answer = self.client.request(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": ids,
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "logprobs": TOP_K if temperature else 1,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                **sampling,
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [
            Sample(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], _kept(choice) if sampling else [])
            for prompt, choice in zip(ids, choices, strict=True)
        ]

    def completion_text(self, sample: Sample) -> str:
        """A sample's completion as text: without its end-of-text token, or with a mark at the end if it has none."""
        *body, last = sample.completion
        if last == self.tokenizer.eos_token_id:
            return str(self.tokenizer.decode(body))
        return str(self.tokenizer.decode(sample.completion)) + UNFINISHED


def _kept(choice: dict) -> list[list[int]]:
    """The ids among which each token was chosen: those with a log-prob.

    ``return_sampling_mask`` would return them as they are, but needs vLLM's newer model runner, which has no CPU form.
    """
    return [
        [int(name.removeprefix("token_id:")) for name, logprob in step.items() if logprob > LEAST_LOGPROB]
        for step in choice["logprobs"]["top_logprobs"]
    ]
