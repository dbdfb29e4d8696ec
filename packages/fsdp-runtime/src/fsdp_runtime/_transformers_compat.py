"""Every use of transformers' semi-private API, with its reason; tested on transformers 5.6 to 5.23.

transformers is imported only where the model is one of its own, so this package does not depend on it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_runtime._torch_compat import persistent_buffers
from fsdp_runtime.errors import BackendError, LayoutError, ModelError
from fsdp_runtime.parallel.prefix_attention import QueryRun, attend_in_runs, query_runs, remember_runs

#: The first release whose table of weight conversions, and order of applying it, is the one that is followed here.
OLDEST = (5, 6)
#: The flag by which transformers' initialisation functions leave a tensor alone.
_INITIALIZED = "_is_hf_initialized"


def is_transformers_model(module: nn.Module) -> bool:
    """Return True for a ``PreTrainedModel``; transformers is not imported for that."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def attention_in_force(config: Any) -> str | None:
    """Return the attention implementation of a config; only its setter is public (``set_attn_implementation``)."""
    found: str | None = config._attn_implementation
    return found


def has_model_for(auto: Any, config: Any) -> bool:
    """Return True if an auto class has a model for a config; the public way is to build one and catch its error."""
    return type(config) in auto._model_mapping


def kept_in_float32(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that transformers loads in float32 where the model is in bfloat16.

    ``_keep_in_fp32_modules_strict`` names them, as patterns that are searched in a parameter's name (5.6 to 5.23).
    """
    found = getattr(model, "_keep_in_fp32_modules_strict", None) if is_transformers_model(model) else None
    patterns = [re.compile(each.replace("*", ".*")) for each in found or ()]
    names = (name for name, _ in model.named_parameters())
    return frozenset(name for name in names if any(pattern.search(name) for pattern in patterns))


def is_stateful(model: Any) -> bool:
    """Return True if the model's class says that it carries a state from token to token, as ``generate`` asks."""
    return bool(getattr(model, "_is_stateful", False))


def use_attention(
    model: Any, name: str, attend: Callable[..., Any], mask: Callable[..., Any], *, keep: Iterable[nn.Module] = ()
) -> None:
    """Replace attention and its masks in the text part of a model, through transformers' public interfaces.

    The model gets a copy of its config first: another model built from the same config keeps its attention.

    Args:
        model: a ``PreTrainedModel``.
        name: the name to register the functions under.
        attend: a function for ``AttentionInterface``.
        mask: a function for ``AttentionMaskInterface``.
        keep: modules that keep their config, and with it their attention; they get the new masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    kept = set(keep)
    for module in model.modules():
        if module not in kept and id(config := getattr(module, "config", None)) in copies:
            module.config = copies[id(config)]
    text = model.config.get_text_config()
    key = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is text), None)
    model.set_attn_implementation(name if key is None else {key: name})


def rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings of a text config: one for all layers, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", "default")) for each in nested or [rope]}


def disable_cache(model: nn.Module) -> None:
    """Set ``use_cache`` to ``False`` in every config of a model's modules."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def sdpa_mask_between(
    queries: Tensor,
    keys: Tensor,
    *,
    mask_function: Any,
    documents: Tensor | None,
    positions: Tensor | None,
    subtree_end: Tensor | None,
    padding: Tensor | None,
    batch_size: int,
    use_vmap: bool,
) -> Tensor:
    """Build the boolean mask of ``scaled_dot_product_attention`` with transformers' own function.

    ``transformers.masking_utils`` is documented but not exported, and has moved functions between releases (5.6 to
    5.23).

    Args:
        queries: places of the queries in the row.
        keys: places of the keys.
        mask_function: of batch, head, query and key index.
        documents: ``[batch, seq]``, the number of each token's document in a packed batch, or ``None``.
        positions: ``[batch, seq]``, each token's position in its document, or on its path in a prefix tree.
        subtree_end: ``[batch, seq]``, of prefix trees, or ``None``; see :class:`PathMask`.
        padding: ``[batch, seq]``, false where a token is padding, or ``None``.
        batch_size: number of rows.
        use_vmap: the mask function takes single indices.

    Returns:
        ``[batch, 1, queries, keys]``.
    """
    from transformers.masking_utils import and_masks, padding_mask_function, sdpa_mask

    if subtree_end is not None and positions is not None:
        mask_function = PathMask(positions, subtree_end).along_paths(mask_function)
    elif documents is not None and positions is not None:
        of_positions, at = mask_function, positions  # chunks of attention start anew in each document
        mask_function = and_masks(
            lambda b, h, q, k: of_positions(b, h, at[b, q], at[b, k]),
            lambda b, h, q, k: documents[b, q] == documents[b, k],
        )
    if padding is not None:
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    device = queries.device
    # The function adds offsets to indices: vectors of them make places out of indices.
    offsets = {
        "q_offset": queries - torch.arange(len(queries), device=device),
        "kv_offset": keys - torch.arange(len(keys), device=device),
    }
    mask: Tensor = sdpa_mask(
        batch_size=batch_size,
        q_length=len(queries),
        kv_length=len(keys),
        mask_function=mask_function,
        attention_mask=None,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
        **offsets,  # type: ignore[arg-type]
    )
    return mask


