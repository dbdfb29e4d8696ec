"""Embeddings split on the vocabulary or on the features."""

from __future__ import annotations

from torch import Tensor, nn

from tp_plans import layouts
from tp_plans.styles import ColwiseEmbedding, VocabParallelEmbedding
from tp_plans.torch_styles.base import Args, Call, Kwargs, LocalStyle, first_argument
from tp_plans.torch_styles.placement import plain_whole, redistribute, wrap
from tp_plans.torch_styles.reduce import handed_on, reduced


class LocalEmbedding(LocalStyle):
    """``VocabParallelEmbedding``: looks up this rank's ids, zeros for the others, sums over the ranks.

    The lookup is local, so a rank's gradient has the size of its own slice; DTensor's embedding gives every
    rank a gradient of the whole table.
    """

    style: VocabParallelEmbedding

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        rows = call.parameters["weight"].shape[0]
        start, end = self._own_rows(rows, call)

        def own_ids(ids: Tensor) -> Tensor:
            ids = plain_whole(ids, call.mesh)
            # Ids outside the vocabulary stay outside this rank's rows, so that the lookup fails as it would whole.
            foreign = ((ids >= 0) & (ids < start)) | ((ids >= end) & (ids < rows))
            call.memory["foreign"] = foreign
            return (ids - start).masked_fill(foreign, 0)

        padding = getattr(module, "padding_idx", None)
        if padding is not None:  # an index into the whole table, which the module applies to its slice
            call.attributes["padding_idx"] = padding
            module.padding_idx = padding - start if start <= padding < end else None  # type: ignore[assignment]
        return first_argument(args, kwargs, own_ids)

    def leave(self, module: nn.Module, output: Tensor, call: Call) -> Tensor:
        own = output.masked_fill(call.memory["foreign"].unsqueeze(-1), 0)
        return reduced(own, call.mesh, self.style.output_layouts, use_local_output=self.style.use_local_output)

    def _own_rows(self, rows: int, call: Call) -> tuple[int, int]:
        """The ids whose rows this rank holds; DTensor deals ceiling-sized chunks."""
        chunk = -(-rows // call.mesh.size())
        start = min(rows, chunk * call.mesh.get_local_rank())
        return start, min(rows, start + chunk)


class LocalFeatures(LocalStyle):
    """``ColwiseEmbedding``: looks up this rank's features of every entry."""

    style: ColwiseEmbedding

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, call: Call) -> tuple[Args, Kwargs]:
        return first_argument(args, kwargs, lambda ids: plain_whole(ids, call.mesh))

    def leave(self, module: nn.Module, output: Tensor, call: Call) -> Tensor:
        features = call.parameters["weight"].shape[1]
        whole = redistribute(
            wrap(output, call.mesh, layouts.Shard(output.ndim - 1), size=features), self.style.output_layouts
        )
        return handed_on(whole, use_local_output=self.style.use_local_output)
