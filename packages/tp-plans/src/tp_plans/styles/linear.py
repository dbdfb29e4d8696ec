"""Linear layers with split weights."""

from __future__ import annotations

from dataclasses import dataclass

from tp_plans.layouts import Layout, Partial, Replicate, Shard
from tp_plans.styles.fields import require, require_flag, require_fused_sizes, require_layout, require_multiple_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ColwiseParallel:
    """A linear layer with split output features (and bias): ``[out, in]`` becomes ``[out / tp, in]``.

    The input is gathered where it is sharded; its gradient is summed over the axis.

    Args:
        input_layouts: how a plain input tensor is read: ``Replicate()``, or ``Shard(-1)`` for this rank's features.
        output_layouts: layout of the output: ``Shard(-1)``, or ``Replicate()`` to gather the features.
        use_local_output: output this rank's local shard as a plain tensor rather than a DTensor.
        multiple_of: the features are split in multiples of this many: a number, or the name of an integer
            attribute of the parent module, as ``"head_dim"`` for a query projection.
        fused_sizes: where the weight is several matrices one after another (a fused ``qkv_proj`` or
            ``gate_up_proj``), their relative sizes in order, as numbers or attributes of the parent:
            ``(1, 1)`` for gate and up.  Each is split separately: a rank gets its part of every one.
        replicate_kv_heads: where the axis is larger than the number of key/value heads, the ranks that need the same
            head share it: each computes with it, and their gradients are summed.
    """

    input_layouts: Layout = Replicate()
    output_layouts: Layout = Shard(-1)
    use_local_output: bool = True
    multiple_of: int | str = 1
    fused_sizes: tuple[int | str, ...] = ()
    replicate_kv_heads: bool = False

    def __post_init__(self) -> None:
        require(self, "input_layouts", self.input_layouts in (Replicate(), Shard(-1)), "Replicate() or Shard(-1)")
        require_layout(self, "output_layouts")
        require_flag(self, "use_local_output")
        require_multiple_of(self, "multiple_of")
        require_fused_sizes(self, "fused_sizes")
        require_flag(self, "replicate_kv_heads")
        if self.fused_sizes or self.replicate_kv_heads:
            ungathered = "Shard(-1): features of several pieces, or shared ones, are not gathered"
            require(self, "output_layouts", self.output_layouts != Replicate(), ungathered)
            require(self, "use_local_output", self.use_local_output, "True: no DTensor layout describes such features")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseParallel:
    """A linear layer with split input features: ``[out, in]`` becomes ``[out, in / tp]``.

    The ranks' partial outputs are summed.  A bias is replicated and added once.

    Args:
        input_layouts: how a plain input tensor is read: ``Shard(-1)``, or ``Replicate()`` to cut it first.
        output_layouts: layout of the output: ``Replicate()``, ``Shard(dim)`` to reduce-scatter onto a dim, or
            ``Partial()`` to leave the sum to whoever adds more to it.
        use_local_output: output this rank's local shard as a plain tensor rather than a DTensor.
        multiple_of: the features are split in multiples of this many, as in ``ColwiseParallel``.
        fused_sizes: where the input is several vectors one after another, as in ``ColwiseParallel``.
    """

    input_layouts: Layout = Shard(-1)
    output_layouts: Layout = Replicate()
    use_local_output: bool = True
    multiple_of: int | str = 1
    fused_sizes: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        # A plain tensor tells nothing of the other ranks' sizes, so a cut of any other dim could not be read.
        require(self, "input_layouts", self.input_layouts in (Shard(-1), Replicate()), "Shard(-1) or Replicate()")
        require_layout(self, "output_layouts", Replicate, Shard, Partial)
        require_flag(self, "use_local_output")
        require_multiple_of(self, "multiple_of")
        require_fused_sizes(self, "fused_sizes")
        replicated = self.input_layouts == Replicate() and self.fused_sizes
        require(self, "input_layouts", not replicated, "Shard(-1): an input of several pieces arrives split")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAKVProjection:
    """The projection of multi-head latent attention to the compressed keys and values (``kv_a_proj_with_mqa``).

    The weight's rows are split and the output is gathered.  Its last features, the rotary key that all heads
    share, go straight to this rank's heads, so the ranks' gradients of them are parts and are summed; the others
    go through a column-wise layer, which sums.  Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.

    Args:
        rope_dim: how many features the shared rotary key has: a number, or the name of an attribute of the parent; 0 in
            models with latent attention without positions.
    """

    rope_dim: int | str = "qk_rope_head_dim"

    def __post_init__(self) -> None:
        require_multiple_of(self, "rope_dim", least=0)
