"""Recording and replaying in one process: what the router's code computes, recomputation, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fsdp_runtime import MeshSpec, ModelError, describe_parallelism, parallelize, record_routes, replay_routes
from fsdp_runtime.errors import RoutesError
from fsdp_runtime.steps import Compile, Routes
from fsdp_runtime.steps.routing import session
from fsdp_runtime.steps.routing.routers import find_routers
from harness.float64 import compute_in_float64
from harness.models import jitter
from harness.pairwise import pairwise_first

VOCAB, BATCH, LENGTH, LAYERS, EXPERTS, TOP_K = 32, 2, 5, 2, 8, 2
TOKENS = BATCH * LENGTH
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
}


def _mixtral() -> nn.Module:
    return _ready(transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES, num_local_experts=EXPERTS)))


def _minimax_m2() -> nn.Module:
    """Sigmoid scores, a bias that only selects, normalisation."""
    config = transformers.MiniMaxM2Config(**_SIZES, num_local_experts=EXPERTS, head_dim=8)
    return _ready(transformers.MiniMaxM2ForCausalLM(config))


def _deepseek_v3() -> nn.Module:
    """Experts of 2 of 4 groups, by scores with a bias; a dense first layer."""
    config = transformers.DeepseekV3Config(
        **_SIZES, n_routed_experts=EXPERTS, n_group=4, topk_group=2, moe_intermediate_size=16, first_k_dense_replace=1,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1,
    )  # fmt: skip
    return _ready(transformers.DeepseekV3ForCausalLM(config))


def _deepseek_v2() -> nn.Module:
    """Weights taken from scores that are zero outside of the chosen groups."""
    config = transformers.DeepseekV2Config(
        **_SIZES, n_routed_experts=EXPERTS, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        moe_intermediate_size=16, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1,
    )  # fmt: skip
    return _ready(transformers.DeepseekV2ForCausalLM(config))


def _ready(model: Any) -> nn.Module:
    model.set_experts_implementation("eager")  # grouped products need float32
    model.eval().double()
    jitter(model)
    return model


def _ids() -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def _run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    logits = model(input_ids=_ids(), use_cache=False).logits
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    return logits.detach(), {path: parameter.grad for path, parameter in model.named_parameters()}


def _random_routes(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        path: torch.rand(TOKENS, router.experts, generator=generator).topk(TOP_K).indices
        for path, router in find_routers(model).by_path.items()
    }


def _equal(one: Any, other: Any) -> bool:
    logits = torch.equal(one[0], other[0])
    return logits and all(
        (grad is None and other[1][path] is None) or torch.equal(grad, other[1][path]) for path, grad in one[1].items()
    )


@pytest.mark.parametrize("build", [_mixtral, _deepseek_v3, _deepseek_v2, _minimax_m2])
def test_recording_and_replaying_own_routes_change_no_bit(build: Callable[[], nn.Module]) -> None:
    model = build()
    plain = _run(model)
    with record_routes(model) as routes:
        recorded = _run(model)
    with replay_routes(model, routes):
        replayed = _run(model)
    assert _equal(plain, recorded)
    assert _equal(plain, replayed)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("build", [_mixtral, _deepseek_v2, _minimax_m2])
def test_replayed_experts_run_with_the_weights_of_their_own_scores(build: Callable[[], nn.Module]) -> None:
    model = build()
    routes = {path: ids.sort(-1).values // 2 * 2 for path, ids in _random_routes(model).items()}
    routes = {path: torch.stack([ids[:, 0], ids[:, 0] + 1], -1) for path, ids in routes.items()}  # of one group
    router = next(iter(find_routers(model).by_path.values()))
    hidden = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    seen: list[tuple[Any, ...]] = []
    experts = model.get_submodule(router.path.rpartition(".")[0] + ".experts")
    handle = experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with replay_routes(model, routes):
        model.get_submodule(router.path.rpartition(".")[0])(hidden)
    handle.remove()
    assert torch.equal(seen[0][1], routes[router.path])
    logits = torch.nn.functional.linear(hidden.flatten(0, 1), router.module.weight)
    if build is _minimax_m2:
        scores = logits.sigmoid().gather(-1, routes[router.path])
        expected = scores / scores.sum(-1, keepdim=True)
    else:
        scores = logits.softmax(-1).gather(-1, routes[router.path])
        expected = scores / scores.sum(-1, keepdim=True) if build is _mixtral else scores
    torch.testing.assert_close(seen[0][2].double(), expected, atol=1e-6, rtol=1e-6)  # two of the routers use float32


def _gradient_error() -> float:
    """The largest difference of a router's gradient under replay from central differences, in float64."""
    torch.manual_seed(0)
    model = _minimax_m2()
    routes = _random_routes(model)
    (path, router), *_ = find_routers(model).by_path.items()
    block = model.get_submodule(path.rpartition(".")[0])
    hidden = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def loss() -> Tensor:
        with compute_in_float64(), replay_routes(model, routes):
            output = block(hidden)
        return ((output[0] if isinstance(output, tuple) else output) * weights).sum()

    loss().backward()
    weight = router.module.weight
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    errors, step = [], 1e-6
    for expert in routes[path].unique()[:3].tolist():
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                weight[expert, 7] += sign * step
                values.append(loss())
                weight[expert, 7] -= sign * step
        errors.append(abs((gradient[expert, 7] - (values[0] - values[1]) / (2 * step)).item()))
    return max(errors)


