"""The kernel of each attention call over documents, windows and ``cp``: decided once per model, tried, and called.

``"varlen"`` is torch's FlashAttention over segments, ``"flex"`` its compiled flex attention under a block mask, and
``"batches"`` runs ``scaled_dot_product_attention`` on documents of similar length.  ``"tiles"`` masks a ring's
tiles one by one.  ``"mask"`` holds a mask of all pairs of tokens: the last resort, and the exact rule on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention

from fsdp_runtime._torch_compat import flex_attention, varlen_attention
from fsdp_runtime._transformers_compat.attention import needs_eager_or_flex
from fsdp_runtime._transformers_compat.masks import MaskPattern
from fsdp_runtime.model.token_mixers import TokenMixer
from fsdp_runtime.setup import Setup
from fsdp_runtime.sharded.collectives import ModelRanks, all_gather_objects
from fsdp_runtime.steps.context.masks import SequenceMask
from fsdp_runtime.steps.context.methods import attention_dropout
from fsdp_runtime.steps.context.sharding import SequenceLayout
from fsdp_runtime.steps.documents.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

#: The keys of an attention call: of full rows, of full rows for a part of the queries, or of one rank after another.
Keys = Literal["rows", "gathered", "passed"]
HALF = (torch.float16, torch.bfloat16)
#: The widest head of FlashAttention 2; widths are multiples of 8.
_WIDEST, _ALIGNED = 256, 8
#: Tokens of a block, torch's default, and the queries with a mask of all keys in memory at once.
_BLOCK, _AT_ONCE = 128, 1024
#: In a trial, the first token of the second of two documents, and the end of it.
_SPLIT, _LENGTH = 100, 256
#: The largest difference from scaled_dot_product_attention, for outputs of up to 1 in half precision.
_BOUND = 0.05

_simulated: ContextVar[str | None] = ContextVar("simulated_device_type", default=None)


@contextmanager
def kernels_of_device(device_type: str) -> Iterator[None]:
    """Choose kernels as on a device of this type, for models that are parallelized inside the ``with``."""
    token = _simulated.set(device_type)
    try:
        yield
    finally:
        _simulated.reset(token)


def is_accelerated(device_type: str) -> bool:
    """Return True for a mesh with kernels beyond a CPU's."""
    return (_simulated.get() or device_type) != "cpu"


@dataclass(frozen=True)
class Needs:
    """The properties of an attention call that decide about its kernel."""

    dtype: torch.dtype
    widths: tuple[int, int]  # of queries and of values, per head; kernels pad narrower values
    keys: Keys
    pattern: MaskPattern | None
    changes_scores: bool = False  # by sinks or a soft cap
    biased: bool = False  # per pair of tokens
    dropout: bool = False


@dataclass(eq=False)
class AttentionKernels:
    """The kernels of one model, the same on all ranks of its mesh."""

    accelerated: bool = False  # masks are the last resort
    usable: frozenset[str] = frozenset()  # kernels that passed their trial on every rank
    by_path: dict[str, str] = field(default_factory=dict)  # of each attention module, for reports
    _logged: bool = False

    def of(self, needs: Needs) -> str:
        """Return the kernel of a call."""
        width, of_values = needs.widths
        plain = needs.pattern is not None and not (needs.changes_scores or needs.biased)
        fits = of_values <= width <= _WIDEST and width % _ALIGNED == 0 and needs.dtype in HALF and not needs.dropout
        in_reach = needs.keys != "passed" or needs.pattern is None or needs.pattern.window is None
        if plain and fits and in_reach and "varlen" in self.usable:
            return "varlen"
        if needs.keys == "passed":
            return "tiles"
        if plain and self.accelerated and needs.keys == "rows" and needs.pattern == MaskPattern():
            return "batches"
        takes_flex = needs.dtype in (*HALF, torch.float32) and not (needs.dropout or needs.biased)
        return "flex" if takes_flex and "flex" in self.usable else "mask"

    def report_mask(self, mask: Tensor) -> None:
        """Log the bytes of a mask on an accelerator, once per model."""
        if self.accelerated and not self._logged:
            logger.warning(
                "attention holds a mask %s of %s bytes, because none of the kernels %s computes it "
                "(describe_parallelism lists the modules): compute in half precision without attention_dropout",
                list(mask.shape), f"{mask.nbytes:,}", sorted(self.usable),
            )  # fmt: skip
        self._logged = True


