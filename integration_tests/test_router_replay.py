"""Router replay in every mixture of the zoo: in one process, and on ranks against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.shrink import VOCAB
from coverage.table import entries, tiny_model
from fsdp_runtime import ModelError, parallelize, record_routes, replay_routes, sequence_layout
from fsdp_runtime.errors import RoutesError
from fsdp_runtime.steps import Routes
from fsdp_runtime.steps.routing.routers import find_routers
from harness.float64 import compute_in_float64
from harness.options import CONTIGUOUS, load_balancer_of
from harness.parity import largest, logits_of, mesh_for, own_part
from harness.ranks import RankPool

#: Every row of the architecture matrix that is a mixture of experts.
MIXTURES = (
    """
afmoe  aria_text  axk1  axk2  bailing_hybrid  beam  cohere2_moe  deepseek_v2  deepseek_v3  deepseek_v32  deepseek_v4
dots1  dots3_note  dots3_note_text  ernie4_5_moe  exaone_moe  flex_olmo  flint  gemma4  gemma4_text  glm4_moe
glm4_moe_lite  glm_moe_dsa  granitemoe  granitemoe_swa  granitemoehybrid  granitemoeshared  hunyuan_v1_moe  hy_v3  hy_v4
inkling2_text  inkling_text  jamba  kimi_linear  kolibri1  laguna  lfm2_moe  llama4  llama4_text  longcat_flash  mellum
mimo_v2_flash  minimax  minimax_m2  minimax_m3_vl_text  mixtral  nemotron_h  olmoe  phimoe  qwen2_moe  qwen3_5_moe
qwen3_5_moe_text  qwen3_moe  qwen3_next  qwen4_exp  qwen4_exp_text  solar_open  deepseek_v3, whole queries
gemma4_text, keys as values  mixtral, batched  qwen3_5_moe, vision
""".strip()
    .replace("\n", "  ")
    .split("  ")
)

#: Those of the default tests: every kind of router, and mixtures next to every kind of token mixer.
KINDS = {
    *(
        "deepseek_v3",
        "deepseek_v4",
        "ernie4_5_moe",
        "gemma4_text",
    ),
    *("granitemoe", "jamba", "llama4_text", "longcat_flash", "mixtral", "nemotron_h", "phimoe"),
}

BATCH, LENGTH = 4, 8
TOKENS = BATCH * LENGTH
#: Relative to the largest element; in float64 throughout.
BOUND = 1e-12


def _ids() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def _weights(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))


def _foreign_routes(model: nn.Module) -> Routes:
    """Routes that are not the model's own, with every seventh token missing."""
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for path, router in find_routers(model).by_path.items():
        ids = torch.rand(TOKENS, router.experts, generator=generator).topk(router.top_k or 2).indices
        layers[path] = ids.masked_fill(torch.arange(TOKENS)[:, None] % 7 == 0, -1)
    return Routes(layers)


def _step(model: nn.Module, context: AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
    """The logits, the loss and every gradient of one forward and backward."""
    model.zero_grad()
    with context or nullcontext():
        logits = model(input_ids=_ids(), use_cache=False).logits
        loss = (logits * _weights(logits)).sum()
        loss.backward()
    gradients = {path: each.grad.clone() for path, each in model.named_parameters() if each.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow]) for name in MIXTURES]
)
def test_own_routes_change_no_bit_and_routers_learn_under_foreign_ones(name: str) -> None:
    model = tiny_model(entries()[name])
    plain = _step(model)
    with record_routes(model) as routes:
        recorded = _step(model)
    replayed = _step(model, replay_routes(model, routes))
    assert plain.keys() == recorded.keys() == replayed.keys()
    for path, expected in plain.items():
        assert torch.equal(recorded[path], expected), path
        assert torch.equal(replayed[path], expected), path

    foreign, hole = _foreign_routes(model), torch.arange(TOKENS)[:, None] % 7 == 0
    foreign = {path: torch.where(hole, torch.arange(ids.shape[-1]), ids) for path, ids in foreign.items()}
    model.double()  # the parts that a model keeps in float32 too
    with compute_in_float64():
        found = _step(model, replay_routes(model, foreign))
        _assert_routers_learn(model, foreign, found)


def _assert_routers_learn(model: nn.Module, routes: Routes, found: dict[str, Tensor]) -> None:
    """Compare the gradient of all routers with the change of the loss along it."""
    parameters = {
        f"{router}.{name}": parameter
        for router in routes
        for name, parameter in model.get_submodule(router).named_parameters()
        if f"{router}.{name}" in found
    }
    for router in routes:
        assert any(path.startswith(router) and found[path].any() for path in parameters), f"{router} does not learn"
    norm = torch.stack([found[path].square().sum() for path in parameters]).sum().sqrt()
    step, losses = 1e-5, []
    for move in (step, -2 * step):
        with torch.no_grad():
            for path, parameter in parameters.items():
                parameter += move * found[path] / norm
            with replay_routes(model, routes):
                logits = model(input_ids=_ids(), use_cache=False).logits
            losses.append((logits * _weights(logits)).sum())
    slope = (losses[0] - losses[1]) / (2 * step)
    # Central differences err by about step^2 times the third derivative, and by 1e-16 / step.
    assert slope.item() == pytest.approx(norm.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_models_without_experts_have_no_routes(name: str) -> None:
    with pytest.raises(ModelError, match="no router"), record_routes(tiny_model(entries()[name])):
        pass


def test_record_routes_refuses_product_keys() -> None:
    with pytest.raises(ModelError, match="by product keys"), record_routes(tiny_model(entries()["doge, mixture"])):
        pass


#: What a model is parallelized with on two ranks.
MODES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "TP": ({"tp": 2}, {}),
    "SP, recomputed": ({"tp": 2}, {"sequence_parallel": True, "activation_checkpointing": "block"}),
    "dp_shard, recomputed": ({"dp_shard": 2}, {"activation_checkpointing": "mlp"}),
    "cp, recomputed": ({"cp": 2}, {"activation_checkpointing": "selective"}),
    "cp, contiguous": ({"cp": 2}, CONTIGUOUS),
}
RANKS = {
    "mixtral": [*MODES],  # softmax, then top-k, then normalisation
    "deepseek_v3": ["SP, recomputed", "dp_shard, recomputed", "cp, contiguous"],  # groups, and a bias that selects
    "phimoe": ["TP", "dp_shard, recomputed"],  # one maximum after another
    "gemma4_text": ["SP, recomputed"],  # the router beside attention; a scale for each expert
    "longcat_flash": ["TP", "dp_shard, recomputed"],  # identity experts
    "llama4_text": ["TP", "cp, recomputed"],  # experts that run all tokens
    "granitemoe": ["TP", "cp, recomputed"],  # a softmax after top-k
}
REDUCED = {("mixtral", "TP"), ("mixtral", "cp, contiguous")}
REDUCED |= {("deepseek_v3", "SP, recomputed"), ("phimoe", "dp_shard, recomputed")}


