"""The checkpoint of a load, matched with a model: it refuses other models, and fills the model's tensors.

A checkpoint also loads into a larger model: into a submodule, with initial values for new modules.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime._transformers_compat.checkpoints import is_ignored_on_load
from fsdp_runtime._transformers_compat.conversions import Conversion, Translation, checkpoint_to_model
from fsdp_runtime._transformers_compat.models import is_transformers_model
from fsdp_runtime.errors import MismatchError, OptionError
from fsdp_runtime.model.state import StateEntry
from fsdp_runtime.sharded.boxes import (
    Chunk,
    ReadBox,
    fill_from,
    fill_local,
    identity_chunk,
    local_part,
    read_box,
    slices_of,
)
from fsdp_runtime.weights.conversion import TensorSpec, trace_conversion
from fsdp_runtime.weights.hub_checkpoint import HubCheckpoint, HubTensor
from fsdp_runtime.weights.quantize.packed import fill_packed, packed_weight
from tp_plans.boxes import split_box

logger = logging.getLogger(__name__)

#: Dtypes of floating-point weights that are not quantized.
_FLOATING = {"F64", "F32", "F16", "BF16"}
#: Elements of a tied tensor that are compared at a time.
_COMPARED = 2**24
#: Suggested standard deviation for a model without a config: transformers' default.
_DEVIATION = 0.02


@dataclass(frozen=True)
class TensorOrigin:
    """The stored tensors that become one tensor of the model."""

    shape: tuple[int, ...]  # as in the checkpoint
    stored: tuple[str, ...]
    chunks: Sequence[Chunk] | None  # of the stored tensors; ``None``: run the conversion
    conversion: Conversion | None = None  # ``None`` if the tensor is stored without a conversion
    output: str = ""  # the tensor's name among the conversion's outputs


@dataclass(frozen=True)
class WeightMap:
    """A checkpoint's tensors, matched with a model's tensors."""

    by_model_name: Mapping[str, TensorOrigin]
    unexpected: Sequence[str]  # names in the checkpoint that the model lacks
    rules: list[Any] | None  # the applied renamings and conversions, as transformers' objects

    def name_of(self, entry: StateEntry) -> str | None:
        """Return the entry's name that the checkpoint fills, or ``None`` if the checkpoint lacks the tensor."""
        return next((name for name in entry.names if name in self.by_model_name), None)


def map_weights(
    model: nn.Module, entries: Sequence[StateEntry], stored: Mapping[str, HubTensor], prefix: str
) -> WeightMap:
    """Match a checkpoint's tensors with the tensors of the module at ``prefix``, under their names in the model."""
    model, start = model.get_submodule(prefix), f"{prefix}." if prefix else ""
    known = {name.removeprefix(start) for entry in entries for name in entry.names if name.startswith(start)}
    is_transformers = is_transformers_model(model)
    mapping = Translation({name: name for name in stored}, ())
    if is_transformers:
        mapping = checkpoint_to_model(model, stored, known)
    origins = {
        start + target: TensorOrigin(stored[name].shape, (name,), [identity_chunk(name, stored[name].shape)])
        for name, target in mapping.renamed.items()
        if target in known
    }
    specs = {name: TensorSpec(tensor.shape, torch.float32) for name, tensor in stored.items()}
    unexpected = {name: target for name, target in mapping.renamed.items() if target not in known}
    for conversion in mapping.conversions:
        for target, result in trace_conversion(conversion, specs).items():
            chunks = result.chunks
            used = conversion.sources if chunks is None else tuple(dict.fromkeys(chunk.source for chunk in chunks))
            origins[start + target] = TensorOrigin(result.shape, used, chunks, conversion, target)
    reported = [n for n, target in unexpected.items() if not (is_transformers and is_ignored_on_load(model, target))]
    return WeightMap(origins, reported, mapping.rules if is_transformers else None)


