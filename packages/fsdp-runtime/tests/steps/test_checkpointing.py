"""Activation checkpointing: less is kept, the numbers stay, and the cache cannot be filled twice."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fsdp_runtime import MeshSpec, ModelError, OptionError, parallelize
from fsdp_runtime.steps import SelectiveCheckpoint
from harness.collectives import RecordCollectives
from harness.models import jitter, tiny_inputs, tiny_model


def _saved_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes that a forward keeps for backward, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**inputs, use_cache=False).logits.sum().backward()
    return sum(kept.values())


def _checkpointed(model: nn.Module, mode: Any = "block") -> nn.Module:
    return parallelize(model, MeshSpec().build(device_type="cpu"), activation_checkpointing=mode)


def _assert_same_gradients(expected: nn.Module, actual: nn.Module) -> None:
    for (name, one), other in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize(("mode", "share"), [("mlp", 0.8), ("block", 0.2), ("selective", 0.2)])
def test_gradients_are_bit_identical_and_fewer_activations_are_kept(mode: str, share: float) -> None:
    plain = tiny_model("Gemma3ForCausalLM", num_hidden_layers=2)
    recomputing = _checkpointed(copy.deepcopy(plain), mode)
    inputs = tiny_inputs(plain, batch=2, length=9)
    kept, kept_recomputing = _saved_bytes(plain, inputs), _saved_bytes(recomputing, inputs)
    assert kept_recomputing < kept * share
    _assert_same_gradients(plain, recomputing)


def _flops(mode: Any) -> int:
    model = _checkpointed(tiny_model("LlamaForCausalLM"), mode)
    with FlopCounterMode(display=False) as counter:
        model(**tiny_inputs(model, batch=2, length=9), use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def test_only_what_selective_checkpointing_does_not_save_runs_twice() -> None:
    none, mlp, block = _flops("none"), _flops("mlp"), _flops("block")
    assert none < mlp < block
    assert _flops("selective") == none  # matrix products and attention are all the flops that are counted
    assert _flops(SelectiveCheckpoint(save=("aten.silu",))) == block


def test_an_operator_without_a_namespace_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'mm' has no namespace: write 'aten\.mm'"):
        _checkpointed(tiny_model("LlamaForCausalLM"), SelectiveCheckpoint(save=("mm",)))
    with pytest.raises(OptionError, match="has none of these operators"):
        _checkpointed(tiny_model("LlamaForCausalLM"), SelectiveCheckpoint(save=("aten.no_such_operator",)))


def test_mlp_mode_of_blocks_without_one_is_refused_with_what_they_have() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(ModelError, match=r"layers\.0 has 0, and no module called mlp or .*use 'block'"):
        _checkpointed(model, "mlp")


def _key_value_sharing_model() -> nn.Module:
    """The last two of four layers attend to keys and values that the first two computed."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=131,
        vocab_size_per_layer_input=131,
        hidden_size=64,
        hidden_size_per_layer_input=8,
        intermediate_size=96,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: nn.Module = Gemma4ForCausalLM(config).eval().double()
    jitter(model)
    return model


@pytest.mark.parametrize("mode", ["mlp", "block", "selective"])
def test_layers_that_share_keys_and_values_recompute_to_the_same_gradients(mode: str) -> None:
    plain = _key_value_sharing_model()
    recomputing = _checkpointed(copy.deepcopy(plain), mode)
    inputs = {"input_ids": torch.arange(3, 21).view(2, 9)}
    assert _saved_bytes(recomputing, inputs) < _saved_bytes(plain, inputs)
    _assert_same_gradients(plain, recomputing)


def test_names_and_classes_stay_usable() -> None:
    model = tiny_model("LlamaForCausalLM")
    before = list(model.state_dict())
    block_class = type(model.model.layers[0])
    _checkpointed(model)
    assert list(model.state_dict()) == before
    assert isinstance(model.model.layers[0], block_class)


def test_a_deep_copy_recomputes_with_its_own_parameters() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"))
    twin = copy.deepcopy(model)
    inputs = tiny_inputs(model, batch=1, length=4)
    twin(**inputs, use_cache=False).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_a_cache_under_gradient_is_refused_with_the_fix() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"))
    with pytest.raises(ModelError, match="pass use_cache=False"):
        model(**tiny_inputs(model, batch=1, length=4), use_cache=True)


def test_a_cache_that_the_model_makes_in_every_forward_is_refused() -> None:
    sizes = {"vocab_size": 32, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
    model = _checkpointed(transformers.XLMWithLMHeadModel(transformers.XLMConfig(**sizes)))
    ids = torch.arange(4).unsqueeze(0)
    with pytest.raises(ModelError, match='as XLM does, needs activation_checkpointing="none"'):
        model(ids)
    with torch.no_grad():
        model(ids)


def test_the_configs_no_longer_ask_for_a_cache() -> None:
    model = _checkpointed(tiny_model("Gemma3ForConditionalGeneration"))
    assert not model.config.get_text_config().use_cache
    assert model(**tiny_inputs(model, batch=1, length=7)).logits.requires_grad


def test_the_feed_forward_part_alone_leaves_the_cache_in_use() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"), "mlp")
    assert model(**tiny_inputs(model, batch=1, length=4)).past_key_values.get_seq_length() == 4


def test_inference_with_a_cache_still_works() -> None:
    model = _checkpointed(tiny_model("LlamaForCausalLM"))
    inputs = tiny_inputs(model, batch=1, length=4)
    with torch.no_grad():
        assert model(**inputs, use_cache=True).past_key_values.get_seq_length() == 4


def _collectives(mode: Any, sequence_parallel: bool) -> Counter[str]:
    """The collectives of a forward and backward of one rank of ``tp``."""
    mesh = MeshSpec(tp=2).build(device_type="cpu")
    model = tiny_model("LlamaForCausalLM", num_hidden_layers=2)
    inputs = tiny_inputs(model, batch=2, length=9)
    model = parallelize(model, mesh, sequence_parallel=sequence_parallel, activation_checkpointing=mode)
    with RecordCollectives() as communication:
        model(**inputs, use_cache=False).logits.to_local().sum().backward()
    return communication.counts()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_selective_checkpointing_repeats_no_collective(two_ranks: Any, sequence_parallel: bool) -> None:
    plain, selective, whole = (
        two_ranks.run(_collectives, mode, sequence_parallel) for mode in ("none", "selective", "block")
    )
    assert selective == plain
    assert whole[0].total() > plain[0].total()
