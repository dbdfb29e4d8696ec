"""A loss at the language-model head, inside the model's forward: hidden states and the head's weight, no logits.

FSDP2 gathers the parameters outside the blocks (embedding, final norm, head) in the pre-forward hook of the root
module and frees and reduces them by hooks on the root's outputs.  A loss that is computed from hidden states after
``model.model(...)`` bypasses these hooks, so these parameters get no gradients.  Here the root's own forward runs
and returns the loss function's result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime._peft_compat import Factors, linear_in_force, unwrapped
from fsdp_runtime._torch_compat import children
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.model.structure import inspect_model
from fsdp_runtime.wrap import effects_of, hook_forward
from tp_plans.model_tree import class_of_forward

#: The effect of gathering kept logits over ``cp``, in the words of ``describe_parallelism``.
KEEPS_OVER_CP = "gathers logits that are kept"

#: Inputs of the map that a model applies to its logits: small ones show a factor, large ones a bound.
_PROBES = (-1e4, -64.0, -8.0, -1.0, -0.125, 0.0, 0.125, 1.0, 8.0, 64.0, 1e4)


@dataclass(frozen=True)
class LogitsMap:
    """The map from the head's output to the logits: ``softcap * tanh(scale * x / softcap)``."""

    scale: float = 1.0  # Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``
    softcap: float | None = None  # Gemma's ``final_logit_softcapping``


@dataclass(frozen=True, eq=False)
class LMHeadParameters:
    """The head of a language model during a forward, as ``forward_with_lm_head`` hands it to a function."""

    # ``[vocab, features]``; over ``tp`` a DTensor sharded on the vocabulary, otherwise a plain tensor.  FSDP2 shards
    # are gathered.  Low-rank adapters of the head are added in the weight's dtype.  A copy that an adapter trains in
    # full replaces the weight.
    weight: Tensor
    bias: Tensor | None  # ``[vocab]``, placed as the rows of ``weight``, or ``None``
    logit_scale: float  # factor that the model applies to the head's output
    softcap: float | None  # bound that the model applies to its logits, or ``None``


HeadFunction = Callable[[Tensor, LMHeadParameters], Any]


def forward_with_lm_head(model: nn.Module, function: HeadFunction, /, *args: Any, **kwargs: Any) -> Any:
    """Run a model's forward with a function instead of its language-model head, and return the function's result.

    Use it for losses that never hold the logits, such as ``rl_logprobs.linear_token_logprobs``: gradients of all
    parameters are complete under FSDP2, whether or not the model ran before, and backward may follow at any time.  The
    head's parameters are gathered while the function runs.  The result passes through the root's forward hooks, so a
    ``MixedPrecisionPolicy(output_dtype=...)`` applies to its floating-point tensors.

    The first call on a model measures the map that its code applies to the logits (a factor, a soft cap) by passing
    eleven numbers per token through it.  This reads a few values back from the device.

    Args:
        model: a causal or conditional-generation language model, parallelized or not.
        function: called once with the hidden states, ``[batch, seq, features]`` as the head would get them (under
            sequence parallelism a DTensor sharded on the sequence), and :class:`LMHeadParameters`.  Returns a tensor, a
            tuple, list or dict of tensors, or a dataclass of tensors and ``None``.
        *args: positional arguments of the model's forward.
        **kwargs: keyword arguments of the model's forward, without ``labels``.

    Raises:
        ModelError: the model has no linear language-model head, its forward calls the head more than once or not at
            all, it does more with the logits than to scale and soft-cap them, or an adapter of the head does more than
            add a product to its weight, such as dropout in training.
        OptionError: ``labels`` are given, which need logits, ``adapter_names``, or ``logits_to_keep`` under ``cp``.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from fsdp_runtime import forward_with_lm_head
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> tokens = torch.arange(8)[None]
        >>> def next_token_nats(hidden, head):
        ...     logits = hidden[:, :-1] @ head.weight.T  # rl_logprobs.linear_token_logprobs does without
        ...     return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:])
        >>> loss = forward_with_lm_head(model, next_token_nats, tokens, use_cache=False)
        >>> loss.backward()
        >>> model.lm_head.weight.grad.shape
        torch.Size([32, 16])
    """
    if kwargs.get("labels") is not None:
        raise OptionError("forward_with_lm_head computes no logits: leave out labels, and compute the loss in function")
    path = _head_path(model)
    owner_path, _, name = path.rpartition(".")
    siblings = children(model.get_submodule(owner_path))
    head = siblings[name]
    if head is None:
        raise ModelError(f"{path} is None in {type(model).__name__}")
    _require_linear(head, path)
    if kwargs.get("adapter_names") is not None:
        raise OptionError("adapter_names gives each row another head: compute the loss from the logits")
    kept = kwargs.get("logits_to_keep")
    if (isinstance(kept, Tensor) or kept) and KEEPS_OVER_CP in effects_of(head):
        raise OptionError(
            "logits_to_keep in forward_with_lm_head: under cp function gets this rank's tokens and can choose among "
            "them; leave it out"
        )
    stand_in = _StandIn(head, path, function, _maps.get(model))
    hook = hook_forward(model, "computes from the head's inputs", after=stand_in.run, first=True)
    siblings[name] = stand_in
    try:
        output = model(*args, **kwargs)
    except ModelError:
        raise
    except Exception as error:
        if stand_in.hidden is not None and not stand_in.entered:  # the model's own code failed on the probes
            raise _unknown_map(model, path) from error
        raise
    finally:
        siblings[name] = head
        hook.remove()
    # A dataclass passes the hooks as a dict.
    result = stand_in.result
    return dataclasses.replace(result, **output) if dataclasses.is_dataclass(result) else output  # type: ignore[type-var]


