"""Host time and operations that each layer adds: collectives of a fake process group return at once.

    python packages/fsdp-runtime/benchmarks/bench_host.py [NAME ...] [--rounds 20] [--layers 24] [--backend inductor]

One rank, one thread, small layers, so that what is timed is Python and the dispatcher.  Times are the least processor
time over rounds of a forward and backward, less that of the plain model, for each layer.  Counts are exact, and also
less those of the plain model: those of a model with three layers less those of one with two.  Compiled layers stand
beside compiled plain layers of a rank's size, with the graphs and guards of all their code.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as cache_entries
from torch._dynamo.utils import counters as torch_counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_runtime import MeshSpec, parallelize, record_routes, replay_routes, submesh
from fsdp_runtime.steps import Compile
from tp_plans import with_expert_parallelism
from tp_plans.runtime import dispatch_styles

HIDDEN, TOKENS, VOCAB = 64, 32, 128
#: The options of the command line.
settings = argparse.Namespace()


def llama(layers: int, *, ranks: int = 1) -> nn.Module:
    """A narrow Llama, or the part of it that one of so many ranks has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN // ranks,
            num_hidden_layers=layers,
            num_attention_heads=4 // ranks,
            num_key_value_heads=4 // ranks,
            head_dim=HIDDEN // 4,
        )
    )


def mixture(layers: int) -> nn.Module:
    """A narrow mixture of eight experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            moe_intermediate_size=HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
        )
    )


def with_lora(layers: int) -> nn.Module:
    """The Llama with adapters on all linear layers of its blocks."""
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(llama(layers), peft.LoraConfig(r=4, target_modules=names))


def by_hand(layers: int, *, tp: int = 1, dp: int = 1, sequence_parallel: bool = False) -> nn.Module:
    """``parallelize_module`` and ``fully_shard``, as torch's tutorials write them."""
    model: Any = llama(layers)
    mesh = MeshSpec(dp_shard=dp, tp=tp).build(device_type="cpu")
    stream: Any = Shard(1) if sequence_parallel else Replicate()
    out = partial(RowwiseParallel, output_layouts=stream, use_local_output=not sequence_parallel)
    plan: dict[str, Any] = {
        "model.embed_tokens": out(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1)),
    }
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan |= {f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"{mlp}.gate_proj": ColwiseParallel(), f"{mlp}.up_proj": ColwiseParallel()}
    plan |= {f"{attention}.o_proj": out(), f"{mlp}.down_proj": out()}
    if sequence_parallel:
        norm = SequenceParallel(use_local_output=False)
        plan |= {"model.norm": norm}
        plan |= {f"model.layers.*.{name}_layernorm": norm for name in ("input", "post_attention")}
        gathered = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
        plan[attention] = PrepareModuleInput(input_kwarg_layouts=gathered[0], desired_input_kwarg_layouts=gathered[1])
        plan[mlp] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan)
    if dp > 1:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    return model


def by_transformers(layers: int) -> nn.Module:
    """``from_pretrained`` with a ``DistributedConfig``."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        llama(layers).save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))


def mixture_by_hand(layers: int, *, dp: int, apart: bool) -> nn.Module:
    """``fully_shard`` of every block, and of its experts as a second FSDP module where they are ``apart``."""
    model: Any = mixture(layers)
    mesh = MeshSpec(dp_shard=dp).build(device_type="cpu")
    for block in model.model.layers:
        for module in (block.mlp.experts, block) if apart else (block,):
            fully_shard(module, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def dispatched(layers: int, *, dp: int, whole: bool = False) -> nn.Module:
    """Experts over ``ep``, without FSDP2; or blocks ``whole`` besides, as FSDP2 by hand wraps them without experts."""
    model: Any = mixture(layers)
    mesh = MeshSpec(dp_shard=dp, ep=dp).build(device_type="cpu")
    plan = with_expert_parallelism(None, model)
    parallelize_module(model, submesh(mesh, "ep"), dispatch_styles(plan.by_path(model)))
    experts = {parameter for block in model.model.layers for parameter in block.mlp.experts.parameters()}
    for module in (*model.model.layers, model) if whole else ():
        fully_shard(module, mesh=mesh["dp_shard"], ignored_params=experts)
    return model


def ours(build: Callable[[int], nn.Module], layers: int, axes: dict[str, int], **options: Any) -> nn.Module:
    """This package."""
    return parallelize(build(layers), MeshSpec(**axes).build(device_type="cpu"), **options)


def compiled(build: Callable[..., nn.Module], layers: int, **options: Any) -> nn.Module:
    """A model with ``nn.Module.compile`` of each block, or with this package's ``compile``."""
    if build is ours:
        return ours(llama, layers, compile=Compile({"backend": settings.backend}), **options)
    model: Any = build(layers, **options)
    for block in model.model.layers:
        block.compile(backend=settings.backend)
    return model


