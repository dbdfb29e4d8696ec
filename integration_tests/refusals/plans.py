"""Plans that are refused: what is no plan, what no plan can be derived for, and all findings of a check."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import Own, Tree, refuse
from tp_plans import (
    ColwiseParallel,
    DispatchExperts,
    ExpertsParallel,
    NoParallel,
    ParameterStyle,
    Partial,
    Plan,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check,
    plan_for,
)
from tp_plans.infer import suggest
from tp_plans.infer.full_output import with_full_output
from tp_plans.infer.sequence_parallel import with_sequence_parallelism
from tp_plans.model_tree import ModelTree
from tp_plans.styles import GatheredParameters, MLAKVProjection, ParallelAttention, ScaleInput, VocabParallelEmbedding

SP: dict[str, Any] = {"sequence_parallel": True}
EXPERTS = {"up": (4, 8, 6), "down": (4, 6, 8)}


def _plan(plan: Any, model: nn.Module | None = None, **options: Any) -> None:
    """Give a plan to ``parallelize`` on two ranks of ``tp``."""
    refuse(model or Own(), {"tp": 2}, plan=plan, **options)


def _dotted(name: str, value: Any = None) -> None:
    module = ModuleType("user_plans")
    module.plan = value  # type: ignore[attr-defined]
    sys.modules["user_plans"] = module
    try:
        _plan(f"user_plans.{name}")
    finally:
        del sys.modules["user_plans"]


def _raising() -> None:
    raise KeyError("mine")


class _Unknown(nn.Module):
    """No architecture, no embedding."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)


class Gemma3nTextModel(nn.Module):
    """By its name, a model whose stream cannot be sharded."""


