"""Activations on the host: gradients are the same bits, copies run in order, and written tensors are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_runtime import MeshSpec, describe_parallelism, parallelize, sequence_layout
from fsdp_runtime.errors import OffloadError
from fsdp_runtime.memory import host_copies
from fsdp_runtime.memory.host_copies import HELD_BYTES
from fsdp_runtime.steps import ActivationCheckpointing, Compile
from harness.lazy_copies import LazyCopies
from harness.models import tiny_inputs, tiny_model
from harness.parity import mesh_for
from harness.ranks import RankPool

MODES = ("none", "block", "mlp", "selective")


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyCopies]:
    copies = LazyCopies()
    monkeypatch.setattr(host_copies, "make_copies", lambda _device: copies)
    yield copies
    assert copies.faults == []
    assert HELD_BYTES.now == 0


def _logits(model: nn.Module, shift: int = 0) -> Tensor:
    inputs = tiny_inputs(model, batch=2, length=9)
    logits: Tensor = model(input_ids=inputs["input_ids"] + shift, use_cache=False).logits
    return logits


def _two_backwards(model: nn.Module) -> None:
    logits = _logits(model)
    logits.sum().backward(retain_graph=True)
    logits.square().sum().backward()


def _two_forwards(model: nn.Module) -> None:
    first, second = _logits(model), _logits(model, 1)
    first.square().sum().backward()
    second.square().sum().backward()


def _gradients_of_gradients(model: nn.Module) -> None:
    gradients = torch.autograd.grad(_logits(model).square().sum(), list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()


def _frozen_below(model: nn.Module) -> None:
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    _two_backwards(model)


def _one_process(mode: Any, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: parallelize(
        model, MeshSpec().build(device_type="cpu"), activation_checkpointing=mode, **options
    )


def _assert_equal_bits(expected: nn.Module, actual: nn.Module) -> None:
    for (name, one), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("step", [_two_backwards, _two_forwards, _gradients_of_gradients, _frozen_below])
@pytest.mark.parametrize("mode", MODES)
def test_activations_on_the_host_give_the_same_bits(lazy: LazyCopies, mode: str, step: Callable[..., None]) -> None:
    plain = tiny_model("Qwen3ForCausalLM", num_hidden_layers=3)
    plain.set_attn_implementation("eager")  # sdpa has no second derivative
    models = [_one_process(ActivationCheckpointing(mode, on))(copy.deepcopy(plain)) for on in (False, True)]
    for model in models:
        step(model)
    _assert_equal_bits(*models)
    assert "to device" in lazy.log or step is _frozen_below
    assert describe_parallelism(models[1]).recomputing == describe_parallelism(models[0]).recomputing


def test_backward_copies_a_block_back_while_it_computes_the_next(lazy: LazyCopies) -> None:
    model = _one_process(ActivationCheckpointing("block", offload=True))(
        tiny_model("Qwen3ForCausalLM", num_hidden_layers=4)
    )
    order: list[str] = []
    for number, block in enumerate(model.model.layers):
        block.self_attn.register_forward_pre_hook(lambda *_, number=number: order.append(f"{number}, {len(lazy.log)}"))
    loss = _logits(model).sum()
    assert lazy.log == ["to host"] * 4
    loss.backward()
    # The last block is on the device still. When backward recomputes a block, the block before is on its way.
    assert order[4:] == ["3, 5", "2, 6", "1, 7", "0, 7"]
    assert lazy.log[4:] == ["to device"] * 3


def test_backward_refuses_a_tensor_that_was_written_after_it_was_saved(lazy: LazyCopies) -> None:
    block = nn.Sequential(nn.Linear(64, 64))
    model = nn.Sequential(nn.ModuleList([block, nn.Sequential(nn.Linear(64, 64))]))
    _one_process(ActivationCheckpointing("none", offload=True))(model)
    inputs = torch.randn(8, 64, requires_grad=True) * 1.0
    outputs = block(inputs)
    inputs.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
    with torch.no_grad():
        outputs = block(torch.randn(8, 64, requires_grad=True) * 1.0)
    assert not outputs.requires_grad
    inputs = torch.randn(8, 64, requires_grad=True) * 1.0
    outputs = block(inputs)
    with torch.no_grad():
        block[0].weight.add_(1.0)  # stays on the device
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
    lazy.queue.clear()


def test_activations_of_compiled_blocks_give_the_same_bits(lazy: LazyCopies) -> None:
    plain = tiny_model("Qwen3ForCausalLM")
    compiled = {"compile": Compile({"backend": "aot_eager"})}
    models = [
        _one_process(ActivationCheckpointing("none", on), **compiled)(copy.deepcopy(plain)) for on in (False, True)
    ]
    for model in models:
        _two_backwards(model)
    _assert_equal_bits(*models)
    assert "to device" in lazy.log


def test_a_forward_without_room_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HELD_BYTES, "checked", 0)
    monkeypatch.setattr(host_copies, "available_host_memory", lambda: 1000)
    model = _one_process(ActivationCheckpointing("block", offload=True))(tiny_model("Qwen3ForCausalLM"))
    with pytest.raises(OffloadError, match=r"take 268,435,456 bytes of host memory, and 1,000 are available"):
        _logits(model)


SP = {"sequence_parallel": True}
MESHES: list[tuple[str, dict[str, int], dict[str, Any], str]] = [
    ("Qwen3ForCausalLM", {"dp_shard": 2, "tp": 2}, SP, "block"),
    ("Qwen3ForCausalLM", {"dp_shard": 2, "tp": 2}, {"packed_sequences": True}, "mlp"),
    ("Gemma3ForCausalLM", {"cp": 2, "tp": 2}, SP, "none"),
    ("Qwen3MoeForCausalLM", {"dp_shard": 4, "ep": 2}, {}, "none"),
    ("Qwen3MoeForCausalLM", {"dp_shard": 2, "ep": 2, "tp": 2}, SP, "selective"),
]


def _on_a_mesh(axes: dict[str, int], name: str, options: dict[str, Any], mode: str) -> tuple[list[str], list[str], int]:
    """The parameters with other gradients, the faults of the copies, and the bytes on the host before backward."""
    copies, nbytes, gradients = LazyCopies(), 0, []
    host_copies.make_copies, original = lambda _device: copies, host_copies.make_copies
    try:
        for offload in (False, True):
            mesh = mesh_for(axes)
            model = parallelize(
                tiny_model(name), mesh, activation_checkpointing=ActivationCheckpointing(mode, offload), **options
            )
            inputs = tiny_inputs(model, batch=1 if "packed_sequences" in options else 2, length=12)
            if "packed_sequences" in options:
                inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
            if "cp" in axes:
                inputs = sequence_layout(mesh, length=12).shard_batch(inputs)
            first, second = (model(**inputs, use_cache=False).logits for _ in range(2))
            nbytes = HELD_BYTES.now
            first.square().sum().backward()
            second.sin().sum().backward()
            gradients.append({n: getattr(p.grad, "_local_tensor", p.grad) for n, p in model.named_parameters()})
    finally:
        host_copies.make_copies = original
    plain, offloaded = gradients
    return [n for n in plain if not torch.equal(plain[n], offloaded[n])], copies.faults, nbytes


@pytest.mark.parametrize(("name", "axes", "options", "mode"), MESHES, ids=str)
def test_activations_on_the_host_give_the_same_bits_on_a_mesh(
    four_ranks: RankPool, name: str, axes: dict[str, int], options: dict[str, Any], mode: str
) -> None:
    for differing, faults, nbytes in four_ranks.run(_on_a_mesh, axes, name, options, mode):
        assert (differing, faults) == ([], [])
        assert nbytes > 0


class _Leaves(torch.autograd.Function):
    """Saves a tensor that its backward does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def test_a_storage_that_backward_does_not_read_is_freed_after_its_copy(lazy: LazyCopies) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))
            self.child = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return _Leaves.apply((x * self.scale).exp())

    model = nn.Sequential(nn.ModuleList([Block() for _ in range(3)]))
    _one_process(ActivationCheckpointing("none", offload=True))(model)
    hidden = torch.randn(8, 64, requires_grad=True)
    for block in model[0]:
        hidden = block(hidden)
    hidden.sum().backward()
    assert "to device" in lazy.log