class StoredSource:
    """The tensors of a checkpoint under the names of a model, with initial values for new modules."""

    def __init__(
        self,
        checkpoint: HubCheckpoint,
        model: nn.Module,
        entries: Sequence[StateEntry],
        new: Mapping[str, float],
        prefix: str,
    ) -> None:
        self._checkpoint, self._model, self._entries, self._new = checkpoint, model, entries, new
        self.weights = map_weights(model, entries, checkpoint.tensors, prefix)
        self._last: Conversion | None = None
        self._outputs: dict[str, Tensor] = {}  # of the last conversion: neighbouring tensors share a conversion

    def require_fit(self, *, strict: bool) -> None:
        """Refuse a checkpoint that does not fit the model, from headers only; warn of other tensors."""
        lacking = [entry.names[0] for entry in self._entries if self.weights.name_of(entry) is None]
        problems = {}
        for entry in self._entries:
            is_drawn = self._deviation(entry) is not None and packed_weight(entry) is None
            if (problem := self._problem(entry)) and not (entry.names[0] in lacking and is_drawn):
                problems[entry.names[0]] = problem
        if problems:
            listed = "\n  ".join(problems.values())
            fix = self._how_to_load([name for name in problems if name in lacking])
            raise MismatchError(f"the checkpoint does not fit the model in {len(problems)} tensors:\n  {listed}{fix}")
        if lacking:
            logger.warning("the checkpoint lacks %s: initial values are drawn", ", ".join(lacking))
        if unexpected := self.weights.unexpected:
            message = f"the checkpoint has {len(unexpected)} tensors that the model lacks: {', '.join(unexpected)}"
            if strict:
                raise MismatchError(f"{message}; pass strict=False to load the others")
            logger.warning("%s", message)

    def _problem(self, entry: StateEntry) -> str:
        """Return the difference between an entry's header in the checkpoint and the model; empty without any."""
        packed, name = packed_weight(entry), self.weights.name_of(entry)
        shape = tuple(entry.tensor.shape) if packed is None else packed.shape
        if name is None:
            return f"{' = '.join(entry.names)}: missing; the model has shape {shape}"
        origin = self.weights.by_model_name[name]
        stored = [self._checkpoint.tensors[part] for part in origin.stored]
        more = ", ..." * (len(origin.stored) > 2)
        label = name if origin.stored == (name,) else f"{name} (stored as {', '.join(origin.stored[:2])}{more})"
        if packed is not None:
            for weight in filter(None, map(self._checkpoint.stored.get, origin.stored)):
                weight.require_blocks(packed.format)
        files = " and ".join(sorted({str(part.file) for part in stored}))
        if origin.shape != shape:
            return f"{label}: shape {origin.shape} in {files}, {shape} in the model"
        dtype = entry.tensor.dtype if packed is None else packed.dtype
        if dtype.is_floating_point and (quantized := {part.dtype for part in stored} - _FLOATING):
            return (
                f"{label}: {', '.join(sorted(quantized))} in {files} needs scales to be converted to {dtype}: "
                "dequantize the checkpoint first"
            )
        return ""

    def fill(self, entry: StateEntry) -> None:
        """Fill this rank's shard of an entry with stored values, or with initial values."""
        name, packed = self.weights.name_of(entry), packed_weight(entry)
        if name is None:
            fill_from(entry.tensor, self._initial_value(entry))
        elif packed is not None:
            fill_packed(entry.tensor, packed, *self._chunks(name), self._checkpoint.read_codes)
        else:
            fill_local(entry.tensor, *self._chunks(name))

    def differing_ties(self, entries: Sequence[StateEntry]) -> Iterator[tuple[str, str, str]]:
        """Yield two names and their difference for each tied tensor with unequal values in this rank's slices."""
        origins = self.weights.by_model_name
        for entry in entries:
            first, *others = [name for name in entry.names if name in origins] or [""]
            for other in others:
                shape, other_shape = (origins[name].shape for name in (first, other))
                if shape != other_shape:
                    yield first, other, f"shapes {shape} and {other_shape}"
                    continue
                for box in split_box(local_part(entry.tensor)[1], _COMPARED):
                    parts = (read_box(box, entry.tensor.dtype, *self._chunks(name)) for name in (first, other))
                    if not torch.equal(*(part.reshape(-1).view(torch.uint8) for part in parts)):
                        yield first, other, "other values"
                        break

    def _chunks(self, name: str) -> tuple[Sequence[Chunk], ReadBox]:
        """Return a model tensor's source chunks, and the function that reads them; conversions run on full tensors."""
        origin = self.weights.by_model_name[name]
        if origin.chunks is not None:
            return origin.chunks, self._checkpoint.read
        if self._last is not origin.conversion and origin.conversion is not None:
            self._outputs.clear()
            inputs = {name: self._checkpoint.read(name) for name in origin.conversion.sources}
            self._last, self._outputs = origin.conversion, origin.conversion.run(inputs)
        return [identity_chunk(origin.output, origin.shape)], lambda name, box: self._outputs[name][slices_of(box)]

    def _deviation(self, entry: StateEntry) -> float | None:
        """Return the standard deviation of a tensor of a new module, ``None`` for a tensor of any other module."""
        inside = (std for path, std in self._new.items() for name in entry.names if name.startswith(f"{path}."))
        return next(inside, None)

    def _initial_value(self, entry: StateEntry) -> Tensor:
        """Return a tensor's full initial values, drawn from a generator seeded by the tensor's name."""
        name = entry.names[0]
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
        value = torch.zeros(entry.tensor.shape)
        owner, _, attribute = name.rpartition(".")
        if value.ndim > 1:
            value.normal_(std=self._deviation(entry) or 0.0, generator=generator)
        elif attribute == "weight" and "norm" in type(self._model.get_submodule(owner)).__name__.lower():
            value.fill_(1)
        return value

    def _how_to_load(self, missing: Sequence[str]) -> str:
        """Return an error's advice: a call that loads the checkpoint despite the missing tensors, or an empty text."""
        names = [entry.names[0] for entry in self._entries]
        inner = _inner_models(self._model)
        prefix = next((path for path in inner if self._fills(path, missing)), "")
        if prefix and len(inner) > 1:
            calls = ", ".join(f"load_weights(model.{path}, checkpoint)" for path in inner)
            return f"\nthe checkpoint is of the module {prefix!r} of this model: load each model alone, {calls}"
        if prefix:
            missing = [name for name in names if not name.startswith(f"{prefix}.")]
        elif 2 * len(missing) > len(names):
            return _around_checkpoint(missing, self._checkpoint.tensors)
        heads = dict.fromkeys(_missing_module(name, names, missing) for name in missing)
        if any(part.isdigit() for head in heads for part in head.split(".")) or "" in heads:
            return ""  # a part of a block: the checkpoint is incomplete
        std = getattr(getattr(self._model.get_submodule(prefix), "config", None), "initializer_range", _DEVIATION)
        drawn = {**self._new, **dict.fromkeys(heads, std)}
        if not missing and not prefix:
            return ""
        arguments = ", ".join([f"prefix={prefix!r}"] * bool(prefix) + [f"new_modules={drawn!r}"] * bool(drawn))
        cause = f"is of the module {prefix!r} of this model" if prefix else "lacks these modules"
        call = f"load_weights(model, checkpoint, {arguments})"
        return f"\nthe checkpoint {cause}: write {call}; values of new modules are drawn"

    def _fills(self, prefix: str, missing: Sequence[str]) -> bool:
        """Return whether all tensors of the module at ``prefix`` are missing without the prefix and stored with it."""
        inside = [entry for entry in self._entries if any(name.startswith(f"{prefix}.") for name in entry.names)]
        if not inside or not {entry.names[0] for entry in inside} <= {*missing}:
            return False
        weights = map_weights(self._model, self._entries, self._checkpoint.tensors, prefix)
        return all(weights.name_of(entry) is not None for entry in inside)