class _Block(nn.Module):
    """One class of blocks."""

    def __init__(self, *, odd: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.mlp = Tree(up=nn.Linear(8, 12), down=nn.Linear(12, 8))
        if odd:
            self.scale = nn.Parameter(nn.Linear(1, 1).weight.detach().clone())


class _Trunk(nn.Module):
    """Blocks with an embedding."""

    def __init__(self, blocks: int = 2, *, odd: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(_Block(odd=odd) for _ in range(blocks))
        self.norm = nn.LayerNorm(8)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Tensor) -> Any: ...


class _Between(_Trunk):
    """One that takes features between its blocks."""

    def forward(self, input_ids: Tensor, deepstack_visual_embeds: Any = None) -> Any: ...


class _Causal(nn.Module):
    """A trunk and a head."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = trunk, nn.Linear(8, 16, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.model.embed_tokens  # type: ignore[assignment]
        return found


def _two_decoders() -> None:
    model = Tree(
        embed_tokens=nn.Embedding(16, 8),
        low=Tree(layers=nn.ModuleList([_Block(), _Block()])),
        high=Tree(layers=nn.ModuleList([_Block(), _Block()])),
        norm=nn.LayerNorm(8),
    )
    with_sequence_parallelism(Plan({}), model)


def _check(rules: Mapping[str, Any], model: nn.Module, *, tp: int = 2, ep: int = 1) -> None:
    """Check rules as ``parallelize`` does; words are rules too."""
    check(rules, model, tp=tp, ep=ep).raise_on_error()


def _linear(out: int, inner: int = 8) -> nn.Module:
    return nn.Linear(inner, out)


def _attention(*, heads: int = 8, kv_heads: int = 2, **more: Any) -> Tree:
    """Heads of four features, with fused and separate projections."""
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    attn = Tree(
        attributes={"head_dim": 4, "config": config, **more.pop("attributes", {})},
        qkv_proj=_linear((heads + 2 * kv_heads) * 4),
        k_proj=_linear(kv_heads * 4),
        o_proj=_linear(8, heads * 4),
        **more,
    )
    return Tree(attn=attn)


def _wide_attention(parameters: Any = None, **more: nn.Module) -> tuple[dict[str, Any], Tree]:
    """Rules, and eight heads of four features with something beside their projections."""
    projections: dict[str, Any] = {name: _linear(32, 40) for name in ("q", "k", "v")}
    rules: dict[str, Any] = {f"attn.{name}": ColwiseParallel(multiple_of=4) for name in projections}
    rules["attn.o"] = RowwiseParallel(multiple_of=4)
    return rules, Tree(attn=Tree(parameters=parameters, **projections, o=_linear(40, 32), **more))


def _few_heads() -> None:
    rules = {"attn": ParallelAttention(), "attn.keys": ColwiseParallel(multiple_of=4, replicate_kv_heads=True)}
    told = {"num_key_value_groups": 4, "config": SimpleNamespace()}
    _check(rules, Tree(attn=Tree(attributes=told, keys=_linear(8))), tp=4)


def _tied() -> None:
    model = Tree(a=Tree(parameters=EXPERTS), b=Tree(parameters=EXPERTS))
    model.b.up = model.a.up  # type: ignore[union-attr]
    _check({"a": DispatchExperts()}, model)


def _rowwise_free(**fields: Any) -> None:
    plan_for(None, {"down": RowwiseParallel(**fields)}, rowwise=False)


def _transposed() -> Tree:
    layer: Any = _linear(8, 24)
    layer.nx, layer.nf = 8, 24
    return Tree(c_attn=layer)


def _mlp(inner: int = 24) -> Tree:
    return Tree(mlp=Tree(up=_linear(inner), down=_linear(8, inner)))


FUSED = ("config.num_attention_heads", "config.num_key_value_heads", "config.num_key_value_heads")
CASES: Provocations = {
    "tp_plans/resolve.py": {
        "CustomPlanError: is not a sequence-parallel one": lambda: _plan(Plan({"lm_head": ColwiseParallel()}), **SP),
        "PlanError: it has no rules for the blocks": lambda: _plan(
            "auto", _Unknown(Tree(a=_linear(8)), Tree(a=_linear(8)))
        ),
        "UnknownArchitectureError: does not serve either": lambda: _plan(
            "auto", _Unknown(Tree(a=_linear(8)), Tree(a=_linear(8)))
        ),
        "CustomPlanError: no known architecture, and no dotted path": lambda: _plan("a plan"),
        "CustomPlanError: custom plan '": (
            lambda: _plan("no_such_module.plan"),
            lambda: _dotted("other"),
            lambda: _dotted("plan", _raising),
        ),
        "CustomPlanError: is of type int, not a Plan": lambda: _plan(3),
        "CustomPlanError: is an empty dict": lambda: _plan({}),
        "CustomPlanError: the custom plan: the rule for 'lm_head' is of type int": lambda: _plan({"lm_head": 3}),
    },
    "tp_plans/infer/experts.py": {
        "CapabilityError: no module with stacked experts": lambda: refuse(
            tiny_model("LlamaForCausalLM"), {"tp": 2, "ep": 2}
        ),
    },
    "tp_plans/infer/full_output.py": {
        "CapabilityError: reads all tokens, and no norm": lambda: with_full_output(Plan({}), ModelTree.of(_Trunk())),
    },
    "tp_plans/infer/sequence_parallel.py": {
        "CapabilityError: has no sequence-parallel form": lambda: _plan("inferred", Own(more=Gemma3nTextModel()), **SP),
        "PlanError: no list of blocks for the token": lambda: with_sequence_parallelism(Plan({}), _Causal(_Trunk(0))),
        "PlanError: has blocks of one class in": _two_decoders,
        "CapabilityError: adds vision features between blocks": lambda: _plan(
            "inferred", _Causal(_Between(odd=True)), **SP
        ),
        "PlanError: sits where the activations are": lambda: with_sequence_parallelism(
            Plan({"model.layers.*.mlp": NoParallel()}), _Causal(_Trunk())
        ),
    },
    "tp_plans/infer/without_rowwise.py": {
        "PlanError: its output is a partial sum": lambda: _rowwise_free(output_layouts=Partial()),
        "PlanError: which no gather puts in order": lambda: _rowwise_free(fused_sizes=(1, 1)),
    },
    "tp_plans/infer/suggest.py": {
        "PlanError: suggest proposes plans for models of tokens": (
            lambda: _plan("inferred", _Unknown(Tree(a=_linear(8)), Tree(a=_linear(8)))),
            lambda: suggest(Tree(embed_tokens=nn.Embedding(16, 8))),
        ),
        "PlanError: is no module of": lambda: suggest(Own(), gathered=["layers.*.norm"]),
    },
    "tp_plans/checks/__init__.py": {
        "CheckFailedError: tp is 0; give the axis's size": lambda: _check({}, Own(), tp=0),
    },
    "tp_plans/checks/divisibility.py": {
        "CheckFailedError: leave a rank of tp=2 empty": lambda: _plan(
            {"lm_head": ColwiseParallel(use_local_output=False)}, _narrow()
        ),
        "CheckFailedError: 4 heads of 16 (64 features) cannot be split over tp=3": lambda: refuse(
            tiny_model("LlamaForCausalLM"), {"tp": 3}
        ),
        "CheckFailedError: the sum of its fused sizes": lambda: _check(
            {"attn.qkv_proj": ColwiseParallel(fused_sizes=(*FUSED, 1))}, _attention()
        ),
        "CheckFailedError: (multiple_of)": lambda: _check(
            {"up": ColwiseParallel(multiple_of=8, fused_sizes=(1, 1))}, Tree(up=_linear(40))
        ),
        "CheckFailedError: its rotary key takes": lambda: _check(
            {"kv": MLAKVProjection(rope_dim=30)}, Tree(kv=_linear(24))
        ),
        "CheckFailedError: no positive integer of that name": lambda: _check(
            {"kv": MLAKVProjection()}, Tree(kv=_linear(24))
        ),
        "CheckFailedError: no positive integer; leave it out": lambda: _check(
            {"attn": ParallelAttention(head_count_attrs=("num_heads",))}, _attention(attributes={"num_heads": 0})
        ),
        "CheckFailedError: would share key/value heads": _few_heads,
    },
    "tp_plans/checks/gradients.py": {
        "CheckFailedError: one element per head": lambda: _check(*_wide_attention({"sinks": (8,)})),
        "CheckFailedError: norm of all 32 features of attn.q": lambda: _check(
            *_wide_attention(q_norm=nn.LayerNorm(32, bias=False))
        ),
        "CheckFailedError: its gradient would be a partial sum": lambda: _check(
            {"norm": SequenceParallel()}, Tree(norm=Tree(inner=nn.LayerNorm(8)))
        ),
        "CheckFailedError: norm of one head": lambda: _check(*_wide_attention(q_norm=nn.LayerNorm(4, bias=False))),
    },
    "tp_plans/checks/interfaces.py": {
        "CheckFailedError: but sibling mlp.down expects all 24": lambda: _check({"mlp.up": ColwiseParallel()}, _mlp()),
        "CheckFailedError: output all features": lambda: _check(
            {"mlp.up": ColwiseParallel(output_layouts=Replicate()), "mlp.down": RowwiseParallel()}, _mlp()
        ),
        "CheckFailedError: as the full sequence and shard again": lambda: _check(
            {
                "norm": SequenceParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            },
            Tree(norm=nn.LayerNorm(8), **dict(_mlp().named_children())),
        ),
        "CheckFailedError: is replicated, but the blocks": lambda: _plan(
            suggest(Own(norm=nn.LayerNorm(8)), **SP).plan.override({"lm_head": NoParallel()}), Own(norm=nn.LayerNorm(8))
        ),
    },
    "tp_plans/checks/patterns.py": {
        "CheckFailedError: unknown style word": lambda: _check({"lm_head": "colums"}, Own()),
        "CheckFailedError: correct the rule": lambda: _check({"lm_head": 3}, Own()),
        "CheckFailedError: the pattern matches no": lambda: _plan({"head": ColwiseParallel()}),
        "CheckFailedError: matched by 2 rules: lm_head, lm_*": lambda: _plan(
            {"lm_head": ColwiseParallel(), "lm_*": ColwiseParallel(use_local_output=False)}
        ),
        "CheckFailedError: its rule begins": lambda: _check(
            {"layers.*.a": PrepareModuleInput(), "layers.0.a.sinks": ParameterStyle()},
            Tree(layers=nn.ModuleList([Tree(a=Tree(parameters={"sinks": (8,)}))])),
        ),
    },
    "tp_plans/checks/report.py": {
        "CheckFailedError: does not fit the model": lambda: _plan({"head": ColwiseParallel()})
    },
    "tp_plans/checks/style_fit.py": {
        "CheckFailedError: has no stacked experts": lambda: _check({"lm_head": DispatchExperts()}, Own()),
        "CheckFailedError: is tied to another module": _tied,
        "CheckFailedError: cannot be divided over ep": lambda: refuse(
            tiny_model("Qwen3MoeForCausalLM", num_experts=7), {"tp": 2, "ep": 2}
        ),
        "CheckFailedError: tied weights laid out differently": lambda: refuse(
            tiny_model("LlamaForCausalLM", tied=True),
            {"tp": 2},
            plan={"lm_head": ColwiseParallel(use_local_output=False)},
        ),
        "CheckFailedError: ScaleInput is for": lambda: _plan({"lm_head": ScaleInput()}),
        "CheckFailedError: has no dim 2 to shard": lambda: _plan({"lm_head.weight": ParameterStyle(layout=Shard(2))}),
        "CheckFailedError: splits a matrix": lambda: _check({"layers": ColwiseParallel()}, Own()),
        "CheckFailedError: keeps its weight transposed": lambda: _check({"c_attn": ColwiseParallel()}, _transposed()),
        "CheckFailedError: build the embedding without max_norm": lambda: _check(
            {"embed": VocabParallelEmbedding()}, Tree(embed=nn.Embedding(16, 8, max_norm=1.0))
        ),
        "CheckFailedError: to gather; name": lambda: _plan({"lm_head": GatheredParameters(names=("gain",))}),
        "CheckFailedError: that a rule of": lambda: _check(
            {"mlp": GatheredParameters(names=("up.weight",)), "mlp.up": ColwiseParallel()}, _mlp()
        ),
        "CheckFailedError: write rules for the experts' own": lambda: _plan({"layers.0": ExpertsParallel()}),
        "CheckFailedError: have the experts as their first": lambda: _check(
            {"experts": ExpertsParallel()}, Tree(experts=Tree(parameters={**EXPERTS, "odd": (8, 4)}))
        ),
    },
}


def _narrow() -> Own:
    model = Own()
    model.lm_head = nn.Linear(8, 1)
    return model
