"""Random numbers of training forwards over ``tp``: equal for equal activations, different for different activations.

Dropout after a row-wise layer, a layer drop or the noise of a router must draw the same numbers on all ranks of ``tp``;
otherwise each rank trains another model, and replicated parameters diverge.  Users may seed ranks differently.  So a
forward begins from a seed that the ranks exchange, and restores each rank's random state afterwards.  Ranks have
different heads, and under sequence parallelism different tokens: their dropout draws from a seed of the rank.
Recomputed modules draw the numbers of their forward, because checkpoints keep the random state.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, cast

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

#: Attributes of modules with a probability or an amount of noise.
_RANDOM = re.compile("drop|jitter|noise")
_ATTENTION = "attention_dropout"
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: Functions that drop weights of heads if their first argument is ``[batch, heads, ..., ...]``.
_OF_HEADS = (nn.functional.dropout, nn.functional.scaled_dot_product_attention)
_DIMS_OF_HEADS = 4
#: Odd factors that make the seeds of ranks differ.
_OVER_CP, _OVER_TP = 2654435761, 40503
#: Number of seeds.
_SEEDS = 2**40


@dataclass(frozen=True)
class RandomStates(Step[None]):
    """Let the ranks of ``tp`` draw equal random numbers in training forwards of a model with dropout or other noise."""

    # Such a forward costs two all-gathers of 8 bytes over ``tp`` and two waits; a model in evaluation or with
    # probabilities of 0 costs none. Attention draws for the heads of its rank, except in compiled blocks. Ranks of
    # ``cp`` have different tokens and draw different numbers.
    tp: DeviceMesh | None = field(repr=False)

    def apply(self, model: nn.Module, setup: Setup, checked: None) -> None:
        """Put the exchange of seeds around the model's forward."""
        tp, cp, plan = self.tp, setup.meshes.cp, setup.plan
        sources = _sources(model)
        if tp is None or not computes(tp) or not sources:
            return
        states = Generators(tp.device_type)
        hooks = _SharedSeed(tp, 0 if cp is None else cp.get_local_rank(), sources, states)
        hook_model(model, "draws equal numbers over tp", hooks.before, hooks.after)
        if not isinstance(plan, Plan):
            return
        seeds = _RankSeeds(states, (tp.get_local_rank() + 1) * _OVER_TP)
        mixers = [mixer for mixer in setup.facts.token_mixers if is_sharded(mixer, plan)]
        plain = {mixer.module for mixer in mixers if _drops_only_weights(mixer)}
        others = {mixer.module for mixer in mixers} - plain
        groups: dict[tuple[Any, ...], list[nn.Module]] = defaultdict(list)
        for module in model.modules():
            if module in plain:
                groups[(_ATTENTION,), ()].append(module)
                continue
            heads = tuple(_names(module)) if module in others else ()
            tokens = tuple(_functional_amounts(module)) if plan.sequence_parallel else ()
            if heads or tokens:
                tests = (*[_divides_heads] * bool(heads), *[_divides_tokens] * bool(tokens))
                groups[(*heads, *tokens), tests].append(module)
        for (names, tests), modules in groups.items():
            wrap(modules, _RankDraws, seeds=seeds, names=names, tests=tests)


#: A module, the owner of an attribute (the module or its config), and the attribute's name.
_Source = tuple[nn.Module, Any, str]


def _sources(model: nn.Module) -> list[_Source]:
    sources: dict[tuple[int, str], _Source] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in _amounts(owner):
                sources.setdefault((id(owner), name), (module, owner, name))
    return list(sources.values())


def _amounts(owner: Any) -> Iterator[str]:
    if isinstance(owner, _DROPOUT):
        yield "p"
    for name, value in getattr(owner, "__dict__", {}).items():
        if type(value) in (int, float) and _RANDOM.search(name):
            yield name


def _names(module: nn.Module) -> Iterator[str]:
    """Yield the names of the probabilities of a module and its submodules, such as ``attn_dropout.p``."""
    yield from (f"config.{name}" for name in _amounts(getattr(module, "config", None)))
    for path, part in module.named_modules():
        yield from (f"{path}.{name}".removeprefix(".") for name in _amounts(part))


def _functional_amounts(module: nn.Module) -> Iterator[str]:
    """Yield the names of the probabilities with which a module's code may call functions of dropout."""
    read = {name for name in referenced_names(type(module)) if "dropout" in name}
    if isinstance(module, _DROPOUT):
        yield "p"
    elif any(not isinstance(getattr(module, name, None), nn.Module) for name in read):
        yield from (f"config.{name}" for name in _amounts(getattr(module, "config", None)))
        yield from _amounts(module)