def test_router_gradients_under_replay_equal_finite_differences() -> None:
    assert _gradient_error() < 1e-9  # central differences err by about step^2 and 1e-16 / step


def test_weights_of_the_routers_own_choice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_values(scores: Tensor, indices: Tensor) -> Any:
        return torch.return_types.topk((scores.topk(indices.shape[-1]).values, indices))

    monkeypatch.setattr(session, "_chosen", own_values)
    with pytest.raises(AssertionError, match="not close"):
        test_replayed_experts_run_with_the_weights_of_their_own_scores(_mixtral)


def _noisy(model: nn.Module) -> list[Tensor]:
    """Give every router noise that differs from call to call; return the experts of each call as they come."""
    generator = torch.Generator().manual_seed(6)  # not torch's own, whose state checkpointing restores
    seen: list[Tensor] = []

    def disturb(module: nn.Module, args: tuple[Any, ...]) -> Any:
        noise = torch.randn(args[0].shape, dtype=args[0].dtype, generator=generator)
        return (args[0] + 3 * noise, *args[1:])

    for path, router in find_routers(model).by_path.items():
        router.module.register_forward_pre_hook(disturb)
        experts = model.get_submodule(path.rpartition(".")[0] + ".experts")
        experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].clone()))
    return seen


def _checkpointed(model: nn.Module, way: str) -> nn.Module:
    if way.startswith("transformers"):
        model.train()
        options = {"use_reentrant": way.endswith("reentrant")}
        model.gradient_checkpointing_enable(options)
        if options["use_reentrant"]:
            model.enable_input_require_grads()
        return model
    mesh = MeshSpec().build(device_type="cpu")
    return parallelize(model, mesh, plan=None, activation_checkpointing=way)


@pytest.mark.parametrize(
    ("way", "after", "kind"),
    pairwise_first(
        ["block", "mlp", "selective", "transformers", "transformers, reentrant"],
        [False, True],
        ["recorded", "replayed", "with holes"],
    ),
)
def test_a_recomputation_under_noise_selects_what_its_forward_selected(way: str, after: bool, kind: str) -> None:
    model = _checkpointed(_mixtral(), way)
    seen = _noisy(model)
    routes = _random_routes(model)
    if kind == "with holes":
        routes = {path: ids.masked_fill(torch.arange(TOKENS)[:, None] % 2 == 0, -1) for path, ids in routes.items()}
    with record_routes(model) if kind == "recorded" else replay_routes(model, routes):
        losses = [model(input_ids=_ids(), use_cache=False).logits.sum()]
        if kind != "recorded":
            losses.append(model(input_ids=_ids(), use_cache=False).logits.sum())
        if not after:
            losses[0].backward()
    forward = seen[:LAYERS]
    if after:
        losses[0].backward()
    recomputed = seen[len(losses) * LAYERS :]
    assert len(recomputed) == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(recomputed), strict=True))
    assert all("forward" not in vars(module) for module in model.modules())


def test_without_a_session_the_noise_routes_a_recomputation_anew() -> None:
    model = _checkpointed(_mixtral(), "block")
    seen = _noisy(model)
    loss = model(input_ids=_ids(), use_cache=False).logits.sum()
    try:
        loss.backward()
    except torch.utils.checkpoint.CheckpointError:
        return  # other experts save tensors of other shapes, which torch may notice
    assert not all(torch.equal(a, b) for a, b in zip(seen[:LAYERS], reversed(seen[LAYERS:]), strict=True))


