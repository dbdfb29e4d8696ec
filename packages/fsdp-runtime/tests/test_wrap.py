"""One place puts code around the forward of a module, and says what it does."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_runtime
from fsdp_runtime import MeshSpec, describe_parallelism, parallelize
from fsdp_runtime.wrap import Wrapper, effects_of, hook_forward, replace_forward, restore_forward, wrap
from harness.models import tiny_model

SOURCE = Path(str(fsdp_runtime.__file__)).parent


class _Doubles(Wrapper):
    effect = "doubles"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)  # type: ignore[misc]


def test_modules_of_one_class_share_the_wrapped_class_and_its_name() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    wrap(layers, _Doubles)
    assert type(layers[0]) is type(layers[1])
    assert type(layers[0]).__name__ == "Linear"


def test_a_copy_of_a_wrapped_module_is_wrapped() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain = layer(x)
    wrap([layer], _Doubles)
    assert torch.equal(copy.deepcopy(layer)(x), 2 * plain)


def test_effects_are_listed_from_the_outside_and_end_with_their_hooks() -> None:
    layer = nn.Linear(2, 2)
    wrap([layer], _Doubles)
    hooks = hook_forward(layer, "watches", before=lambda module, args, kwargs: None)
    assert effects_of(layer) == ("watches", "doubles")
    hooks.remove()
    assert effects_of(layer) == ("doubles",)


def test_a_forward_on_the_instance_comes_back() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)

    def patched(x: Tensor) -> Tensor:
        return x

    layer.forward = patched  # type: ignore[method-assign]
    restore_forward(layer, replace_forward(layer, lambda x: x + 1))
    assert layer.forward is patched
    del layer.__dict__["forward"]
    restore_forward(layer, replace_forward(layer, lambda x: x + 1))
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_the_description_of_a_model_says_what_is_in_front_of_its_parts() -> None:
    model = parallelize(
        tiny_model("LlamaForCausalLM"),
        MeshSpec().build(device_type="cpu"),
        packed_sequences=True,
        activation_checkpointing="block",
    )
    wrapped = describe_parallelism(model).wrapped
    assert wrapped[""] == ("finds the documents of rows",)
    assert wrapped["model.layers.0"] == ("recomputed in backward",)
    assert wrapped["model.layers.0.self_attn"] == ("packed rows",)


def test_no_other_file_stands_in_front_of_a_forward() -> None:
    """A dry run and a compat file change classes of copies and of transformers' own; an accelerator is no module."""
    pattern = re.compile(r"register_forward|__class__ = |(module|model)\.forward = ")
    allowed = {"wrap.py", "_transformers_compat/models.py", "__init__.py", "trainers/mesh_accelerator.py"}
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if pattern.search(path.read_text())}
    assert found <= allowed
