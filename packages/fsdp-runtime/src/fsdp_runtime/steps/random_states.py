"""Random numbers of training forwards over ``tp``: equal on ranks with the same activations, different for their heads.

Dropout after a row-wise layer, a layer drop or the noise of a router must draw alike on all ranks of ``tp``; otherwise
each rank trains on another model, and replicated parameters diverge.  Users seed ranks as they like, so that every
forward begins from a seed that the ranks exchange, and each rank has its own random state back afterwards.  Recomputed
modules draw what they drew in forward, as checkpoints keep the random state.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_runtime.errors import ModelError
from fsdp_runtime.model.generators import Generators
from fsdp_runtime.model.token_mixers import TokenMixer
from fsdp_runtime.setup import Setup
from fsdp_runtime.step import Step
from fsdp_runtime.steps.context.methods import is_sharded
from fsdp_runtime.steps.documents.isolation import uses_interface
from fsdp_runtime.wrap import Wrapper, hook_model, wrap
from tp_plans import Plan
from tp_plans.runtime import computes, referenced_names

#: Attributes of modules that say how much is random.
_RANDOM = re.compile("drop|jitter|noise")
_ATTENTION = "attention_dropout"
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: Functions that drop weights of heads where their first argument is ``[batch, heads, ..., ...]``.
_OF_HEADS = (nn.functional.dropout, nn.functional.scaled_dot_product_attention)
_DIMS_OF_HEADS = 4
#: Odd factors that keep the seeds of ranks apart.
_OVER_CP, _OVER_TP = 2654435761, 40503
#: Seeds that the draws of ranks are taken from.
_SEEDS = 2**40


@dataclass(frozen=True)
class RandomStates(Step[None]):
    """Let the ranks of ``tp`` draw alike in training forwards of a model with dropout or other noise."""

    # One all-gather of 8 bytes over ``tp`` and a wait for it before such a forward, and another after it; none for a
    # model whose probabilities are 0, or that evaluates. Attention draws for its own heads, except in compiled blocks.
    # Ranks of ``cp``, which have different tokens, draw differently.
    tp: DeviceMesh | None = field(repr=False)

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Put the exchange of seeds around the model's forward."""
        tp, cp = self.tp, setup.meshes.cp
        sources = _sources(model)
        if tp is None or not computes(tp) or not sources:
            return
        states = Generators(tp.device_type)
        hooks = _SameDraws(tp, 0 if cp is None else cp.get_local_rank(), sources, states)
        hook_model(model, "draws alike over tp", hooks.before, hooks.after)
        offset = (tp.get_local_rank() + 1) * _OVER_TP
        plan = setup.plan
        sharded = [mixer for mixer in setup.facts.token_mixers if isinstance(plan, Plan) and is_sharded(mixer, plan)]
        alone = {mixer.module for mixer in sharded if _drops_weights_alone(mixer)}
        wrap(alone, _OwnHeads, states=states, offset=offset)
        others: dict[tuple[str, ...], list[nn.Module]] = defaultdict(list)
        for mixer in sharded:
            if mixer.module not in alone and (names := tuple(_names(mixer.module))):
                others[names].append(mixer.module)
        for names, modules in others.items():
            wrap(modules, _OwnWeights, states=states, offset=offset, amounts=names)
        if isinstance(plan, Plan) and plan.sequence_parallel:
            dropouts = [module for module in model.modules() if isinstance(module, _DROPOUT)]
            wrap(dropouts, _OwnTokens, states=states, offset=offset)
            functional: dict[tuple[str, ...], list[nn.Module]] = defaultdict(list)
            for module in model.modules():
                if module not in alone and (amounts := tuple(_functional_amounts(module))):
                    functional[amounts].append(module)
            for amounts, modules in functional.items():
                wrap(modules, _OwnTokensOfFunctions, states=states, offset=offset, amounts=amounts)


#: A module, it or its config, and an attribute that says how much the module draws.
_Source = tuple[nn.Module, Any, str]


def _sources(model: nn.Module) -> list[_Source]:
    """Return what may draw random numbers in a model."""
    found: dict[tuple[int, str], _Source] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in _amounts(owner):
                found.setdefault((id(owner), name), (module, owner, name))
    return list(found.values())


def _amounts(owner: Any) -> Iterator[str]:
    if isinstance(owner, _DROPOUT):
        yield "p"
    for name, value in getattr(owner, "__dict__", {}).items():
        if type(value) in (int, float) and _RANDOM.search(name):
            yield name


def _names(module: nn.Module) -> Iterator[str]:
    """Yield the names of the amounts that a module and those below it may draw by, as ``attn_dropout.p``."""
    yield from (f"config.{name}" for name in _amounts(getattr(module, "config", None)))
    for path, part in module.named_modules():
        yield from (f"{path}.{name}".removeprefix(".") for name in _amounts(part))


def _functional_amounts(module: nn.Module) -> Iterator[str]:
    """Yield the names of the amounts by which a module's own code may call ``F.dropout``."""
    read = {name for name in referenced_names(type(module)) if "dropout" in name}
    if not isinstance(module, _DROPOUT) and any(not isinstance(getattr(module, n, None), nn.Module) for n in read):
        yield from (f"config.{name}" for name in _amounts(getattr(module, "config", None)))
        yield from _amounts(module)


