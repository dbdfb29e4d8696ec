"""Embeddings split on the vocabulary or on the features."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_plans import layouts
from tp_plans.styles import ColwiseEmbedding, VocabParallelEmbedding
from tp_plans.torch_styles.base import FirstTensorStyle, ForwardContext
from tp_plans.torch_styles.collectives import own_bounds
from tp_plans.torch_styles.gradients import contiguous_part
from tp_plans.torch_styles.placement import as_dtensor, plain_full_tensor, redistribute, to_output, wrap


class VocabParallelEmbeddingImpl(FirstTensorStyle):
    """``VocabParallelEmbedding``: looks up this rank's ids, zeros for the others, sums over the ranks."""

    # The lookup is local, so a rank's gradient has the size of its slice; DTensor's embedding gives every rank a
    # gradient of the full table.
    style: VocabParallelEmbedding

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        rows = context.shape("weight")[0]
        start, end = own_bounds(rows, context.mesh)
        padding = getattr(module, "padding_idx", None)
        if padding is not None:  # an index into the full table, which the module applies to its slice
            context.attributes["padding_idx"] = padding
            module.padding_idx = padding - start if start <= padding < end else None  # type: ignore[assignment]
        ids: Tensor = plain_full_tensor(tensor, context.mesh)
        # Ids outside the vocabulary stay outside this rank's rows, so that the lookup fails as with the full table.
        foreign = ((ids >= 0) & (ids < start)) | ((ids >= end) & (ids < rows))
        context.saved["foreign"] = foreign
        return (ids - start).masked_fill(foreign, 0)

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        own = output.masked_fill(context.saved["foreign"].unsqueeze(-1), 0)
        summed = redistribute(as_dtensor(own, context.mesh, layouts.Partial()), self.style.output_layouts)
        return _output(summed, use_local_output=self.style.use_local_output)


class ColwiseEmbeddingImpl(FirstTensorStyle):
    """``ColwiseEmbedding``: looks up this rank's features of every entry."""

    style: ColwiseEmbedding

    def enter(self, module: nn.Module, tensor: Tensor, context: ForwardContext) -> Tensor:
        ids: Tensor = plain_full_tensor(tensor, context.mesh)
        return ids

    def post_forward(self, module: nn.Module, output: Tensor, context: ForwardContext) -> Tensor:
        features = context.shape("weight")[1]
        own = wrap(output, context.mesh, output.ndim - 1, size=features)
        full = redistribute(own, self.style.output_layouts)
        return _output(full, use_local_output=self.style.use_local_output)


def _output(output: DTensor, *, use_local_output: bool) -> Tensor:
    """Return an output as this rank's plain tensor, which model code may change in place, or a contiguous DTensor."""
    return to_output(output, use_local_output=True) if use_local_output else contiguous_part(output)