def require_equal_ties(differing: Sequence[tuple[str, str, str]]) -> None:
    """Refuse a checkpoint with two different tensors for one tied tensor; the same error on every rank."""
    if differing:
        listed = "\n  ".join(f"{first} and {other}: {why}" for first, other, why in sorted(set(differing)))
        raise MismatchError(
            "the model ties tensors that differ in the checkpoint: build the model from a config with "
            f"tie_word_embeddings=False, or remove one of the two from the checkpoint\n  {listed}"
        )


def submodule(model: nn.Module, option: str, path: str) -> nn.Module:
    """Return the submodule at ``path``, a value of the user's argument ``option``."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        heads = ", ".join(name for name, _ in model.named_children())
        raise OptionError(
            f"{option}: {type(model).__name__} has no module {path!r}; write a path such as {heads}"
        ) from error


def _inner_models(model: nn.Module) -> list[str]:
    """Return the paths of a module's outermost transformers submodules."""
    paths: list[str] = []
    for path, module in model.named_modules():
        if path and is_transformers_model(module) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
    return paths


def _missing_module(name: str, names: Sequence[str], missing: Sequence[str]) -> str:
    """Return the outermost module around a tensor with all tensors missing, or else the tensor's module."""
    path = name.rpartition(".")[0]
    lacking = {*missing}
    while (outer := path.rpartition(".")[0]) and all(n in lacking for n in names if n.startswith(f"{outer}.")):
        path = outer
    return path


def _around_checkpoint(missing: Sequence[str], stored: Mapping[str, HubTensor]) -> str:
    """Return an error's advice if the checkpoint stores all missing tensors under a prefix, or an empty text."""
    ends = (name.removesuffix(missing[0]) for name in stored if name.endswith(f".{missing[0]}"))
    prefix = next((start for start in ends if all(f"{start}{name}" in stored for name in missing)), "")
    if not prefix:
        return ""
    return (
        f"\nthe checkpoint has these tensors below {prefix!r}: it was saved from a module around this model. Save the "
        f"inner model with save_weights(module.{prefix.removesuffix('.')}, directory), and load that"
    )