def _drops_weights_alone(mixer: TokenMixer) -> bool:
    """Return True for an attention that draws nothing but what its attention function drops."""
    if not uses_interface(mixer.cls):
        return False
    amounts = [(module, name) for module in mixer.module.modules() for name in _amounts(module)]
    return amounts == [(mixer.module, _ATTENTION)] and "dropout" not in referenced_names(mixer.cls)


def _draw() -> int:
    return int(torch.randint(_SEEDS, (), device="cpu"))


@dataclass(eq=False)
class _SameDraws:
    tp: DeviceMesh
    cp_rank: int
    sources: list[_Source]
    states: Generators
    own: list[list[Tensor] | None] = field(default_factory=list)  # the states of this rank while forwards run

    def __deepcopy__(self, memo: dict[int, Any]) -> _SameDraws:
        return _SameDraws(self.tp, self.cp_rank, deepcopy(self.sources, memo), self.states)

    def before(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Begin from the seed of the first rank of ``tp``."""
        if not any(module.training and (getattr(owner, name, 0) or 0) > 0 for module, owner, name in self.sources):
            self.own.append(None)
            return
        seed = self._all_gather(_draw())[0]
        self.own.append(self.states.get())
        self.states.seed(seed + self.cp_rank * _OVER_CP)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Check that all ranks drew as much, and give this rank's states back."""
        own = self.own.pop() if self.own else None
        if own is None:
            return
        drawn = self.states.get()
        self.states.set(own)
        if output is None:  # the forward has raised an error
            return
        digests = self._all_gather(zlib.crc32(b"".join(state.numpy().tobytes() for state in drawn)))
        if len(set(digests)) > 1:
            raise ModelError(
                f"ranks {dist.get_process_group_ranks(self.tp.get_group())} of tp drew different amounts of random "
                "numbers in a training forward, so that their dropout or noise differs: set its probability to 0, or "
                "choose a tp and lengths of rows that divide the dims that it is drawn for"
            )

    def _all_gather(self, value: int) -> list[int]:
        own = torch.tensor([value], dtype=torch.int64, device=self.tp.device_type)
        gathered = own.new_empty(self.tp.size())
        dist.all_gather_into_tensor(gathered, own, group=self.tp.get_group())
        found: list[int] = gathered.tolist()
        return found


class _OwnHeads(Wrapper):
    """Lets an attention with a rank's heads draw apart from other ranks; what follows draws alike again."""

    effect = "draws for own heads"
    states: ClassVar[Generators]
    offset: ClassVar[int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling() or not self.training or not getattr(self, _ATTENTION):  # type: ignore[attr-defined]
            return forward(*args, **kwargs)
        with self.states.seeded(_draw() + self.offset):
            return forward(*args, **kwargs)


class _OwnWeights(Wrapper):
    """The same of an attention that draws for the residual stream too: weights ``[batch, heads, ..., ...]`` alone."""

    effect = _OwnHeads.effect
    states: ClassVar[Generators]
    offset: ClassVar[int]
    amounts: ClassVar[tuple[str, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        draws = self.training and any((attrgetter(name)(self) or 0) > 0 for name in self.amounts)  # type: ignore[attr-defined]
        if torch.compiler.is_compiling() or not draws:
            return forward(*args, **kwargs)
        with _DrawsForHeads(self.states, self.offset):
            return forward(*args, **kwargs)


class _OwnTokens(Wrapper):
    """Lets a dropout draw apart for activations that are sharded on the sequence; ranks may have unequal parts."""

    effect = "draws for own tokens"
    states: ClassVar[Generators]
    offset: ClassVar[int]

    def forward(self, activations: Tensor) -> Tensor:
        forward = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling() or not (self.training and self.p and _is_divided(activations)):  # type: ignore[attr-defined]
            return forward(activations)  # type: ignore[no-any-return]
        with self.states.seeded(_draw() + self.offset):
            return forward(activations)  # type: ignore[no-any-return]


def _is_divided(activations: Any) -> bool:
    return isinstance(activations, DTensor) and any(placement.is_shard() for placement in activations.placements)


class _OwnTokensOfFunctions(Wrapper):
    """The same of a module that calls ``F.dropout`` between its layers."""

    effect = _OwnTokens.effect
    states: ClassVar[Generators]
    offset: ClassVar[int]
    amounts: ClassVar[tuple[str, ...]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        draws = self.training and any((attrgetter(name)(self) or 0) > 0 for name in self.amounts)  # type: ignore[attr-defined]
        if torch.compiler.is_compiling() or not draws:
            return forward(*args, **kwargs)
        with _DrawsForTokens(self.states, self.offset):
            return forward(*args, **kwargs)


class _DrawsForTokens(TorchFunctionMode):
    """Dropout of activations that are sharded on the sequence draws from a seed of this rank."""

    def __init__(self, states: Generators, offset: int) -> None:
        super().__init__()
        self.states, self.offset = states, offset

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.dropout or not _is_divided(args[0] if args else kwargs.get("input")):
            return function(*args, **kwargs)
        with self.states.seeded(_draw() + self.offset):
            return function(*args, **kwargs)


class _DrawsForHeads(TorchFunctionMode):
    """Functions that drop weights of heads draw from a seed of this rank, all others from that of all ranks."""

    def __init__(self, states: Generators, offset: int) -> None:
        super().__init__()
        self.states, self.offset = states, offset

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _OF_HEADS or not args or args[0].dim() != _DIMS_OF_HEADS:
            return function(*args, **(kwargs or {}))
        with self.states.seeded(_draw() + self.offset):
            return function(*args, **(kwargs or {}))