def _everyone() -> Any:
    return dist.group.WORLD


class _Gather(torch.autograd.Function):
    """All-gather rows forward and reduce-scatter their gradients backward."""

    @staticmethod
    def forward(_: Any, rows: Tensor) -> Any:
        return funcol.all_gather_tensor(rows, 0, _everyone())

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return funcol.reduce_scatter_tensor(gradients[0].contiguous(), "sum", 0, _everyone())


class _Scatter(torch.autograd.Function):
    """Reduce-scatter rows forward and all-gather their gradients backward."""

    @staticmethod
    def forward(_: Any, rows: Tensor) -> Any:
        return funcol.reduce_scatter_tensor(rows.contiguous(), "sum", 0, _everyone())

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return funcol.all_gather_tensor(gradients[0].contiguous(), 0, _everyone())


def collectives_alone(layers: int, *, ranks: int) -> nn.Module:
    """Plain parameters of a rank's size and the four collectives of a block: the least of any sequence parallelism."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Block(LlamaDecoderLayer):
        """The forward of a decoder layer with its collectives."""

        def forward(self, hidden_states: Tensor, **options: Any) -> Any:
            """Add the attention and the MLP of all rows to this rank's rows of one sample."""
            rows = _Gather.apply(self.input_layernorm(hidden_states)[0])  # type: ignore[no-untyped-call]
            attention, _ = self.self_attn(hidden_states=rows[None], **options)
            hidden_states = hidden_states + _Scatter.apply(attention[0])[None]  # type: ignore[no-untyped-call]
            rows = _Gather.apply(self.post_attention_layernorm(hidden_states)[0])  # type: ignore[no-untyped-call]
            return hidden_states + _Scatter.apply(self.mlp(rows[None])[0])[None]  # type: ignore[no-untyped-call]

    model: Any = llama(layers, ranks=ranks)
    for block in model.model.layers:
        block.__class__ = Block
    length = TOKENS // ranks
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0][:, :length], *args[1:]))
    model.model.norm.register_forward_pre_hook(lambda _, args: (args[0].repeat(1, ranks, 1),))
    return model  # type: ignore[no-any-return]


