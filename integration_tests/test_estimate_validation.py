"""The dry run against reality: the same step on gloo ranks with real tensors, counted by other counters."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_runtime
import rl_logprobs
from fsdp_runtime.dry_run import estimate
from fsdp_runtime.dry_run.parse_args import parse_fsdp
from fsdp_runtime.steps import CheckInputs
from harness.collectives import RecordCollectives, by_axis
from harness.models import VOCAB, jitter, tiny_config

LENGTH, BATCH = 48, 2


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages that are alive and known, as large as they are now: FSDP2 resizes what it gathers into."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.known: dict[int, weakref.ref[Any]] = {}
        self.peak = 0
        for tensor in tensors:
            self._know(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta" and type(leaf) is Tensor:
                self._know(leaf)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        storages = {key: storage() for key, storage in self.known.items()}
        self.known = {key: self.known[key] for key, storage in storages.items() if storage is not None}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)

    def _know(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.known[storage._cdata] = weakref.ref(storage)


def config_of(name: str) -> Any:
    if name.startswith("moe"):
        return transformers.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1 if name == "moe, all experts" else 2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=4,
            num_experts_per_tok=4 if name == "moe, all experts" else 2,
        )
    if name == "vlm":
        return tiny_config("Gemma3ForConditionalGeneration")
    layers = {"dense": 4, "tied": 2, "shallow": 1}[name]
    return tiny_config("Qwen3ForCausalLM", tied=name == "tied", num_hidden_layers=layers)


def real_step(name: str, axes: dict[str, int], options: dict[str, Any], logprobs: str, rank: int) -> Any:
    """Return the collectives of ``rank`` by axis and kind, and its highest bytes alive, in the second step."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if name == "vlm" else transformers.AutoModelForCausalLM
    model = auto.from_config(config_of(name)).train()
    model.config.use_cache = False
    jitter(model)
    mesh = fsdp_runtime.MeshSpec(**axes).build(device_type="cpu")
    master = options.pop("master", False)
    if master:
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options["fsdp"] = fsdp_runtime.FSDP2(mp_policy=policy)
    # The comparison of the first inputs is no part of a step that the dry run describes.
    options["steps"] = (*options.get("steps", ()), CheckInputs("never"))
    fsdp_runtime.parallelize(model, mesh, **options)
    own = [p for p in model.parameters() if not isinstance(p, DTensor)]
    distributed = [p for p in model.parameters() if isinstance(p, DTensor)]
    groups = [{"params": parameters} for parameters in (own, distributed) if parameters]
    optimizer = torch.optim.AdamW(groups, foreach=True)
    inputs = {"input_ids": torch.randint(3, 120, (BATCH, LENGTH))}
    if name == "vlm":
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])

    # The other ranks only answer the collectives of this one, whose counters cost most.
    measured = torch.distributed.get_rank() == rank

    def step() -> None:
        if logprobs == "linear":
            head, model.lm_head = model.lm_head, torch.nn.Identity()
            hidden = model(**inputs).logits
            model.lm_head = head
            scores = rl_logprobs.linear_token_logprobs(hidden, head.weight, inputs["input_ids"])
            del hidden
        else:
            logits = model(**inputs).logits
            scores = rl_logprobs.token_logprobs(logits, inputs["input_ids"])
            del logits
        loss = -scores.mean()
        del scores
        loss.backward()
        del loss
        rl_logprobs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    optimizer.zero_grad()
    if not measured:
        return step()
    state = [value for states in optimizer.state.values() for value in states.values()]
    with (
        RecordCollectives() as record,
        LiveStorages([*model.parameters(), *model.buffers(), *state, *inputs.values()]) as m,
    ):
        step()
    found = by_axis(record.calls, mesh)
    everyone = str(tuple(range(mesh.size())))  # no axis of a mesh with two, but what gradient norms are summed over
    return {("world" if axis == everyone else axis): kinds for axis, kinds in found.items()}, m.peak


def predicted(name: str, axes: dict[str, int], options: dict[str, Any], logprobs: str, rank: int) -> Any:
    """The same by the dry run."""
    options = dict(options)
    master = options.pop("master", False)
    told: dict[str, Any] = {"fsdp": parse_fsdp(master_dtype="fp32")} if master else {"dtype": torch.float32}
    # The real step runs on a CPU: neither attention nor products have the workspaces of a GPU.
    told |= {"attention_kernels": "none", "constants": ()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RL_LOGPROBS_BACKEND", "torch")  # the operators of the real step
        found = estimate(
            config_of(name), axes, seq_len=LENGTH, micro_batch=BATCH, rank=rank, logprobs=logprobs, **told, **options
        )
    traffic: dict[str, Any] = {}
    for item in found.traffic:
        axis = "world" if item.ranks == found.settings.world_size > 2 else item.axis  # "dp", where that is all ranks
        count, nbytes = traffic.setdefault(axis, {}).get(item.kind, (0, 0))
        traffic[axis][item.kind] = (count + item.count, nbytes + item.nbytes)
    return traffic, found.memory.peak.total


SP, BLOCKS = {"sequence_parallel": True}, {"activation_checkpointing": "block"}
SELECTIVE = {"activation_checkpointing": "selective", "master": True}
ON_TWO = [
    pytest.param(("dense", {"tp": 2}, {}, "logits"), marks=pytest.mark.slow),
    pytest.param(("dense", {"tp": 2}, SP, "linear"), marks=pytest.mark.slow),
    ("shallow", {"tp": 2}, SP, "linear"),
    pytest.param(("moe", {"tp": 2}, {"activation_checkpointing": "mlp"}, "logits"), marks=pytest.mark.slow),
]
ON_FOUR = [
    pytest.param(("tied", {"dp_shard": 2, "tp": 2}, SP | BLOCKS, "logits"), marks=pytest.mark.slow),
    pytest.param(("moe", {"dp_shard": 2, "tp": 2}, {}, "logits"), marks=pytest.mark.slow),
    ("moe, all experts", {"dp_shard": 2, "tp": 2, "ep": 2}, BLOCKS, "logits"),  # the only routes known without data
    pytest.param(("vlm", {"dp_shard": 2, "tp": 2}, SP, "logits"), marks=pytest.mark.slow),
    *(
        pytest.param((name, {"dp_replicate": 2, "dp_shard": 2}, SELECTIVE, "logits"), marks=marks)
        for name, marks in (("shallow", []), ("dense", [pytest.mark.slow]))
    ),
]


def told(case: Any) -> str:
    name, axes, options, logprobs = case
    return "-".join([name, *(f"{axis}{size}" for axis, size in axes.items()), *map(str, options.values()), logprobs])


def assert_foreseen(pool: Any, case: Any, rank: int) -> None:
    counted, peak = pool.run(real_step, *case, rank)[rank]
    foreseen, foreseen_peak = predicted(*case, rank)
    assert foreseen == counted
    assert foreseen_peak == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("case", ON_TWO, ids=told)
def test_dry_run_predicts_traffic_and_memory_of_two_ranks(two_ranks: Any, case: Any) -> None:
    assert_foreseen(two_ranks, case, rank=1)


@pytest.mark.parametrize("case", ON_FOUR, ids=told)
def test_dry_run_predicts_traffic_and_memory_of_four_ranks(four_ranks: Any, case: Any) -> None:
    assert_foreseen(four_ranks, case, rank=0)