@dataclass(frozen=True, eq=False)
class PathMask:
    """The prefix trees in a batch, over which masks are built.

    Args:
        positions: ``[batch, seq]``, the position of each token on its path.
        subtree_end: ``[batch, seq]``, the index after the last descendant of each token in pre-order.
    """

    positions: Tensor
    subtree_end: Tensor

    @cached_property
    def runs(self) -> tuple[QueryRun, ...]:
        """The runs of a batch of one row; none of a larger batch."""
        return query_runs(self.subtree_end[0]) if len(self.subtree_end) == 1 else ()

    def along_paths(self, mask_function: Any) -> Any:
        """Return a mask function of indices in the row, given a layer's own, which compares positions."""
        from transformers.masking_utils import and_masks

        positions, subtree_end = self.positions, self.subtree_end
        return and_masks(
            lambda b, h, q, k: mask_function(b, h, positions[b, q], positions[b, k]),
            lambda b, h, q, k: (k <= q) & (q < subtree_end[b, k]),
        )


def build_masks_along_paths(current: ContextVar[PathMask | None], implementations: Iterable[str]) -> None:
    """Let transformers' own mask functions build masks along the paths of prefix trees, while there are any.

    The registered functions are replaced by ones that call them, once a process; without trees nothing changes.  The
    model's implementation of attention keeps its name, which some models compare with the names that they know.

    Args:
        current: the trees of the batch that runs.
        implementations: names of implementations of attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in implementations:
        build = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not isinstance(build, _BuildAlongPaths):
            AttentionMaskInterface.register(name, _BuildAlongPaths(build, current))
            if name == "sdpa":
                AttentionInterface.register(name, partial(attend_in_runs, ALL_ATTENTION_FUNCTIONS[name]))


@dataclass(frozen=True)
class _BuildAlongPaths:
    """A function of ``AttentionMaskInterface`` over another one.

    Args:
        build: the other one.
        current: the trees of the batch that runs.
    """

    build: Callable[..., Any]
    current: ContextVar[PathMask | None]

    def __call__(self, *, q_length: int, kv_length: int, **options: Any) -> Any:
        """Build a mask.

        Raises:
            ModelError: a mask is bidirectional.
            LayoutError: a mask has another length than the trees.
        """
        trees = self.current.get()
        # A vision tower's masks are bidirectional, over its own patches.
        bidirectional = "allow_is_bidirectional_skip" in options
        if trees is None or (bidirectional and q_length != trees.subtree_end.shape[1]):
            return self.build(q_length=q_length, kv_length=kv_length, **options)
        if bidirectional:
            raise ModelError("bidirectional attention cannot share prefixes: a prefix depends on what follows it")
        if not q_length == kv_length == trees.subtree_end.shape[1]:
            raise LayoutError(
                f"attention from {q_length} to {kv_length} tokens, where the row with shared prefixes has "
                f"{trees.subtree_end.shape[1]}: only self-attention without a cache can share prefixes"
            )
        causal = is_causal_mask_function(options["mask_function"])
        options |= {
            "mask_function": trees.along_paths(options["mask_function"]),
            "attention_mask": None,
            "allow_is_causal_skip": False,
        }
        mask = self.build(q_length=q_length, kv_length=kv_length, **options)
        remember_runs(mask, trees.runs, causal=causal)
        return mask


def is_causal_mask_function(mask_function: Any) -> bool:
    """Return True for transformers' plain causal mask function, which is not exported either."""
    from transformers.masking_utils import causal_mask_function

    return mask_function is causal_mask_function