def _drops_only_weights(mixer: TokenMixer) -> bool:
    """Return True for an attention with no other randomness than the dropout of its attention function."""
    if not uses_interface(mixer.cls):
        return False
    amounts = [(module, name) for module in mixer.module.modules() for name in _amounts(module)]
    return amounts == [(mixer.module, _ATTENTION)] and "dropout" not in referenced_names(mixer.cls)


def _draw() -> int:
    return int(torch.randint(_SEEDS, (), device="cpu"))


@dataclass(eq=False)
class _SharedSeed:
    """The hooks that give all ranks of ``tp`` one seed for a forward."""

    tp: DeviceMesh
    cp_rank: int
    sources: list[_Source]
    states: Generators
    rank_states: list[list[Tensor] | None] = field(default_factory=list)  # per running forward

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedSeed:
        return _SharedSeed(self.tp, self.cp_rank, deepcopy(self.sources, memo), self.states)

    def before(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if not any(module.training and (getattr(owner, name, 0) or 0) > 0 for module, owner, name in self.sources):
            self.rank_states.append(None)
            return
        seed = self._all_gather(_draw())[0]
        self.rank_states.append(self.states.get())
        self.states.seed(seed + self.cp_rank * _OVER_CP)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Restore this rank's states, and check that all ranks drew the same amount."""
        rank_states = self.rank_states.pop() if self.rank_states else None
        if rank_states is None:
            return
        drawn = self.states.get()
        self.states.set(rank_states)
        if output is None:  # the forward has raised an error
            return
        digests = self._all_gather(zlib.crc32(b"".join(state.numpy().tobytes() for state in drawn)))
        if len(set(digests)) > 1:
            raise ModelError(
                f"ranks {dist.get_process_group_ranks(self.tp.get_group())} of tp drew different amounts of random "
                "numbers in a training forward, so that their dropout or noise differs: set its probability to 0, or "
                "choose a tp that divides the heads and the lengths of rows"
            )

    def _all_gather(self, value: int) -> list[int]:
        local = torch.tensor([value], dtype=torch.int64, device=self.tp.device_type)
        gathered = local.new_empty(self.tp.size())
        dist.all_gather_into_tensor(gathered, local, group=self.tp.get_group())
        return cast(list[int], gathered.tolist())


@dataclass(frozen=True)
class _RankSeeds:
    """Seeds of one rank, drawn from the shared random state."""

    states: Generators
    offset: int

    def seeded(self) -> AbstractContextManager[None]:
        """Draw from the rank's next seed inside the ``with``; continue with the shared random state afterwards."""
        return self.states.seeded(_draw() + self.offset)


class _RankDraws(Wrapper):
    """Lets a module with a rank's heads or tokens draw from the rank's seed; ranks' parts may be unequal."""

    effect = "draws for a rank's heads or tokens"
    seeds: ClassVar[_RankSeeds]
    names: ClassVar[tuple[str, ...]]  # of the probabilities
    tests: ClassVar[tuple[Callable[..., bool], ...]]  # of the calls to seed; if empty, the whole forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward, module = super().forward, cast(Any, self)  # type: ignore[misc]
        if torch.compiler.is_compiling() or not module.training:
            return forward(*args, **kwargs)
        if not any((attrgetter(name)(module) or 0) > 0 for name in self.names):
            return forward(*args, **kwargs)
        with _SeededCalls(self.seeds, self.tests) if self.tests else self.seeds.seeded():
            return forward(*args, **kwargs)


class _SeededCalls(TorchFunctionMode):
    """Seeds calls that pass a test by the rank's seed; other calls draw from the shared random state."""

    def __init__(self, seeds: _RankSeeds, tests: tuple[Callable[..., bool], ...]) -> None:
        super().__init__()
        self.seeds, self.tests = seeds, tests

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(test(function, args, kwargs) for test in self.tests):
            return function(*args, **kwargs)
        with self.seeds.seeded():
            return function(*args, **kwargs)


def _divides_heads(function: Any, args: Any, _kwargs: Any) -> bool:
    """Return True for dropout of attention weights ``[batch, heads, ..., ...]``."""
    return function in _OF_HEADS and bool(args) and args[0].dim() == _DIMS_OF_HEADS


def _divides_tokens(function: Any, args: Any, kwargs: Any) -> bool:
    """Return True for dropout of activations that are sharded on the sequence."""
    activations = args[0] if args else kwargs.get("input")
    is_sharded = isinstance(activations, DTensor) and any(placement.is_shard() for placement in activations.placements)
    return is_sharded and "dropout" in getattr(function, "__name__", "")