#: The measured map of each model's logits.
_maps: WeakKeyDictionary[nn.Module, LogitsMap] = WeakKeyDictionary()
_paths: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def assume_logits_map(model: nn.Module, logits_map: LogitsMap) -> None:
    """Let :func:`forward_with_lm_head` use a known map, for a model of tensors without values."""
    _maps[model] = logits_map


class _StandIn(nn.Module):
    """Takes the head's place: keeps the head's input, returns probes, and passes other attributes on to the head."""

    def __init__(self, head: nn.Module, path: str, function: HeadFunction, known: LogitsMap | None) -> None:
        super().__init__()
        self.__dict__["_head"] = head  # as no submodule
        self._path, self._function, self._known = path, function, known
        self.hidden: Tensor | None = None
        self.probes: Tensor | None = None
        self.entered = False
        self.result: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_head"], name)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None:
            raise ModelError(f"{self._path} is called more than once in a forward: compute the loss from the logits")
        self.hidden = hidden
        probes = torch.tensor(_PROBES, device=hidden.device, dtype=torch.float64)
        self.probes = probes.expand(*hidden.shape[:-1], len(_PROBES)).contiguous()
        return self.probes.clone()  # the model may change its logits in place

    def run(self, model: nn.Module, _args: Any, output: Any) -> Any:
        """Replace the model's output by the function's result, in a forward hook before the hooks of FSDP2."""
        if self.hidden is None or self.probes is None:
            raise ModelError(
                f"the forward of {type(model).__name__} does not call {self._path}: compute the loss from the logits"
            )
        known = self._known or _measured(logits_of(output), self.probes)
        if known is None:
            raise _unknown_map(model, self._path)
        _maps[model] = known
        self.entered = True
        lm_head = LMHeadParameters(*_head_weight(self._head), known.scale, known.softcap)
        self.result = result = self._function(self.hidden, lm_head)
        if not dataclasses.is_dataclass(result):
            return result
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


def _head_path(model: nn.Module) -> str:
    if model not in _paths:
        path = inspect_model(model).lm_head
        head = None if path is None else unwrapped(model.get_submodule(path))
        if path is None or getattr(getattr(head, "weight", None), "ndim", 0) != 2 or not hasattr(head, "bias"):
            raise ModelError(
                f"{type(model).__name__} has no linear language-model head: compute the loss from its outputs"
            )
        _paths[model] = path
    return _paths[model]


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of a model's output: the tensor itself, its ``logits``, or the first of a tuple."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    return logits if isinstance(logits, Tensor) else None