#: Contender: the plain model that its time is compared with, a model of so many layers, and the call around a step.
Contender = tuple[str, Callable[[int], nn.Module], str]
CONTENDERS: dict[str, Contender] = {
    "plain": ("plain", llama, ""),
    "mixture": ("mixture", mixture, ""),
    "lora": ("lora", with_lora, ""),
    "tp by hand": ("plain", partial(by_hand, tp=2), ""),
    "tp by transformers": ("plain", by_transformers, ""),
    "tp": ("plain", partial(ours, llama, axes={"tp": 2}), ""),
    "tp, lora": ("lora", partial(ours, with_lora, axes={"tp": 2}), ""),
    "sp by hand": ("plain", partial(by_hand, tp=2, sequence_parallel=True), ""),
    "sp": ("plain", partial(ours, llama, axes={"tp": 2}, sequence_parallel=True), ""),
    "sp, lora": ("lora", partial(ours, with_lora, axes={"tp": 2}, sequence_parallel=True), ""),
    "fsdp2 by hand": ("plain", partial(by_hand, dp=2), ""),
    "fsdp2": ("plain", partial(ours, llama, axes={"dp_shard": 2}), ""),
    "fsdp2 x tp by hand": ("plain", partial(by_hand, tp=2, dp=2), ""),
    "fsdp2 x tp": ("plain", partial(ours, llama, axes={"dp_shard": 2, "tp": 2}), ""),
    "fsdp2 x sp": ("plain", partial(ours, llama, axes={"dp_shard": 2, "tp": 2}, sequence_parallel=True), ""),
    "ep": ("mixture", partial(ours, mixture, axes={"dp_shard": 2, "ep": 2}), ""),
    "ep, efsdp": ("mixture", partial(ours, mixture, axes={"dp_shard": 4, "ep": 2}), ""),
    "dispatch alone": ("mixture", partial(dispatched, dp=2), ""),
    "dispatch, fsdp2 by hand": ("mixture", partial(dispatched, dp=2, whole=True), ""),
    "mixture, fsdp2 by hand": ("mixture", partial(mixture_by_hand, dp=2, apart=False), ""),
    "mixture, two groups by hand": ("mixture", partial(mixture_by_hand, dp=2, apart=True), ""),
    "mixture, tp": ("mixture", partial(ours, mixture, axes={"tp": 2}), ""),
    "mixture, fsdp2": ("mixture", partial(ours, mixture, axes={"dp_shard": 2}), ""),
    "packed": ("plain", partial(ours, llama, axes={"dp_shard": 1}, packed_sequences=True), "packed"),
    "cp": ("plain", partial(ours, llama, axes={"cp": 2}), ""),
    "compiled": ("compiled", partial(compiled, llama, ranks=2), ""),
    # "tp by hand" does not compile: the backward of torch 2.13 raises in NestedRedistribute.
    "tp, compiled": ("compiled", partial(compiled, ours, axes={"tp": 2}), ""),
    "sp, collectives alone, compiled": ("compiled", partial(compiled, collectives_alone, ranks=2), ""),
    "sp by hand, compiled": ("compiled", partial(compiled, by_hand, tp=2, sequence_parallel=True), ""),
    "sp, compiled": ("compiled", partial(compiled, ours, axes={"tp": 2}, sequence_parallel=True), ""),
    "sp, recomputed, compiled": (
        "compiled",
        partial(compiled, ours, axes={"tp": 2}, sequence_parallel=True, activation_checkpointing="block"),
        "",
    ),
    "fsdp2 x sp, compiled": (
        "compiled",
        partial(compiled, ours, axes={"dp_shard": 2, "tp": 2}, sequence_parallel=True),
        "",
    ),
    "recorded": ("mixture", mixture, "recorded"),
    "replayed": ("mixture", mixture, "replayed"),
    "recorded, tp": ("mixture, tp", partial(ours, mixture, axes={"tp": 2}), "recorded"),
    "replayed, tp": ("mixture, tp", partial(ours, mixture, axes={"tp": 2}), "replayed"),
}


