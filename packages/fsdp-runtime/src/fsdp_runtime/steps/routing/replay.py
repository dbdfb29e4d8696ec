"""Record and replay routes: ``record_routes`` and ``replay_routes``.

Sources of the method: routing replay, arXiv:2507.18071 (section 5.3); from the generator, arXiv:2510.11370.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_runtime._torch_compat import fingerprint, hooked_before
from fsdp_runtime._transformers_compat.models import checkpointing_through
from fsdp_runtime.errors import ModelError, RoutesError
from fsdp_runtime.model.stages import stages_of, whole_entries, with_absent_tensors
from fsdp_runtime.model.state import state_entries
from fsdp_runtime.runtime_state import runtime_state
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.steps.compiled_blocks import compile_again, leave_to_python
from fsdp_runtime.steps.context.attention import ContextAttention
from fsdp_runtime.steps.context.exchange import gather_tokens
from fsdp_runtime.steps.context.step import attention_of, under_context_parallelism
from fsdp_runtime.steps.routing.routers import Router, Routers, find_routers
from fsdp_runtime.steps.routing.routes import Routes, checked_routes, fill_recorded
from fsdp_runtime.steps.routing.session import CarriedRoutes, Session, activated
from fsdp_runtime.wrap import hook_forward
from tp_plans.model_tree import ancestors

logger = logging.getLogger(__name__)


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Routes]:
    """Record the experts that every mixture of a model selects for each token of one forward.

    Recording does not change the forward's outputs and gradients; compiled modules run in Python.  The routes are
    filled in when the context ends; under context parallelism the end gathers the routes over ``cp``, so every rank
    must reach the end.  For pipeline stages the context records one schedule: every rank gets the routes of all stages,
    and the tokens of its micro-batches follow one another.

    Args:
        model: the model, parallelized or not.

    Raises:
        ModelError: the model has no mixture, a mixture's selection cannot be identified, or a mixture is inside a
            result of ``torch.compile``.
        RoutesError: a router runs twice: one context records one forward, or one schedule.

    Example:
        >>> import torch, transformers
        >>> from fsdp_runtime import record_routes, replay_routes
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        ... )
        >>> model = transformers.MixtralForCausalLM(config)
        >>> tokens = torch.randint(32, (1, 5))
        >>> with record_routes(model) as routes, torch.no_grad():
        ...     logits = model(tokens).logits
        >>> routes.stacked().shape  # [layers, tokens, k]
        torch.Size([1, 5, 2])
        >>> with replay_routes(model, routes):
        ...     again = model(tokens).logits
        >>> torch.equal(again, logits)
        True
    """
    routes = Routes()
    routers = _routers_of(model)
    tokens = _Tokens(model)
    session = Session(routers, stages=tokens.stages)
    with _session(model, session, tokens):
        yield routes
    fill_recorded(routes, tokens.gathered(session))


@contextmanager
def replay_routes(model: nn.Module, routes: Routes | Mapping[str, Tensor] | Tensor) -> Iterator[None]:
    """Route the tokens of every forward by recorded routes of a forward or by a generator's routes.

    Each router computes its scores as usual and weights the replayed experts by the scores, with the architecture's
    normalisation and scaling: gradients reach the router.  A part that is recomputed in backward, inside the context or
    after it, selects its forward's experts again.  Compiled modules run in Python inside the context.

    Args:
        model: the model, parallelized or not; in pipeline stages, the routes have the tokens of all
            micro-batches of a schedule, one after another.
        routes: a result of :func:`record_routes`; or a mapping from a router's path to integers ``[tokens, k]``; or one
            tensor ``[layers, tokens, k]`` with a layer for each router or for each block of the model (layers of
            blocks without a mixture are not read), as from :func:`routes_from_generator`.  The tokens are this rank's
            input ``[batch, length]``, row after row; under context parallelism the full sequences, in their order.
            -1 marks a missing route: that token, or a router that the mapping lacks, is routed as usual.

    Raises:
        ModelError: the model has no mixture, a mixture's selection cannot be identified, or a mixture is inside a
            result of ``torch.compile``.
        RoutesError: the routes have another number of layers, tokens or experts than the model, or an expert that the
            model lacks.

    Example:
        >>> import torch, transformers
        >>> from fsdp_runtime import replay_routes
        >>> config = transformers.MixtralConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        ... )
        >>> model = transformers.MixtralForCausalLM(config)
        >>> routes = torch.tensor([[[0, 1], [2, 3], [-1, -1]]])  # one layer, three tokens, the last routed as usual
        >>> with replay_routes(model, routes):
        ...     loss = model(torch.tensor([[5, 6, 7]])).logits.logsumexp(-1).sum()
    """
    routers = _routers_of(model)
    layers = checked_routes(routers, routes)
    tokens = _Tokens(model)

    def local(router: Router) -> Tensor | None:
        return tokens.local(layers[router.path]) if router.path in layers else None

    complete = isinstance(routes, Routes) and routes.is_complete
    holes = not complete and any(bool((ids < 0).any()) for ids in layers.values())
    session = Session(routers, local, has_holes=holes, stages=tokens.stages)
    tokens.replayed = next(map(len, layers.values()), None)
    with _session(model, session, tokens):
        yield
    if not session.recorded and tokens.stages is None:
        logger.warning("replay_routes: no router of %s ran inside the context", type(model).__name__)


@contextmanager
def _session(model: nn.Module, session: Session, tokens: _Tokens) -> Iterator[None]:
    # Compiled code selects without the routers' hooks, so compiled modules run in Python.
    compiled = leave_to_python(runtime_state(model).routers.around.values())
    if compiled:
        logger.info("routes: %d compiled modules of %s run in Python", len(compiled), type(model).__name__)
    try:
        with tokens.counted(), checkpointing_through(model, CarriedRoutes().bind), activated(session):
            yield
    finally:
        compile_again(compiled)


def _routers_of(model: nn.Module) -> Routers:
    """Return the model's routers from a cache; refuse modules that hide their code or their recomputations."""
    state, modules = runtime_state(model), fingerprint(model)
    known: _Found | None = state.routers
    if known is None or known.modules != modules or not known.routers.are_current():
        known = state.routers = _find(model, modules)
    for path, module in known.around.items():
        if type(module).__name__ == "OptimizedModule":
            raise ModelError(
                f"{path or 'the model'} is an output of torch.compile, and its code selects without routers: compile "
                "with parallelize(..., compile=True) or module.compile()"
            )
    return known.routers