def test_micro_batches_keep_their_own_routes_whatever_the_order_of_their_backwards() -> None:
    reference = _mixtral()
    model = _checkpointed(copy.deepcopy(reference), "block")
    one = _random_routes(model)
    two = {path: ids.flip(0) for path, ids in one.items()}
    for module in (reference, model):
        losses = []
        for routes in (one, two):
            with replay_routes(module, routes):
                losses.append(module(input_ids=_ids(), use_cache=False).logits.square().sum())
        (losses[0] + 2 * losses[1]).backward()
    for wanted, found in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-12, rtol=1e-12)


def test_missing_routes_are_routed_as_usual() -> None:
    model = _mixtral()
    plain = _run(model)
    with record_routes(model) as routes:
        _run(model)
    nowhere = {path: torch.full_like(ids, -1) for path, ids in routes.items()}
    with replay_routes(model, nowhere):
        assert _equal(_run(model), plain)
    first, *_ = routes
    half = {first: routes[first].clone().masked_fill_(torch.arange(TOKENS)[:, None] % 2 == 0, -1)}
    with replay_routes(model, half):  # the other half is the same as usual, and so is the router that is left out
        assert _equal(_run(model), plain)
    foreign = _random_routes(model)
    holes = {path: ids.clone().index_fill_(0, torch.tensor([3]), -1) for path, ids in foreign.items()}
    with replay_routes(model, holes), record_routes(model) as seen:
        pass
    with replay_routes(model, foreign):
        assert not torch.equal(_run(model)[0], plain[0])
    assert not seen


def test_a_tensor_holds_a_layer_for_each_router_or_for_each_block() -> None:
    model = _deepseek_v3()  # the first of two layers is dense
    with record_routes(model) as routes:
        plain = _run(model)
    stacked = routes.stacked()
    assert stacked.shape == (1, TOKENS, TOP_K)
    by_block = torch.cat([torch.zeros_like(stacked), stacked])
    for given in (stacked, stacked.to(torch.int32), by_block.long()):
        with replay_routes(model, given):
            assert _equal(_run(model), plain)


