"""accelerate's ``Accelerator`` over the data-parallel ranks of a mesh instead of the world.

A trainer asks its accelerator which part of the batch is its own and how to bring the parts together.  Ranks that
differ only in ``cp`` or ``tp`` compute on the same batch, so to a trainer they are one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import find_batch_size, recursively_apply, send_to_device, slice_tensors
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime._torch_compat import flatten_axes
from fsdp_runtime.errors import BackendError, OtherRankError
from fsdp_runtime.memory.gradient_accumulation import no_sync
from fsdp_runtime.mesh.spec import axis_size, submesh
from fsdp_runtime.trainers.rl_logprobs_backend import clip_grad_norm_


class MeshAccelerator(Accelerator):
    """An ``Accelerator`` whose processes are the data-parallel ranks of ``mesh``, and that wraps no model.

    ``is_main_process`` and the barriers still concern all ranks.  Made from an ordinary one by
    :func:`over_mesh`.

    Attributes:
        mesh: the mesh of the model, with this package's axis names.
    """

    mesh: DeviceMesh

    @property
    def num_processes(self) -> int:
        """The size of ``dp``."""
        return self._dp.size()

    @property
    def process_index(self) -> int:
        """This rank's index on ``dp``."""
        return self._dp.get_local_rank()

    @property
    def _dp(self) -> DeviceMesh:
        return submesh(self.mesh, "dp")

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Apply autocast if ``mixed_precision`` asks for it; no wrapper around the model, no move of its shards."""
        prepared: nn.Module = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Deal the batches over ``dp``; workers of the ranks of one ``tp`` group draw the same random numbers.

        With ``dispatch_batches`` the first rank reads batches, of which each rank of ``dp`` gets an equal part.
        """
        if self.dataloader_config.dispatch_batches:
            return DealtRows(data_loader, self)
        seed_worker = data_loader.worker_init_fn
        if isinstance(seed_worker, partial) and "rank" in seed_worker.keywords:  # transformers passes the world's rank
            own = {**seed_worker.keywords, "rank": self.process_index}
            data_loader.worker_init_fn = partial(seed_worker.func, *seed_worker.args, **own)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Accumulate gradients locally; the first backward after the ``with`` reduces them over ``dp``."""
        return no_sync(self.unwrap_model(model))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all gradients, each shard counted once; return the norm before clipping."""
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors (also in lists, tuples and dicts) of all data-parallel ranks along the first dim."""
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop what the data loader repeated to fill the last batch."""
        with replaced_globals(Accelerator.gather_for_metrics, gather_object=self.gather_objects):
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """One list of the objects that all data-parallel ranks hold."""
        heard: list[list[Any]] = [[]] * self.num_processes
        dist.all_gather_object(heard, objects, group=self._dp.get_group())
        return [each for part in heard for each in part]

    def gather_from_first(self, tensor: Tensor) -> Tensor:
        """Gather, and give every rank of ``cp`` and ``tp`` the values of the first one, bit for bit.

        For values that need not be the same on all of them, such as rewards from a sampled judge.
        """
        gathered: Tensor = self.gather(tensor)
        if (group := self.model_group) is not None:
            dist.broadcast(gathered, group=group, group_src=0)
        return gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or average tensors over the data-parallel ranks; ``reduction="none"`` leaves them as they are."""

        def one(value: Tensor) -> Tensor:
            if reduction == "none":
                return value
            value = value.clone()
            dist.all_reduce(value, group=self._dp.get_group())
            return value * scale / (self.num_processes if reduction == "mean" else 1)

        return recursively_apply(one, tensor, error_on_other_type=True)

    @property
    def model_group(self) -> ProcessGroup | None:
        """The ranks that hold one replica of the batch, or ``None`` where each rank has its own."""
        ways = tuple(axis for axis in ("cp", "tp") if axis_size(self.mesh, axis) > 1)
        if len(ways) < 2:
            return self.mesh[ways[0]].get_group() if ways else None
        return flatten_axes(self.mesh, ways, "cp_tp").get_group()

    def share_random_state(self) -> None:
        """Give every rank of ``cp`` and ``tp`` the random state of the first, so that they sample the same tokens."""
        if (group := self.model_group) is None:
            return
        states: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = [
            (torch.get_rng_state, torch.set_rng_state)
        ]
        if self.device.type != "cpu":
            device_module = torch.get_device_module(self.device)
            states.append((device_module.get_rng_state, device_module.set_rng_state))
        for read, write in states:
            state = read().to(self.device)
            dist.broadcast(state, group=group, group_src=0)
            write(state.cpu())

    def _gather_one(self, tensor: Tensor) -> Tensor:
        local = tensor.detach().contiguous() if tensor.ndim else tensor.detach().clone()[None]
        if self.num_processes == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(self.num_processes)]
        dist.all_gather(parts, local, group=self._dp.get_group())
        return torch.cat(parts)


class DealtRows:
    """Batches that the world's first rank reads, and of which each rank of ``dp`` gets its rows, on its device.

    Args:
        data_loader: the batches; rows of all ranks of ``dp``, in order.  Read on the first rank only.
        accelerator: of the mesh.
    """

    def __init__(self, data_loader: Any, accelerator: MeshAccelerator) -> None:
        self.dataset = data_loader.dataset
        self._loader, self._accelerator = data_loader, accelerator

    def __iter__(self) -> Iterator[Any]:
        """Iterate; an error of the first rank's reading is raised on every rank.

        Raises:
            OtherRankError: the first rank could not read a batch.
        """
        batches = iter(self._loader) if dist.get_rank() == 0 else None
        index, ranks = self._accelerator.process_index, self._accelerator.num_processes
        while True:
            message: list[Any] = [None, None]
            error: Exception | None = None
            if batches is not None:
                try:
                    message[0] = next(batches, None)
                except Exception as own:  # noqa: BLE001 - raised below
                    message[1], error = f"rank 0: {type(own).__name__}: {own}", own
            dist.broadcast_object_list(message, src=0)
            if error is not None:
                raise error
            if message[1] is not None:
                raise OtherRankError(message[1])
            if (batch := message[0]) is None:
                return
            rows = find_batch_size(batch) // ranks
            yield send_to_device(
                slice_tensors(batch, slice(index * rows, (index + 1) * rows)), self._accelerator.device
            )


def over_mesh(accelerator: Accelerator, mesh: DeviceMesh) -> MeshAccelerator:
    """Turn an accelerator, with all its settings, into one over ``mesh``, in place."""
    accelerator.__class__ = MeshAccelerator
    over: MeshAccelerator = accelerator
    over.mesh = mesh
    _ = over.model_group  # makes the group, on all ranks at once
    return over


@contextmanager
def replaced_globals(function: Callable[..., Any], **replacements: Any) -> Iterator[None]:
    """Let a function of another package find these objects under global names of its module, inside the ``with``.

    Raises:
        BackendError: the module has no such name, so its version is another one.
    """
    namespace: dict[str, Any] = inspect.unwrap(function).__globals__
    if missing := [name for name in replacements if name not in namespace]:
        raise BackendError(f"{namespace['__name__']} has no {missing[0]}: install the version that the extra pins")
    before: Mapping[str, Any] = {name: namespace[name] for name in replacements}
    namespace.update(replacements)
    try:
        yield
    finally:
        namespace.update(before)
