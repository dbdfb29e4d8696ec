"""Find the routers of a model: the modules that select the experts of each token.

A router is found by structure and by its code: a module beside or around the stacked experts of a mixture, with a
selecting operator in the code of its class.  Nothing is run, so the model may be on the meta device or sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, Literal

from torch import nn

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.structure import ModelStructure, inspect_model
from tp_plans.model_tree import ModelTree
from tp_plans.naming import EXPERT_COUNTS

#: Kinds of selection: ``torch.topk`` over the scores of all experts, or successive maxima (SparseMixer,
#: arXiv:2409.12136).
SelectionKind = Literal["topk", "sparsemixer"]
#: Names in the code of routers that select by product keys (PEER, arXiv:2407.04153).
_PRODUCT_KEYS = {"topk", "num_keys"}

#: Attributes of a router that count the experts of a token.
_TOP_K = ("top_k", "num_experts_per_tok", "moe_topk", "topk")
_TOP_K_OF_CONFIG = ("top_k_experts", "num_experts_per_tok", "moe_topk")
#: A buffer ``[vocabulary, experts per token]``: token ids decide, not scores (hash layers, arXiv:2106.04426).
_TABLE = "tid2eid"


#: An object, one of its attributes, and the attribute's integer value.
_Count = tuple[object, str, int]


@dataclass(frozen=True, eq=False)
class Router:
    """One router: a module that selects experts in its forward."""

    path: str
    module: nn.Module
    kind: SelectionKind
    experts: int
    top_k: int | None  # experts per token, ``None`` if no attribute has the number
    layer: int | None  # index in the stack of blocks, ``None`` outside of the stack
    counts: tuple[_Count, ...]  # the attributes of both numbers

    @property
    def experts_path(self) -> str:
        """The path of the experts beside the router."""
        return f"{self.path.rpartition('.')[0]}.experts".removeprefix(".")

    @property
    def share(self) -> float | None:
        """The part of the experts that a token uses, ``None`` if no attribute has the number."""
        return None if self.top_k is None else self.top_k / self.experts


@dataclass(frozen=True, eq=False)
class Routers:
    """The routers of one model."""

    by_path: dict[str, Router]  # in the order of the model
    tables: tuple[str, ...]  # paths of the routers that look experts up by token id
    layers: int  # blocks in the stack that the token embedding feeds, without multi-token heads

    def are_current(self) -> bool:
        """Return whether the model's numbers of experts are unchanged."""
        counts = [count for router in self.by_path.values() for count in router.counts]
        return [value for *_, value in counts] == [getattr(owner, name, None) for owner, name, _ in counts]

    def inside(self, path: str) -> Routers:
        """Return the routers at a path and below it."""
        below = {inner: router for inner, router in self.by_path.items() if f"{inner}.".startswith(f"{path}.")}
        return Routers(below, (), self.layers)


def find_routers(model: nn.Module) -> Routers:
    """Find the routers of every mixture of a model, on any device, parallelized or not."""
    structure = inspect_model(model)
    for path, module in structure.tree.modules.items():
        if _names(type(module)) >= _PRODUCT_KEYS:  # type: ignore[arg-type]  # mypy: type[Module] is hashable
            raise ModelError(
                f"{path} ({type(module).__name__}) selects experts by product keys (PEER): its routes can be neither "
                "recorded nor replayed"
            )
    routers = routers_of(structure)
    if not routers.by_path:
        raise ModelError(
            f"{type(model).__name__} has no router that selects experts: routes are recorded and replayed in mixtures "
            "of experts only"
        )
    return routers


def routers_of(structure: ModelStructure) -> Routers:
    """Return the routers of a model, perhaps none."""
    tree = structure.tree
    routers, tables = {}, []
    for mixture in _mixtures(tree):
        parts = [_inside_adapters(tree, path) for path in (*tree.children[mixture], mixture)]
        candidates = [path for path in parts if selection_of(type(tree.modules[path]))]
        paths = [path for path in tree.children[mixture] if hasattr(tree.modules[path], _TABLE)]
        if paths and not candidates:
            tables += paths
            continue
        if len(candidates) > 1 and candidates[-1] == mixture:
            candidates.pop()
        if len(candidates) != 1:
            raise ModelError(_unidentified(tree, mixture, candidates))
        routers[candidates[0]] = _router(structure, candidates[0], mixture)
    heads = sum(hasattr(tree.modules[block], "eh_proj") for block in structure.decoder)
    return Routers(routers, tuple(tables), len(structure.decoder) - heads)


