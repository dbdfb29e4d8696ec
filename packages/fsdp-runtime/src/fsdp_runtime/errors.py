"""The errors of this package; each message has the numbers and the fix."""

from __future__ import annotations


class FsdpRuntimeError(Exception):
    """Base class of every error that this package raises on purpose."""


class MeshError(FsdpRuntimeError, ValueError):
    """A mesh cannot be built, or a model cannot use it."""


class ModelError(FsdpRuntimeError, ValueError):
    """A model has a structure or a state that an operation does not support."""


class LayoutError(FsdpRuntimeError, ValueError):
    """Inputs are not sharded over the ranks as required."""


class OptionError(FsdpRuntimeError, ValueError):
    """An option has a value that is not allowed, alone or together with another option."""


class SampleError(FsdpRuntimeError, ValueError):
    """Samples, or values about them, cannot be packed or unpacked."""


class RoutesError(FsdpRuntimeError, ValueError):
    """Routes do not fit the model or its tokens, or would be recorded twice."""


class ReplicaError(FsdpRuntimeError, RuntimeError):
    """Replicas of a tensor on several ranks differ."""


class GradientError(FsdpRuntimeError, RuntimeError):
    """A gradient is not finite on some rank."""


class BackendError(FsdpRuntimeError, RuntimeError):
    """A package or a kind of device that an option needs is not available."""


class EstimateError(FsdpRuntimeError, RuntimeError):
    """A dry run of this model is not possible."""


class OffloadError(FsdpRuntimeError, RuntimeError):
    """Memory was not freed, or cannot be."""


class WeightsError(FsdpRuntimeError, RuntimeError):
    """A checkpoint cannot be loaded into the model, or saved from it."""


class CheckpointError(WeightsError):
    """Files of a checkpoint are missing, truncated or damaged."""


class MismatchError(WeightsError, ValueError):
    """A checkpoint's tensors do not match the model: missing, of another shape, or not convertible."""


class ConversionError(WeightsError):
    """Tensors cannot be converted between a checkpoint's layout and the model's."""


class MetaBufferError(WeightsError):
    """A buffer on the meta device is not in the checkpoint, and the model cannot recompute it."""


class WeightSyncError(WeightsError):
    """A transfer of weights to other processes failed, or an update cannot be applied."""


class OtherRankError(WeightsError):
    """Another rank failed; the message is that rank's."""


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
