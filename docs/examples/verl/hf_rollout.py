"""A rollout for verl 0.9 that generates with a Hugging Face model on the CPU: ``rollout.name=hf_cpu``.

``VERL_USE_EXTERNAL_MODULES=...,hf_rollout`` registers it.  One Ray actor serves a replica.  It takes full weights and
LoRA factors, and samples each prompt from a seed of its own, so that runs of two engines see the same tokens.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

Weights = Iterable[tuple[str, torch.Tensor]]


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """The end of the weight transfer in every trainer process; the first of a replica sends to its server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        replica, self._rank = divmod(int(os.environ["RANK"]), ranks)
        self._server = _server_name(replica if replica_rank == -1 else replica_rank)

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The host's memory is kept."""

    async def update_weights(
        self,
        weights: Weights,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        **kwargs: Any,
    ) -> None:
        """Send named tensors, or LoRA factors with their config; all ranks exhaust ``weights``, which is collective."""
        if wire_format != "named_tensors":
            raise ValueError(f"hf_cpu takes wire_format='named_tensors', not {wire_format!r}")
        found = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if self._rank == 0:
            adapter = peft_config if base_sync_done else None
            await ray.get_actor(self._server).load_weights.remote(found, global_steps, adapter)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Server:
    """The model of one replica; requests that wait together are generated together."""

    def __init__(self, path: str, response_length: int) -> None:
        torch.set_num_threads(1)
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version: int | None = None
        self._response_length = response_length
        self._waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[Any]]] = []
        self._seen: dict[tuple[int, ...], int] = {}

    def load_weights(
        self, tensors: dict[str, torch.Tensor], version: int | None, adapter: dict[str, Any] | None
    ) -> None:
        """Take all weights of the model, or all LoRA factors of ``adapter``; anything left out is an error."""
        if adapter is not None:
            self._load_adapter(tensors, adapter)
        else:
            self._load_all(getattr(self.model, "get_base_model", lambda: self.model)(), tensors)
        self.version = version

    def _load_all(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        plain = {name.replace(".base_layer.", "."): tensor.float() for name, tensor in tensors.items()}
        names = {name.replace(".base_layer.", "."): name for name in model.state_dict() if ".lora_" not in name}
        tied = {name for name in names if name in getattr(model, "_tied_weights_keys", None) or {}}
        if wrong := (set(names) ^ set(plain)) - tied:
            raise ValueError(f"the trainer sent other weights than the model has: {sorted(wrong)[:5]}")
        model.load_state_dict({names[name]: tensor for name, tensor in plain.items()}, strict=False)

    def _load_adapter(self, tensors: dict[str, torch.Tensor], adapter: dict[str, Any]) -> None:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        if not hasattr(self.model, "peft_config"):
            self.model = get_peft_model(self.model, LoraConfig(**adapter)).eval()
        result = set_peft_model_state_dict(self.model, {name: tensor.float() for name, tensor in tensors.items()})
        missing = [name for name in result.missing_keys if ".lora_" in name]
        if missing or result.unexpected_keys:
            raise ValueError(f"LoRA factors: {missing[:3]} were not sent, {result.unexpected_keys[:3]} are unknown")

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate one answer; log-probs are those of the sampled tokens at the sampling temperature."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(prompt_ids), sampling_params, done))
        if len(self._waiting) == 1:
            await asyncio.sleep(0.02)  # the rest of the batch arrives
            waiting, self._waiting = self._waiting, []
            self._generate(waiting)
        return await done

    @torch.no_grad()
    def _generate(self, waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[Any]]]) -> None:
        prompts = [prompt for prompt, _, _ in waiting]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        samplers = [_Sampler(params, self._response_length, self._generator(prompt)) for prompt, params, _ in waiting]
        end, cache = self.model.config.eos_token_id, None
        while not all(sampler.finished for sampler in samplers):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            found = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            logits, cache = found.logits[:, -1].float(), found.past_key_values
            ids = torch.tensor([[sampler.sample(row, end)] for sampler, row in zip(samplers, logits, strict=True)])
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        for sampler, (_, _, done) in zip(samplers, waiting, strict=True):
            done.set_result(
                TokenOutput(
                    token_ids=sampler.tokens,
                    log_probs=sampler.logprobs,
                    stop_reason="completed",
                    num_preempted=0,
                    extra_fields={"global_steps": self.version},
                )
            )

    def _generator(self, prompt: list[int]) -> torch.Generator:
        """Seeded by the prompt and how often it was asked, whatever the order of requests."""
        key = tuple(prompt)
        self._seen[key] = self._seen.get(key, -1) + 1
        return torch.Generator().manual_seed(zlib.crc32(repr((key, self._seen[key])).encode()))

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        """What verl asks of servers with memory to release or requests to abort."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class _Sampler:
    """The tokens of one answer so far."""

    def __init__(self, params: dict[str, Any], response_length: int, generator: torch.Generator) -> None:
        if params.get("top_p", 1.0) != 1.0 or params.get("top_k", -1) not in (-1, 0, None):
            raise ValueError("hf_cpu samples from the whole vocabulary: rollout.top_p=1.0 rollout.top_k=-1")
        self._limit = params.get("max_tokens") or params.get("max_new_tokens") or response_length
        self._temperature, self._generator = float(params.get("temperature", 1.0)), generator
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finished = False

    def sample(self, logits: torch.Tensor, end: int) -> int:
        """Take the next token of ``logits``, ``[vocab]``; a finished answer takes none."""
        if self.finished:
            return end
        logprobs = (logits / (self._temperature or 1.0)).log_softmax(-1)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=self._generator)[0]
        token = int(drawn if self._temperature else logprobs.argmax())
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        self.finished = token == end or len(self.tokens) == self._limit
        return token


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts the server."""

    async def launch_servers(self) -> None:
        """Start one Ray actor with the model of ``model.path``."""
        name = _server_name(self.replica_rank)
        server = Server.options(name=name).remote(self.model_config.path, self.config.response_length)
        self.servers, self._server_handle, self._server_address = [server], server, f"{name}:1"


def _server_name(replica: int) -> str:
    return f"hf-cpu-{replica}"


_ROLLOUT_REGISTRY[("hf_cpu", "async")] = "hf_rollout.ServerAdapter"
RolloutReplicaRegistry.register("hf_cpu", lambda: Replica)