def _on_two_ranks(name: str, mode: str) -> dict[str, float]:
    """The errors of logits, gradients and recorded routes of this rank against one process, relative."""
    axes, options = MODES[mode]
    mesh = mesh_for(axes)
    reference = tiny_model(entries()[name]).double()  # the parts that a model keeps in float32 too
    routes = _foreign_routes(reference)
    candidate = copy.deepcopy(reference)
    with compute_in_float64():
        with replay_routes(reference, routes):
            expected = _step(reference)
        with record_routes(reference) as own:
            reference(input_ids=_ids(), use_cache=False)
        candidate = parallelize(candidate, mesh, **options, **entries()[name].options)
        inputs, rows, weights = {"input_ids": _ids()}, slice(None), _weights(expected["logits"])
        if "dp_shard" in axes:
            rank = mesh.get_local_rank("dp_shard")
            rows = slice(BATCH // 2 * rank, BATCH // 2 * (rank + 1))
        shard = _shard(mesh, options) if "cp" in axes else (lambda full: full)
        inputs = {"input_ids": shard(_ids()[rows])}
        tokens = torch.arange(TOKENS).view(BATCH, LENGTH)[rows].flatten()
        with record_routes(candidate) as recorded, torch.no_grad():
            candidate(**inputs, use_cache=False)
        with replay_routes(candidate, routes.take(tokens)):
            logits = logits_of(candidate, inputs)
            loss = (logits * shard(weights[rows])).sum() * (2 if "dp_shard" in axes else 1)  # FSDP averages
        loss.backward()  # recomputes after the context
    errors = {path: float((own[path][tokens] != ids).any()) for path, ids in recorded.items()}
    errors["logits"] = _error(logits.detach(), shard(expected["logits"][rows]))
    for path, parameter in candidate.named_parameters():
        errors |= {path: _gradient_error(path, parameter, reference, expected.get(path))}
    assert recorded.keys() == own.keys()
    return errors


def _shard(mesh: Any, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return sequence_layout(mesh, LENGTH, load_balancer=load_balancer_of(options)).shard


def _gradient_error(path: str, parameter: Tensor, reference: nn.Module, wanted: Tensor | None) -> float:
    found = parameter.grad
    if found is None or wanted is None:
        return 0.0 if found is wanted or largest(_local(found if wanted is None else wanted)) < BOUND else float("inf")
    if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("tp",):
        # Fused weights lie in other orders than their placements say: each element is found by its unique value.
        whole = reference.get_parameter(path).detach().flatten()
        values, order = whole.sort()
        places = order[torch.searchsorted(values, parameter.to_local().detach().flatten())]
        return _error(_local(found).flatten(), wanted.flatten()[places], wanted)
    if isinstance(found, DTensor):
        return _error(found.to_local(), own_part(wanted, found), wanted)
    return _error(found, wanted)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _error(found: Tensor, wanted: Tensor, scale: Tensor | None = None) -> float:
    return largest(found - wanted) / (largest(wanted if scale is None else scale) + 1e-9)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in REDUCED else [pytest.mark.slow])
        for name, modes in RANKS.items()
        for mode in modes
    ],
)
def test_replayed_routes_on_ranks_equal_one_process(two_ranks: RankPool, name: str, mode: str) -> None:
    for rank, errors in enumerate(two_ranks.run(_on_two_ranks, name, mode)):
        beyond = {path: error for path, error in errors.items() if not error <= BOUND}
        assert not beyond, f"rank {rank}"


@pytest.mark.parametrize(("take", "message"), [(slice(0, 31), "31 tokens for 4 sequences of 8 over cp=2")])
def test_routes_of_this_ranks_tokens_alone_are_refused_under_cp(two_ranks: RankPool, take: slice, message: str) -> None:
    assert all(message in each for each in two_ranks.run(_refusal_under_cp, take))


def _refusal_under_cp(take: slice) -> str:
    mesh = mesh_for({"cp": 2})
    model = tiny_model(entries()["mixtral"])
    routes = {path: ids[take] for path, ids in _foreign_routes(model).items()}
    parallelize(model, mesh, plan=None)
    local = sequence_layout(mesh, LENGTH).shard(_ids())
    try:
        with replay_routes(model, routes):
            model(input_ids=local, use_cache=False)
    except RoutesError as error:
        return str(error)
    return ""