def kernel_of(
    kernels: AttentionKernels, query: Tensor, value: Tensor, mask: SequenceMask, keys: Keys, **options: Any
) -> str:
    """Return the kernel of one call, by its tensors and the keywords of an attention function."""
    return kernels.of(
        Needs(
            dtype=query.dtype,
            widths=(query.shape[-1], value.shape[-1]),
            keys=keys,
            pattern=mask.pattern,
            changes_scores=options.get("softcap") is not None or options.get("s_aux") is not None,
            biased=options.get("position_bias") is not None,
            dropout=options.get("dropout", 0.0) > 0,
        )
    )


def attend(
    kernels: AttentionKernels, query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, **options: Any
) -> Tensor | None:
    """Return attention ``[batch, queries, heads, value_dim]``, ``None`` where only the full mask describes it."""
    if torch.is_autocast_enabled(device := query.device.type):  # as for scaled_dot_product_attention
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    kernel = kernel_of(kernels, query, value, mask, "rows" if mask.layout.ranks == 1 else "gathered", **options)
    scale = options.get("scaling")
    if kernel == "varlen":
        return attend_in_segments(query, key, value, mask, scale)
    if kernel == "batches":
        output: Tensor = attend_in_batches(query, key, value, mask, scale, options.get("dropout", 0.0))
        return output
    if kernel == "flex":
        return attend_in_blocks(query, key, value, mask, scale, options.get("softcap"), options.get("s_aux"))
    return None


def prepared(kernels: AttentionKernels, mask: SequenceMask) -> SequenceMask:
    """Return a mask with the inputs of kernels, built once per forward and outside of compiled blocks."""
    if mask.pattern is not None and "varlen" in kernels.usable:
        _ = mask.segments
    if "flex" in kernels.usable and ("flex" in kernels.by_path.values() or mask.pattern is None):
        block_mask(mask)
    return mask