def selection_of(cls: type[nn.Module]) -> SelectionKind | None:
    """Return the kind of selection in a module class's code, ``None`` if the code calls no selecting operator."""
    names = _names(cls)  # type: ignore[arg-type]  # mypy: type[Module] is hashable
    if "sparsemixer" in names:  # transformers' function for PhiMoE
        return "sparsemixer"
    return "topk" if "topk" in names and not names >= _PRODUCT_KEYS else None


def _mixtures(tree: ModelTree) -> Iterator[str]:
    for path in tree.modules:
        is_wrapper = f"{path}.base_layer" in tree.modules  # of peft
        if not is_wrapper and any(_are_experts(tree, child) for child in tree.children[path]):
            yield path


def _inside_adapters(tree: ModelTree, path: str) -> str:
    while f"{path}.base_layer" in tree.modules:
        path = f"{path}.base_layer"
    return path


def _are_experts(tree: ModelTree, path: str) -> bool:
    named = path.rpartition(".")[2] == "experts"
    return tree.is_expert_stack(path) or (named and bool(_count_below(tree, path)))


def _count_below(tree: ModelTree, path: str) -> int:
    """Return the number of experts in a module, 0 for a module that is neither a stack nor a list of experts."""
    if tree.is_numbered(path):
        return len(tree.children[path])
    owners = (path, *tree.below(path))
    stacked = (p.shape[0] for owner in owners for p in tree.own_parameters(owner).values() if p.ndim == 3)
    return max(stacked, default=0)  # identity experts may have a row in one weight and none in the next


def _router(structure: ModelStructure, path: str, mixture: str) -> Router:
    tree = structure.tree
    module, around = tree.modules[path], tree.modules[mixture]
    kind = selection_of(type(module))
    told = [*_counts((module, around), EXPERT_COUNTS)]
    counts = [count for *_, count in told]
    counts += [_count_below(tree, child) for child in tree.children[mixture] if _are_experts(tree, child)]
    if kind is None or not counts:
        raise ModelError(f"{path} ({type(module).__name__}) has none of {', '.join(EXPERT_COUNTS)}: set one of them")
    blocks = structure.decoder
    layer = next((index for index, block in enumerate(blocks) if f"{path}.".startswith(f"{block}.")), None)
    configs = [each.config for each in (module, around) if hasattr(each, "config")]
    each_token = [*_counts((module, around), _TOP_K), *_counts(configs, _TOP_K_OF_CONFIG)][:1]
    top_k = each_token[0][2] if each_token else None
    return Router(path, module, kind, max(counts), top_k, layer, (*told, *each_token))


def _counts(owners: Iterable[object], names: Iterable[str]) -> Iterator[_Count]:
    names = tuple(names)
    for owner in owners:
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                yield owner, name, value


def _unidentified(tree: ModelTree, mixture: str, candidates: list[str]) -> str:
    name = f"{mixture} ({type(tree.modules[mixture]).__name__})"
    if candidates:
        modules = ", ".join(f"{path} ({type(tree.modules[path]).__name__})" for path in candidates)
        return f"{name} has several modules that may select its experts: {modules}; none can be chosen"
    children = ", ".join(type(tree.modules[path]).__name__ for path in tree.children[mixture])
    return (
        f"{name} holds experts, and neither its code nor the code of its children ({children}) calls torch.topk: the "
        "selection cannot be identified, so its routes can be neither recorded nor replayed"
    )


@cache
def _names(cls: type) -> frozenset[str]:
    """Return the names that the methods of a class use, without methods of torch's base classes."""
    # A base class's method counts unless an earlier class overrides it without a call of ``super``.
    names: set[str] = set()
    replaced: set[str] = set()
    for base in cls.__mro__:
        if base is object or base.__module__.partition(".")[0] == "torch":
            continue
        for name, value in vars(base).items():
            function: Any = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
            code = getattr(function, "__code__", None)
            if isinstance(code, CodeType) and name not in replaced:
                used = set(_names_of_code(code))
                names |= used
                replaced |= set() if "super" in used else {name}
    return frozenset(names)


def _names_of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of_code(constant)