@dataclass(frozen=True)
class Conversion:
    """One use of a ``WeightConverter``: tensors that are fused, merged or cut into others.

    Args:
        sources: names of the tensors that go in, in transformers' order.
        run: does it, given them by name; the results by their final names.
    """

    sources: tuple[str, ...]
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Translation:
    """How the tensors on one side become those of the other.

    Args:
        renamed: names on the other side, for tensors that stay as they are.
        conversions: of the other names.
        rules: the rules that applied, for :func:`remember_rules`.
    """

    renamed: Mapping[str, str]
    conversions: Sequence[Conversion]
    rules: list[Any] = field(default_factory=list)


def into_model(model: Any, checkpoint_names: Iterable[str], known: set[str]) -> Translation:
    """How a checkpoint's tensors become the model's.

    ``from_pretrained`` renames (and for some architectures merges) what it reads by a table that has no public
    reader; this follows its order: renamings, then at most one conversion, then the base model's prefix.

    Args:
        model: the model.
        checkpoint_names: names as the files have them.
        known: the model's own names.
    """
    if not is_transformers_model(model):
        return Translation({name: name for name in checkpoint_names}, ())
    _require_known_release()
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    rules = _conversion_rules(model)
    renamings, converters = _by_kind(rules)
    own: dict[str, Any] = dict.fromkeys(known, True)
    renamed: dict[str, str] = {}
    groups = _Groups(model, converters)
    for name in sorted(checkpoint_names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if target not in known and name in known:  # a rule meant for another layout of the same architecture
            target, pattern = name, None
        if pattern is None or target not in known:
            renamed[name] = target
        else:
            groups.add(target, pattern, name)
    used = [rule for rule in rules if rule.was_used()]
    return Translation(renamed, groups.conversions(lambda name: name), used)


def remember_rules(model: Any, rules: list[Any]) -> None:
    """Keep the rules of a load where ``from_pretrained`` does, so that saving writes the names that were read."""
    if is_transformers_model(model):
        model._weight_conversions = rules


def out_of_model(model: Any, names: Iterable[str]) -> Translation:
    """How the model's tensors become those that ``save_pretrained`` writes."""
    if not is_transformers_model(model):
        return Translation({name: name for name in names}, ())
    _require_known_release()
    from transformers.core_model_loading import PrefixChange, dot_natural_key

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # as in save_pretrained of a model that was not loaded: nothing tells whether a prefix was there
        rules = [rule for rule in _conversion_rules(model, add_legacy=False) if not isinstance(rule, PrefixChange)]
    renamings, converters = _by_kind([rule.reverse_transform() for rule in reversed(rules)])
    renamed: dict[str, str] = {}
    groups = _Groups(model, converters)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _converted(name, converters)
        if pattern is None:
            renamed[name] = _renamed(name, renamings)
        else:
            groups.add(target, pattern, name)
    return Translation(renamed, groups.conversions(lambda name: _renamed(name, renamings)))


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    """A name after all renamings in turn; transformers has a function for it only since 5.22."""
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    return name


def _converted(name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
    """The target of the first converter that takes a name, and the pattern by which it does."""
    for rule in converters:
        target, pattern = rule.rename_source_key(name)
        if pattern is not None:
            return target, pattern
    return name, None


class _Groups:
    """Tensors collected by the first target of the converter that takes them, as transformers does."""

    def __init__(self, model: Any, converters: list[Any]) -> None:
        self._model = model
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}

    def add(self, target: str, pattern: str, name: str) -> None:
        """Give a tensor to the group of a target."""
        _, members = self._groups.setdefault(target, (self._converters[pattern], []))
        members.append((pattern, name))

    def conversions(self, final_name: Callable[[str], str]) -> list[Conversion]:
        """One conversion a group; ``final_name`` maps the names that converters give."""

        def conversion(target: str, converter: Any, members: list[tuple[str, str]]) -> Conversion:
            def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
                once = copy.deepcopy(converter)
                for pattern, name in members:
                    once.add_tensor(target, name, pattern, tensors[name])
                made = once.convert(target, model=self._model, config=self._model.config)
                return {
                    final_name(name): value[0] if isinstance(value, list) else value for name, value in made.items()
                }

            return Conversion(tuple(name for _, name in members), run)

        return [conversion(target, converter, members) for target, (converter, members) in self._groups.items()]


def declared_aliases(model: Any) -> set[str]:
    """Names that the model declares to be tied to another's tensor, as ``lm_head.weight``; not saved."""
    return set(getattr(model, "all_tied_weights_keys", None) or ()) if is_transformers_model(model) else set()


def ignored_on_save(model: Any) -> set[str]:
    """Names that ``save_pretrained`` leaves out."""
    return set(model._keys_to_ignore_on_save or ()) if is_transformers_model(model) else set()


def is_ignored_on_load(model: Any, name: str) -> bool:
    """Return True if the model's class says that a name may be in a checkpoint without being in the model."""
    patterns = (model._keys_to_ignore_on_load_unexpected or ()) if is_transformers_model(model) else ()
    return any(re.search(pattern, name) for pattern in patterns)


def initialize_module(owner: Any, module: nn.Module) -> None:
    """Let a ``PreTrainedModel`` compute the buffers of one of its modules, leaving every parameter as it is.

    ``from_pretrained`` builds on the meta device itself and relies on ``_init_weights`` for non-persistent buffers,
    so every architecture of transformers 5 has it right.
    """
    _require_known_release()
    from transformers.initialization import guard_torch_init_functions

    # Some modules initialise their children's parameters too.
    kept = [*module.parameters(), *(b for part in module.modules() for b in persistent_buffers(part).values())]
    marked = [tensor for tensor in kept if not hasattr(tensor, _INITIALIZED)]
    for tensor in marked:
        setattr(tensor, _INITIALIZED, True)
    try:
        with torch.no_grad(), guard_torch_init_functions():
            owner._init_weights(module)
    finally:
        for tensor in marked:
            delattr(tensor, _INITIALIZED)


@contextmanager
def fake_tensors_are_data() -> Iterator[None]:
    """Let transformers treat fake tensors as tensors with data, as it does in training.

    It takes them for a graph being traced, and then builds attention masks that a real run finds it can do without.
    """
    if (utilities := sys.modules.get("transformers.utils.import_utils")) is None:
        yield
        return
    asks = getattr(utilities, "is_fake_tensor", None)
    setattr(utilities, "is_fake_tensor", lambda _tensor: False)  # noqa: B010  # a module has no such attribute to mypy
    try:
        yield
    finally:
        setattr(utilities, "is_fake_tensor", asks)  # noqa: B010


def save_config(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write ``config.json`` (and ``generation_config.json``) as ``save_pretrained`` would."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [_original_class(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


@cache
def _release() -> str:
    """The installed transformers, read from disk once: buffers ask module by module."""
    return metadata.version("transformers")


def _require_known_release() -> None:
    """Refuse a transformers that renames, fuses or initialises otherwise than this package knows of.

    Raises:
        BackendError: it is older.
    """
    release = _release()
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendError(
            f"transformers {release} is installed, whose checkpoints' names and fused weights this package does not "
            f"know; it reads, writes and streams weights of models of transformers {oldest} and later: "
            f"pip install 'transformers>={oldest}'"
        )


def _conversion_rules(model: Any, **options: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    with _original_classes(model):
        return list(get_model_conversion_mapping(model, **options))


def _by_kind(rules: list[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


@contextmanager
def _original_classes(model: nn.Module) -> Iterator[None]:
    """The model with its classes as they were before ``fully_shard``.

    FSDP2 gives a module a class of another name and Python module; transformers' table goes by the name, and
    takes such a class for code from elsewhere, to which no renaming applies.
    """
    changed = [(module, type(module)) for module in model.modules() if type(module) is not _original_class(module)]
    try:
        for module, _ in changed:
            module.__class__ = _original_class(module)
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a ``PreTrainedModel`` without those that were mixed in at run time; of other modules, its own."""
    if not is_transformers_model(module):
        return type(module)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))


@contextmanager
def checkpointing_through(model: nn.Module, bind: Callable[[nn.Module, Callable[..., Any]], Any]) -> Iterator[None]:
    """Pass what ``gradient_checkpointing_enable`` recomputes through ``bind`` for the duration of the context.

    The enabled modules carry the checkpoint function as ``_gradient_checkpointing_func`` (5.6 to 5.23), which has no
    public accessor.
    """
    name = "_gradient_checkpointing_func"
    found = {module: vars(module)[name] for module in model.modules() if callable(vars(module).get(name))}
    for module, checkpoint in found.items():
        vars(module)[name] = _through(module, checkpoint, bind)
    try:
        yield
    finally:
        for module, checkpoint in found.items():
            vars(module)[name] = checkpoint


def _through(module: nn.Module, checkpoint: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, *args: checkpoint(bind(module, function), *args)