def attend_in_segments(query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, scale: float | None) -> Tensor:
    """Attend within the documents of each chunk of queries."""
    size = query.shape[2] // len(mask.segments)
    outputs = []
    for at, segments in enumerate(mask.segments):
        parts = [query.narrow(2, at * size, size), *(each[:, :, : segments.keys_at_hand] for each in (key, value))]
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        output = varlen_attention(flat[0], flat[1], flat[2], *segments.bounds, window=mask.window, scale=scale)
        outputs.append(torch.unflatten(output, 0, (-1, size)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ from batch to batch
def attend_in_batches(
    query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask, scale: float | None, dropout: float
) -> Tensor:
    """Attend on batches of documents of similar length under a causal mask; padding is at their ends."""
    outputs: list[Tensor] = []
    attend_alone: Any = scaled_dot_product_attention
    groups = query.shape[1] // key.shape[1]  # of CUDA's kernels only FlashAttention takes fewer key heads
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    for batch in mask.isolated.batches:
        inputs = [batch.take(each.transpose(1, 2)).transpose(1, 2) for each in (query, key, value)]
        output = attend_alone(*inputs, dropout_p=dropout, is_causal=True, scale=scale)
        outputs.append(output.transpose(1, 2))
    return mask.isolated.together(outputs, mask.isolated.batches)


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: SequenceMask,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by flex attention; sinks rescale the output by its log-sum-exp."""
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # flex attention groups by powers of two
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    output, lse = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else lambda score, *_: softcap * torch.tanh(score / softcap),
        block_mask=block_mask(mask),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if sinks is not None:
        output = output * torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1)).unsqueeze(-1).to(output.dtype)
    return output.transpose(1, 2)


def block_mask(mask: SequenceMask) -> BlockMask:
    """Return the block mask of this rank's queries and all keys, built once per mask without a host wait."""
    if mask.blocks is None:
        from torch.nn.attention.flex_attention import BlockMask

        keys = torch.arange(mask.layout.length, device=mask.device)
        queries, of_indices = mask.layout.positions.to(mask.device), mask.of_indices
        tiles = [_by_block(mask.between(part, keys)) for part in torch.split(queries, _AT_ONCE)]
        some, every = (torch.cat(parts, dim=2) for parts in zip(*tiles, strict=True))
        mask.blocks = BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=_BLOCK,
            mask_mod=lambda batch, head, query, key: of_indices(batch, head, queries[query], key),
            seq_lengths=(len(queries), len(keys)),
        )
    built: BlockMask = mask.blocks
    return built


def _by_block(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of a mask ``[batch, 1, queries, keys]`` if some pair, and if every pair is seen."""
    padded: Any = pad(tile, (0, -tile.shape[3] % _BLOCK, 0, -tile.shape[2] % _BLOCK))
    blocks = padded.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true blocks of each row of blocks, and their places first."""
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), places.to(torch.int32)


def decide(setup: Setup, replaced: Sequence[TokenMixer], others: Sequence[TokenMixer], keys: Keys) -> AttentionKernels:
    """Return the kernels of a model's attention modules; collective over the mesh, except on a CPU."""
    # ``others`` compute attention in their own code. "eager" attention is kept where it was a choice of the user.
    facts, meshes = setup.facts, setup.meshes
    is_choice = facts.attention == "eager" and not needs_eager_or_flex(facts.row_model, facts.text_config)
    kernels = AttentionKernels(accelerated=is_accelerated(meshes.device_type) and not is_choice)
    needs = {mixer.path: _needs(mixer.module, setup, keys) for mixer in replaced}
    if kernels.accelerated and needs:
        all_axes = [mesh for mesh in (meshes.fsdp, meshes.cp, meshes.tp) if mesh is not None]
        groups = [group for mesh in all_axes for group in mesh.get_all_groups() if dist.get_backend(group) != "fake"]
        kernels.usable = _usable(list(needs.values()), torch.device(meshes.device_type), groups)
    kernels.by_path = {path: kernels.of(need) for path, need in needs.items()}
    of_others = facts.attention if facts.attention.startswith("flash") else "mask"
    kernels.by_path |= {mixer.path: of_others for mixer in others if mixer.isolation == "mask"}
    return kernels


def _needs(module: Any, setup: Setup, keys: Keys) -> Needs:
    policies = (getattr(step, "mp_policy", None) for step in setup.steps)
    dtypes = [dtype for policy in policies if (dtype := getattr(policy, "param_dtype", None)) is not None]
    dtypes += [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    width = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or 64
    return Needs(
        dtype=dtypes[0] if dtypes else torch.float32,
        widths=(width, getattr(module, "v_head_dim", None) or width),
        keys=keys,
        pattern=None if setup.shared_prefixes else MaskPattern(window=getattr(module, "sliding_window", None)),
        changes_scores=any(getattr(module, name, None) is not None for name in ("sinks", "attn_logit_softcapping")),
        dropout=attention_dropout(module) > 0,
    )


def _usable(needs: Sequence[Needs], device: torch.device, groups: Sequence[ProcessGroup]) -> frozenset[str]:
    """Return the kernels that some module needs and every rank can run; the others get one warning each."""
    if _simulated.get() is not None:  # no kernel can be tried
        return frozenset({"varlen"})
    # Under autocast, a model in float32 attends in half precision.
    both = AttentionKernels(accelerated=True, usable=frozenset({"varlen", "flex"}))
    tried = {"varlen", *(both.of(need) for need in needs)} & both.usable
    dtype = next((need.dtype for need in needs if need.dtype in HALF), torch.bfloat16)
    errors = {kernel: error for kernel in tried if (error := try_kernel(kernel, needs[0].widths[0], dtype, device))}
    failed: dict[str, str] = {}
    for rank, of_rank in all_gather_objects(ModelRanks(groups), errors).items():
        failed |= {kernel: f"on rank {rank}, {error}" for kernel, error in of_rank.items()}
    for kernel, error in sorted(failed.items()):
        logger.warning("attention does not use the kernel %r: %s", kernel, error)
    return frozenset(tried - failed.keys())


def try_kernel(kernel: str, width: int, dtype: torch.dtype, device: torch.device) -> str:
    """Run a kernel on two documents, forward and backward, and return the reason against it, or an empty text."""
    numbers = torch.arange(2 * _LENGTH * width, device=device).view(1, 2, _LENGTH, width)
    inputs = [torch.sin(numbers * factor).to(dtype) for factor in (1.7, 2.7, 3.7)]
    parts = [torch.split(each, [_SPLIT, _LENGTH - _SPLIT], dim=2) for each in inputs]
    try:
        with torch.enable_grad():
            query, key, value = (each.requires_grad_() for each in inputs)
            attend = attend_in_segments if kernel == "varlen" else attend_in_blocks
            output = attend(query, key, value, _two_documents(device), None)
            gradients = torch.autograd.grad(output.sum(), inputs)
        alone = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
        difference = float((output - torch.cat(alone, dim=2).transpose(1, 2)).detach().abs().max())
    except Exception as error:  # noqa: BLE001  # a compiler and a driver may raise anything
        return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    return "" if difference <= _BOUND and finite else f"its results are off by {difference:.1e}"


def _two_documents(device: torch.device) -> SequenceMask:
    places = torch.arange(_LENGTH, device=device)

    def sees(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((key < _SPLIT) == (query < _SPLIT))

    return SequenceMask(
        lambda queries, keys: sees(0, 0, queries[:, None], keys)[None, None],
        SequenceLayout(_LENGTH, 1, 0),
        device,
        pattern=MaskPattern(),
        isolated=Documents(((places == 0) | (places == _SPLIT))[None], (2, _LENGTH)),
        of_indices=sees,
    )