def _measured(logits: Tensor | None, probes: Tensor) -> LogitsMap | None:
    """Return the scale and soft cap that map the probes to the logits, or ``None`` if there is none."""
    if logits is None or logits.shape != probes.shape:
        return None
    every = logits.detach().double().flatten(0, -2)
    got, sent = every[0].tolist(), list(_PROBES)
    if not torch.equal(every, every[:1].expand_as(every)) or not all(map(math.isfinite, got)):
        return None
    tolerance = 1e-2 if logits.dtype in (torch.bfloat16, torch.float16) else 1e-5
    largest, unit = got[-1], got[_PROBES.index(0.125)] / 0.125
    candidates = [LogitsMap(scale=largest / sent[-1])]
    if largest > 0:
        # The scale under which ``0.125`` is taken to ``0.125 * unit`` below the soft cap.
        scale = largest * math.atanh(min(0.125 * unit / largest, 1 - 1e-12)) / 0.125
        candidates.append(LogitsMap(scale, softcap=largest))
    for candidate in candidates:
        expected = [_mapped(value, candidate) for value in sent]
        if all(math.isclose(x, y, rel_tol=tolerance, abs_tol=1e-9) for x, y in zip(expected, got, strict=True)):
            return candidate
    return None


def _mapped(value: float, logits_map: LogitsMap) -> float:
    scaled = value * logits_map.scale
    return scaled if logits_map.softcap is None else logits_map.softcap * math.tanh(scaled / logits_map.softcap)


def _unknown_map(model: nn.Module, path: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} does more with the output of {path} than to scale and soft-cap it, which a loss "
        "without logits would leave out: compute the loss from the logits"
    )


def _require_linear(head: nn.Module, path: str) -> None:
    """Check that a head is one linear map: a loss without logits needs its weight."""
    linear = linear_in_force(head)
    reason = linear.not_linear
    if isinstance(linear.layer, nn.Linear) and (name := class_of_forward(linear.layer)) != "Linear":
        reason = reason or f"{name} has a custom forward"
    if reason:
        raise ModelError(
            f"{path} is not one linear map, which a loss without logits needs: {reason}; or compute the loss from the "
            "logits"
        )


def _head_weight(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight ``[vocab, features]`` and the bias ``[vocab]`` of a head or its wrapper."""
    # Active adapters are added in the weight's dtype, and get their gradients through the sum. A rank adds only its
    # rows of a weight sharded over ``tp``.
    linear = linear_in_force(head)
    weight: Tensor = linear.layer.weight
    bias: Tensor | None = getattr(linear.layer, "bias", None)
    for factors in linear.factors:
        weight = _adapted(weight, linear.layer.weight, factors).to(linear.layer.weight.dtype)
        if factors.bias is not None:
            added = factors.bias * factors.scaling
            bias = added if bias is None else (bias + added).to(bias.dtype)
    return weight, bias


def _adapted(weight: Tensor, of_base: Tensor, factors: Factors) -> Tensor:
    # DoRA scales the rows of the sum by constant norms: Liu et al., arXiv:2402.09353, section 4.3.
    product = factors.b @ _with_full_gradient(factors.a) * factors.scaling
    if factors.magnitude is None:
        return weight + product
    norms = torch.linalg.norm(of_base.detach() + product.detach(), dim=1)
    scales: Tensor = factors.magnitude / norms
    return scales[:, None] * (weight + product)


def _with_full_gradient(factor: Tensor) -> Tensor:
    """Return a replicated factor; its gradient is summed over the ranks, since a rank has some rows of the weight."""
    if not isinstance(factor, DTensor):
        return factor
    return DTensor.from_local(factor.to_local(), factor.device_mesh, factor.placements, run_check=False)