def test_groups_of_the_replayed_experts_are_not_masked() -> None:
    model = _deepseek_v2()
    router = next(iter(find_routers(model).by_path.values()))
    hidden = torch.randn(TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    worst = torch.nn.functional.linear(hidden, router.module.weight).topk(TOP_K, largest=False).indices
    routes = dict.fromkeys(find_routers(model).by_path, worst)
    with replay_routes(model, routes):
        _, weights, indices = router.module(hidden)
    assert torch.equal(indices, worst)
    assert (weights > 0).all()


def _routes(value: Any) -> Callable[[dict[str, Tensor]], Any]:
    return lambda routes: {path: value(ids.clone()) for path, ids in routes.items()}


def _set(ids: Tensor, token: int, row: list[int]) -> Tensor:
    ids[token] = torch.tensor(row)
    return ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: torch.stack([*routes.values()])[:1].expand(3, -1, -1), "3 layers: this model has 2 routers"),
        (lambda routes: torch.zeros(4, 2), r"\(4, 2\): give a tensor \[layers, tokens, k\]"),
        (lambda routes: {"model.layers.7.mlp.gate": torch.zeros(TOKENS, 2).long()}, "no router of this model"),
        (_routes(lambda ids: ids[:, :1]), "1 experts per token, and it selects 2"),
        (_routes(lambda ids: ids.double()), "give integers"),
        (_routes(lambda ids: _set(ids, 3, [0, 8])), r"layers.0.mlp.gate: token 3 has expert 8, and there are 8"),
        (_routes(lambda ids: _set(ids, 3, [0, -2])), "token 3 has expert -2"),
        (_routes(lambda ids: _set(ids, 4, [5, 5])), r"token 4 has experts \[5, 5\], one of them twice"),
        (_routes(lambda ids: _set(ids, 4, [5, -1])), r"token 4 has experts \[5, -1\]: give all"),
        (lambda routes: {p: ids[: TOKENS - n] for n, (p, ids) in enumerate(routes.items())}, "different numbers"),
    ],
)
def test_routes_that_do_not_fit_are_refused_with_the_numbers(change: Any, message: str) -> None:
    model = _mixtral()
    routes = change(_random_routes(model))
    with pytest.raises(RoutesError, match=message), replay_routes(model, routes):
        pass


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    model = _mixtral()
    routes = {path: ids[:-1] for path, ids in _random_routes(model).items()}
    message = "routed 10 tokens to 2 experts each, and the routes have 9 tokens"
    with pytest.raises(RoutesError, match=message), replay_routes(model, routes):
        _run(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_two_forwards_in_one_recording_are_refused() -> None:
    model = _mixtral()
    with record_routes(model):
        _run(model)
        with pytest.raises(RoutesError, match="ran a second time"):
            _run(model)


def test_a_model_without_experts_is_refused() -> None:
    sizes = {name: size for name, size in _SIZES.items() if name != "num_experts_per_tok"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with pytest.raises(ModelError, match="no router that selects experts"), record_routes(model):
        pass


@pytest.mark.parametrize("recomputes", ["none", "block"])
def test_compiled_blocks_record_and_replay_as_others(recomputes: Any) -> None:
    plain = _mixtral()
    options: Any = {"plan": None, "compile": Compile({"backend": "eager"}), "activation_checkpointing": recomputes}
    model = parallelize(copy.deepcopy(plain), MeshSpec().build(device_type="cpu"), **options)
    _run(model)
    found = []
    for each in (plain, model):
        with record_routes(each) as routes:
            _run(each)
        with replay_routes(each, (routes.stacked() + 1) % EXPERTS):
            found.append((routes.stacked(), *_run(each)))
    (wanted, logits, gradients), (selected, replayed, others) = found
    assert torch.equal(selected, wanted)
    assert torch.allclose(replayed, logits)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(others[name], gradient), name
    assert describe_parallelism(model).compiled == ("model.layers.0", "model.layers.1")


def test_record_routes_refuses_the_output_of_torch_compile() -> None:
    with pytest.raises(ModelError, match=r"output of torch\.compile"), record_routes(torch.compile(_mixtral())):
        pass


def test_checkpoint_wrappers_of_torch_are_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = _mixtral()
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with pytest.raises(ModelError, match="CheckpointWrapper"), record_routes(model):
        pass


def test_two_models_replay_beside_each_other() -> None:
    policy, reference = _mixtral(), _minimax_m2()
    routes = [_random_routes(model) for model in (policy, reference)]
    with replay_routes(policy, routes[0]), replay_routes(reference, routes[1]):
        both = [_run(model)[0] for model in (policy, reference)]
    for model, own, found in zip((policy, reference), routes, both, strict=True):
        with replay_routes(model, own):
            assert torch.equal(_run(model)[0], found)


def test_recorded_routes_can_be_taken_by_token() -> None:
    model = _mixtral()
    with record_routes(model) as routes:
        logits = _run(model)[0]
    assert isinstance(routes, Routes)
    second = routes.take(torch.arange(LENGTH, TOKENS))
    with replay_routes(model, second), torch.no_grad():
        row = model(input_ids=_ids()[1:], use_cache=False).logits
    torch.testing.assert_close(row, logits[1:], atol=1e-6, rtol=1e-6)  # another batch size, other products


def test_packed_documents_replay_the_routes_of_their_rows() -> None:
    model = _mixtral()
    with record_routes(model) as routes, torch.no_grad():
        rows = model(input_ids=_ids(), use_cache=False).logits
    order = torch.cat([torch.arange(LENGTH, TOKENS), torch.arange(LENGTH)])  # the second row first
    positions = torch.arange(LENGTH).repeat(BATCH)[None]
    foreign = {path: ids[order] for path, ids in _random_routes(model).items()}
    for given, expected in ((routes.take(order), rows), (foreign, None)):
        if expected is None:
            with replay_routes(model, _random_routes(model)), torch.no_grad():
                expected = model(input_ids=_ids(), use_cache=False).logits
        with replay_routes(model, given), torch.no_grad():
            packed = model(input_ids=_ids().flatten()[order][None], position_ids=positions, use_cache=False).logits
        # Rotary embeddings and norms are in float32.
        torch.testing.assert_close(packed[0], expected.flatten(0, 1)[order], atol=1e-5, rtol=1e-5)