class Step:
    """A forward and a backward of a model."""

    def __init__(self, model: nn.Module, around: str) -> None:
        self.model, self.around, self.parameters = model, around, list(model.parameters())
        self.ids = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        self.inputs: dict[str, Any] = {"input_ids": self.ids, "use_cache": False}
        if around == "packed":
            self.inputs["position_ids"] = (torch.arange(TOKENS) % (TOKENS // 2))[None]
        self.routes: Any = None
        if around == "replayed":
            with record_routes(model) as self.routes, torch.no_grad():
                self.forward()

    def context(self) -> AbstractContextManager[Any]:
        """What is around the forward."""
        if self.around == "recorded":
            return record_routes(self.model)
        return replay_routes(self.model, self.routes) if self.around == "replayed" else nullcontext()

    def forward(self) -> Tensor:
        """This rank's logits."""
        logits = self.model(**self.inputs).logits
        return logits.to_local() if isinstance(logits, DTensor) else logits

    def __call__(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        with self.context():
            logits = self.forward()
        logits.sum().backward()


#: Python functions that are counted, by the end of their file and their name; the autograd functions in both passes.
COUNTED = {
    ("tensor/_api.py", "from_local"): "from_local",
    ("tensor/_api.py", "to_local"): "to_local",
    ("tensor/_api.py", "redistribute"): "redistribute",
    ("tensor/_dtensor_spec.py", "__post_init__"): "specs",
    ("autograd/function.py", "apply"): "functions",
    ("torch_styles/_host_time_compat.py", "applied"): "functions",
}
NAMES = {name for _, name in COUNTED}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count calls of Python functions, those of ``COUNTED`` by name too, and DTensors."""
    counts: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") in ("_dtensor__new__", "_make_wrapper_subclass"):
            counts["DTensors"] += 1
        elif event == "call":
            counts["calls"] += 1
            code = frame.f_code
            file = "/".join(Path(code.co_filename).parts[-2:]) if code.co_name in NAMES else ""
            counts[COUNTED.get((file, code.co_name), "others")] += 1

    gc.disable()  # which runs code of what it frees
    sys.setprofile(profile)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        gc.enable()


def counts_of_a_layer(name: str) -> Counter[str]:
    """What one layer adds, counted exactly."""
    found = []
    torch.compiler.reset()
    torch_counters.clear()
    for layers in (2, 3):
        step = Step(CONTENDERS[name][1](layers), CONTENDERS[name][2])
        for _ in range(3):
            step()
        with counted() as counts:
            step()
        found.append(counts)
    of_a_layer = Counter({key: found[1][key] - found[0][key] for key in found[1]})
    of_a_layer["graphs"] = torch_counters["stats"]["unique_graphs"]
    of_a_layer["breaks"] = sum(torch_counters["graph_break"].values())
    of_a_layer["guards"] = guards()
    return of_a_layer


def guards() -> int:
    """Count the guards of all compiled code."""
    functions = (value for value in gc.get_objects() if type(value) is FunctionType)
    codes = {id(function.__code__): function.__code__ for function in functions}
    entries = (entry for code in codes.values() for entry in cache_entries(code))
    return sum(len(entry.guard_manager.code_parts) for entry in entries)


def time_of_a_layer(name: str, layers: int, rounds: int) -> float:
    """Return the least processor time of a forward and backward, in ms a layer."""
    step = Step(CONTENDERS[name][1](layers), CONTENDERS[name][2])
    step()
    best = math.inf
    for _ in range(rounds):
        start = time.process_time()
        step()
        best = min(best, time.process_time() - start)
    return best / layers * 1e3


def fake_all_to_all(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:  # noqa: A002  # torch's word
    """What a rank receives, as if all ranks sent the same."""
    output.view(-1)[: input.numel()].copy_(input.reshape(-1)[: output.numel()])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(namespace=settings)
    torch.set_num_threads(1)
    dist.all_to_all_single = fake_all_to_all
    wanted = dict.fromkeys(options.names or CONTENDERS)
    for _ in range(2):  # a row's base, and the base's base
        wanted = dict.fromkeys(CONTENDERS[name][0] for name in wanted) | wanted
    times: dict[str, float] = {}
    counts: dict[str, Counter[str]] = {}
    for name in wanted:
        base, build, _ = CONTENDERS[name]
        sizes = {"tp": 2} if build is by_transformers else getattr(build, "keywords", {})
        sizes = sizes.get("axes", sizes)
        torch.compiler.reset()
        world = math.prod(sizes.get(axis, 1) for axis in ("dp", "dp_shard", "cp", "tp", "ranks"))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        times[name] = time_of_a_layer(name, options.layers, options.rounds)
        counts[name] = counts_of_a_layer(name)
        dist.destroy_process_group()
        added = {key: counts[name][key] - counts[base][key] for key in ("calls", "DTensors", *COUNTED.values())}
        told = ", ".join(f"{count} {key}" for key, count in added.items() if count)
        made = [f"{counts[name][key]} {key} in all" for key in ("graphs", "breaks", "guards") if counts[name]["graphs"]]
        print(
            f"{name:27} {times[name]:6.2f} ms a layer, {times[name] - times[base]:6.2f} added: {told}; "
            f"{times[name] / times[base]:.2f} of {base}" + "".join(f", {each}" for each in made),
            flush=True,
        )


if __name__ == "__main__":
    main()