class _Found(NamedTuple):
    """The routers of a model, the modules around them by path, its pipeline stages, and its fingerprint."""

    modules: Any
    routers: Routers
    around: dict[str, nn.Module]
    stages: Any


def _find(model: nn.Module, modules: Any) -> _Found:
    with with_absent_tensors(whole_entries(model, state_entries(model))):
        routers = find_routers(model)
    paths = {path for router in routers.by_path for path in ("", router, *ancestors(router))}
    by_path = dict(model.named_modules())
    for path, module in by_path.items():
        if type(module).__name__ == "CheckpointWrapper":
            raise ModelError(
                f"{path} is wrapped by torch's CheckpointWrapper, and its recomputations would route again: use "
                "activation_checkpointing of parallelize, or gradient_checkpointing_enable of transformers"
            )
    around = {path: module for path, module in by_path.items() if path in paths}
    return _Found(modules, routers, around, stages_of(model))


class _Tokens:
    """This rank's tokens among the tokens of the full sequences; all tokens without context parallelism."""

    def __init__(self, model: nn.Module) -> None:
        self.model = next((module for module in hooked_before(model) if under_context_parallelism(module)), None)
        self.attention: ContextAttention | None = None if self.model is None else attention_of(self.model)
        self.batch = self.length = 0
        self.stages = runtime_state(model).routers.stages
        self.replayed: int | None = None  # tokens of replayed routes
        if self.stages is not None and self.model is not None:
            raise ModelError("routes of pipeline stages are not sharded over cp: use a mesh without cp, or without pp")

    @contextmanager
    def counted(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.stages is not None:
                self.stages.checks.append(self._check)
                stack.callback(self.stages.checks.remove, self._check)
            elif self.model is not None:
                stack.callback(hook_forward(self.model, "counts tokens for routes", before=self._count).remove)
            yield

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's rows ``[tokens / cp, k]`` of ``[tokens, k]``, in stages the rows of one micro-batch."""
        if self.stages is not None:
            place = self.stages.run.tokens
            return full[place.start : place.start + place.number]
        if self.attention is None:
            return full
        layout = self.attention.layout(self.length)
        if len(full) != self.batch * layout.length:
            raise RoutesError(
                f"routes of {len(full)} tokens for {self.batch} sequences of {layout.length} over cp={layout.ranks}: "
                "give the routes of all tokens of the full sequences, in their order"
            )
        return layout.shard(full.reshape(self.batch, layout.length, full.shape[-1])).flatten(0, 1)

    def gathered(self, session: Session) -> dict[str, Tensor]:
        """Return the rows of all ranks, in the order of the full sequences; one all-gather."""
        local: dict[str, Tensor] = session.recorded
        if self.stages is not None:
            return _of_all_stages(session)
        if self.attention is None or not local:
            return dict(local)
        layout = self.attention.layout(self.length)
        widths = [ids.shape[-1] for ids in local.values()]
        ids = torch.cat([ids.to(torch.int32) for ids in local.values()], dim=-1)
        full = gather_tokens(ids.view(self.batch, -1, sum(widths)), layout, self.attention.group, dim=1).flatten(0, 1)
        parts = torch.split_with_sizes(full, widths, dim=-1)
        return {path: rows.to(ids.dtype) for (path, ids), rows in zip(local.items(), parts, strict=True)}

    def _check(self, tokens: int) -> None:
        if self.replayed not in (None, tokens):
            raise RoutesError(
                f"routes of {self.replayed} tokens for micro-batches of {tokens} tokens: give the routes of all "
                "micro-batches of the schedule, one after another"
            )

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if tokens is not None:
            self.batch, self.length = tokens.shape[:2]


def _of_all_stages(session: Session) -> dict[str, Tensor]:
    """Return the routes of all micro-batches and stages, on every rank; one broadcast for each router."""
    recorded: dict[str, list[Tensor]] = {}
    for (_, path), ids in sorted(session.recorded.items(), key=lambda item: item[0]):
        recorded.setdefault(path, []).append(ids)
    own = {path: torch.cat(ids) for path, ids in recorded.items()}
    device, group = session.stages.mesh.device_type, session.stages.mesh.get_group()
    forms = all_gather_objects(ModelRanks((group,)), {path: (ids.shape, ids.dtype) for path, ids in own.items()})
    full = {}
    for rank, by_path in forms.items():
        for path, (shape, dtype) in by_path.items():
            ids = own[path] if path in own else torch.empty(shape, dtype=dtype, device=device)
            wide = ids.int()  # NCCL sends no int16
            dist.broadcast(wide, rank, group=group)
            full[path] = wide.to(dtype)
    return {path: full[path] for path in session.routers.by_path if path in full}
