"""What can go wrong between a model and a running mesh, as types; each message names the numbers and the fix."""

from __future__ import annotations


class FsdpRuntimeError(Exception):
    """Base class of every error that this package raises on purpose."""


class MeshError(FsdpRuntimeError, ValueError):
    """A mesh cannot be built, or is not one that a model can use."""


class ModelError(FsdpRuntimeError, ValueError):
    """A model has no structure that the runtime can work with, or is in a state in which it must not."""


class LayoutError(FsdpRuntimeError, ValueError):
    """Inputs do not lie over the ranks as they must."""


class OptionError(FsdpRuntimeError, ValueError):
    """An option has a value that is not allowed, alone or beside another."""


class ReplicaError(FsdpRuntimeError, RuntimeError):
    """Copies of a tensor on several ranks are no longer equal."""


class GradientError(FsdpRuntimeError, RuntimeError):
    """A gradient is not finite on some rank."""


class BackendError(FsdpRuntimeError, RuntimeError):
    """Something that an option needs, a package or a kind of device, is not there."""


class EstimateError(FsdpRuntimeError, RuntimeError):
    """A dry run cannot be made of this model, here or at all."""


class OffloadError(FsdpRuntimeError, RuntimeError):
    """Memory cannot be freed, or was not."""


class WeightsError(FsdpRuntimeError, RuntimeError):
    """A checkpoint cannot be read into the model, or written from it."""


class CheckpointError(WeightsError):
    """Files of a checkpoint are missing, truncated, or not what they claim to be."""


class MismatchError(WeightsError, ValueError):
    """A checkpoint's tensors are not those of the model: missing, of another shape, or not to be converted."""


class ConversionError(WeightsError):
    """Tensors cannot be fused, merged or cut between a checkpoint's form and the model's."""


class MetaBufferError(WeightsError):
    """A buffer on the meta device is in no checkpoint, and nothing in the model computes it again."""


class OtherRankError(WeightsError):
    """This rank did its part, and another did not; the message is that rank's."""


class LostRankError(FsdpRuntimeError, RuntimeError):
    """Another rank died, stalled or failed while all were monitored.

    Args:
        rank: that rank.
        phase: its last phase.
        reason: the failure, as a verb phrase.
    """

    def __init__(self, rank: int, phase: str, reason: str) -> None:
        super().__init__(rank, phase, reason)
        self.rank, self.phase, self.reason = rank, phase, reason

    def __str__(self) -> str:
        return f"rank {self.rank}, in phase {self.phase!r}, {self.reason}"
