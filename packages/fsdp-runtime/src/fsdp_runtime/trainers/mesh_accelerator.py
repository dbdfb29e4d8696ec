"""accelerate's ``Accelerator`` over the data-parallel ranks of a mesh instead of the world.

A training loop asks its accelerator which part of the batch is its own and how to combine the parts.  Ranks that
differ only in ``cp`` or ``tp`` compute on the same batch, so to the loop they are one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import find_batch_size, recursively_apply, send_to_device, slice_tensors
from accelerate.utils import reduce as reduce_over_world
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import no_sync, submesh
from fsdp_runtime._torch_compat import flatten_axes
from fsdp_runtime.errors import BackendError, OptionError
from fsdp_runtime.keywords import Options
from fsdp_runtime.mesh import axis_size, require_axes
from fsdp_runtime.model import rng_states, set_rng_states
from fsdp_runtime.model.stages import stages_of
from fsdp_runtime.sharded import raise_on_all, world_ranks
from fsdp_runtime.swaps import swapped
from fsdp_runtime.trainers.accelerator_state import StateMixin
from fsdp_runtime.trainers.logits import compute_losses_on
from fsdp_runtime.trainers.model_source import ModelSource, check_parameters, follow_parameters, is_sharded
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.streams import DEALING_ROWS, check_stream
from fsdp_runtime.trainers.training_arguments import accelerator_settings, check_on_mesh, check_ranks


class MeshAccelerator(StateMixin, Accelerator):
    """An ``Accelerator`` for a user's training loop on a mesh of any axes: its processes are the ranks of ``dp``.

    ``prepare`` shards models in place of wrapping them, deals batches over ``dp`` and gives the shards to
    optimizers built earlier.  Losses, norms and weights are the same as with ``Accelerator`` on one process per rank
    of ``dp``.  Ranks that differ only in ``cp`` or ``tp`` get the same batches; ``is_main_process`` and the barriers
    concern all ranks.  :func:`over_mesh` converts a trainer's accelerator.

    Args:
        mesh: of :class:`fsdp_runtime.MeshSpec`, over all ranks.
        parallelize_kwargs: keywords of ``parallelize`` for the models that ``prepare`` shards.
        settings: other arguments of ``Accelerator``, such as ``gradient_accumulation_steps`` and
            ``mixed_precision="bf16"``.

    Raises:
        BackendError: rl-logprobs is not installed.
        MeshError: the mesh has other axes.
        OptionError: a setting, or accelerate's configuration, asks for another kind of parallelism, for ``fp16`` or
            ``fp8``, or counts other ranks than the mesh has.
    """

    mesh: DeviceMesh
    flag_tensor: Tensor | None
    _source: ModelSource | None = None
    _preparing: Sequence[nn.Module] = ()
    _scheduled: list[Tensor] | None = None

    def __init__(self, mesh: DeviceMesh, *, parallelize_kwargs: Options | None = None, **settings: Any) -> None:
        require_axes(mesh, stages=False)
        rl_logprobs()  # raises where it is missing
        self.mesh = mesh
        self._source = ModelSource(mesh, {**(parallelize_kwargs or {})})
        super().__init__(**accelerator_settings(mesh, settings))
        check_ranks(self, mesh)
        _ = self.model_group  # makes the group, on all ranks at once

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

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, in any order; return them in the same order.

        A model that is not sharded yet is parallelized, in place; a model on the meta device stays there until
        ``load_weights``.  Optimizers that hold its parameters then hold the shards.  Sharded models and data loaders
        are used unchanged.

        Raises:
            ModelError: an optimizer's parameters belong to no prepared model, or it has stepped with parameters to be
                replaced; or a model is sharded on another mesh, or is a module without blocks.
            OptionError: ``device_placement`` is of another length.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise OptionError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        models = [each for each in args if isinstance(each, nn.Module)]
        if self._source is not None:
            optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
            plain = [each for each in models if not is_sharded(each)]
            check_parameters(optimizers, [*models, *self._models], plain)
            if len(plain) > 1:  # else the first model would be sharded before another is refused
                for model in plain:
                    self._source.check(model)
            for model in models:
                with follow_parameters(model, [*optimizers, *self._optimizers]):
                    self._shard(model)
        with swapped(self, _preparing=models):  # models may follow their optimizers
            return super().prepare(*args, device_placement=device_placement)

    def _shard(self, model: nn.Module) -> None:
        if self._source is None:
            return
        if is_sharded(model):
            check_on_mesh(model, self.mesh)
        else:
            self._source.shard(model)
        compute_losses_on(model, self.mesh)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard the model if it is not sharded, and apply autocast if ``mixed_precision`` asks for it."""
        self._shard(model)
        placement = False if is_sharded(model) else device_placement
        return super().prepare_model(model, device_placement=placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer; its state stays on its parameters' devices."""
        if self._source is not None and not isinstance(optimizer, AcceleratedOptimizer):
            check_parameters([optimizer], [*self._models, *self._preparing], [])
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler; a call steps it once per rank of ``dp``, or once with ``split_batches``."""
        prepared = super().prepare_scheduler(scheduler)
        ranks = SimpleNamespace(num_processes=self.num_processes)
        step = prepared.step

        def step_over_dp(*args: Any, **kwargs: Any) -> None:
            with replaced_globals(AcceleratedScheduler.step, AcceleratorState=lambda: ranks):
                step(*args, **kwargs)

        if "step" not in vars(prepared):
            prepared.step = step_over_dp
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Deal the batches over ``dp``; ranks of one ``tp`` group, and their workers, draw the same random numbers.

        With ``dispatch_batches`` the first rank reads batches, and each rank of ``dp`` gets an equal part.  Else
        every rank reads a stream from its beginning and keeps its own rows.

        Raises:
            OptionError: ``even_batches=False``: ranks of ``dp`` would then take different numbers of batches; or
                ranks would read the rows of a stream in different orders.
        """
        if self._source is not None and self.num_processes > 1 and not self.even_batches:
            raise OptionError(
                f"even_batches=False lets ranks of dp={self.num_processes} run different numbers of forwards, which "
                "wait for one another: leave it True, and drop_last=True in the data loader to repeat no sample"
            )
        if self.dataloader_config.dispatch_batches:
            return DealtRows(data_loader, self)
        check_stream(data_loader.dataset)
        seed_worker = data_loader.worker_init_fn
        if isinstance(seed_worker, partial) and "rank" in seed_worker.keywords:  # transformers passes the world's rank
            own = {**seed_worker.keywords, "rank": self.process_index}
            data_loader.worker_init_fn = partial(seed_worker.func, *seed_worker.args, **own)
        self.share_random_state()
        one_seed = swapped(self.dataloader_config, data_seed=self._data_seed())
        with one_seed, replaced_globals(prepare_data_loader, **DEALING_ROWS):
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self.model_group is not None and "begin" not in vars(prepared):
            begin = prepared.begin

            def begin_epoch() -> None:
                begin()
                self.share_random_state()  # samplers and data sets may have drawn random numbers

            prepared.begin = begin_epoch
            if self.num_processes == 1:  # of this loader and of loaders that skip batches
                prepared.rng_types = [*(prepared.rng_types or ()), "torch"]  # samplers draw from it in one process
                if isinstance(generator := getattr(data_loader.dataset, "generator", None), torch.Generator):
                    prepared.synchronized_generator = generator
                    prepared.rng_types.append("generator")
        return prepared

    def _data_seed(self) -> int | None:
        """Return ``data_seed``, or the first rank's seed: seedable samplers of all ranks then draw one order."""
        config = self.dataloader_config
        if not config.use_seedable_sampler or config.data_seed is not None:
            return config.data_seed
        seed = [torch.initial_seed()]
        dist.broadcast_object_list(seed, src=0)
        return seed[0]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Accumulate gradients locally; the first backward after the ``with`` reduces them over ``dp``."""
        own = self.unwrap_model(model)
        return no_sync(own) if stages_of(own) is None else nullcontext(own)  # a schedule reduces once

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of a loss; inside of :meth:`scheduled_losses` leave it to the schedule."""
        if self._scheduled is None:
            super().backward(loss, **kwargs)
        else:
            self._scheduled.append(loss)

    @contextmanager
    def scheduled_losses(self) -> Iterator[list[Tensor]]:
        """Yield a list of losses; the schedule of pipeline stages runs their backward."""
        losses: list[Tensor] = []
        with swapped(self, _scheduled=losses):
            yield losses

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of all gradients, each shard counted once; return the norm before clipping."""
        return rl_logprobs().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradients."""
        nn.utils.clip_grad_value_(parameters, clip_value, foreach=False)  # lists of plain tensors beside DTensors

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this data-parallel rank's part of a list, tuple, dict or tensor."""
        state = PartialState()
        own = SimpleNamespace(num_processes=self.num_processes, process_index=self.process_index, device=state.device)
        with PartialState.split_between_processes(own, inputs, apply_padding=apply_padding) as part:
            yield part

    @property
    def is_last_process(self) -> bool:
        """True on one rank only, the last of the world."""
        return self.state.is_last_process

    def check_trigger(self) -> bool:
        """Return True on all ranks if any rank, also of ``tp`` and ``cp``, has called ``set_trigger``."""
        flag = self.flag_tensor if self.flag_tensor is not None else torch.tensor(0, device=self.device)
        raised = bool(reduce_over_world(flag, reduction="max").item())
        self.flag_tensor = None if raised else self.flag_tensor
        return raised

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refused: ranks of one mesh take the same number of batches."""
        raise OptionError("join_uneven_inputs is for DDP: leave even_batches=True, so that batches are even")

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors (also in lists, tuples and dicts) of all data-parallel ranks along the first dim."""
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop samples that the data loader repeated to fill the last batch."""
        with replaced_globals(Accelerator.gather_for_metrics, gather_object=self.gather_objects):
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def gather_objects(self, objects: list[Any]) -> list[Any]:
        """One list of the objects that all data-parallel ranks hold."""
        heard: list[list[Any]] = [[]] * self.num_processes
        dist.all_gather_object(heard, objects, group=self._dp.get_group())
        return [each for part in heard for each in part]

    def gather_from_first(self, tensor: Tensor) -> Tensor:
        """Gather, and give every rank of ``cp`` and ``tp`` the first rank's values, bit for bit.

        For values that may differ between these ranks, such as rewards from a sampled judge.
        """
        gathered: Tensor = self.gather(tensor)
        if (group := self.model_group) is not None:
            dist.broadcast(gathered, group=group, group_src=0)
        return gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, average or take the largest (``"max"``) of tensors over the data-parallel ranks.

        ``scale`` is not applied, as in accelerate on everything but XLA.

        Raises:
            OptionError: another reduction than these and ``"none"``, which leaves tensors unchanged.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise OptionError(f"reduction={reduction!r}: choose one of sum, mean, max, none")

        def one(value: Tensor) -> Tensor:
            if reduction == "none":
                return value
            value = value.clone()
            operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            dist.all_reduce(value, operation, group=self._dp.get_group())
            return value / self.num_processes if reduction == "mean" else value

        return recursively_apply(one, tensor, error_on_other_type=True)

    @property
    def model_group(self) -> ProcessGroup | None:
        """The ranks that hold one replica of the batch, or ``None`` where each rank has its own."""
        ways = tuple(axis for axis in ("pp", "cp", "tp") if axis_size(self.mesh, axis) > 1)
        if len(ways) < 2:
            return self.mesh[ways[0]].get_group() if ways else None
        return flatten_axes(self.mesh, ways, "_".join(ways)).get_group()

    def share_random_state(self) -> None:
        """Give every rank of ``cp`` and ``tp`` the random state of the first, so that they sample the same tokens."""
        if (group := self.model_group) is None:
            return
        states = [rng_states()]
        dist.broadcast_object_list(states, group=group, group_src=0)
        set_rng_states(states[0])

    def _gather_one(self, tensor: Tensor) -> Tensor:
        local = tensor.detach().contiguous() if tensor.ndim else tensor.detach().clone()[None]
        if self.num_processes == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(self.num_processes)]
        dist.all_gather(parts, local, group=self._dp.get_group())
        return torch.cat(parts)


class DealtRows:
    """Batches read by the world's first rank; each rank of ``dp`` gets its rows, on its device."""

    def __init__(self, data_loader: Any, accelerator: MeshAccelerator) -> None:
        self.dataset = data_loader.dataset
        self._loader, self._accelerator = data_loader, accelerator

    def __iter__(self) -> Iterator[Any]:
        """Iterate; an error of the first rank's reading is raised on every rank."""
        batches = iter(self._loader) if dist.get_rank() == 0 else None
        index, ranks = self._accelerator.process_index, self._accelerator.num_processes
        message: list[Any] = [None]
        while True:
            with raise_on_all(world_ranks()):
                if batches is not None:
                    message = [next(batches, None)]
            dist.broadcast_object_list(message, src=0)
            if (batch := message[0]) is None:
                return
            rows = find_batch_size(batch) // ranks
            yield send_to_device(
                slice_tensors(batch, slice(index * rows, (index + 1) * rows)), self._accelerator.device
            )


def over_mesh(accelerator: Accelerator, mesh: DeviceMesh) -> MeshAccelerator:
    """Turn an accelerator, with all its settings, into a :class:`MeshAccelerator` over ``mesh``, in place."""
    check_ranks(accelerator, mesh)
    accelerator.__class__ = MeshAccelerator
    over: MeshAccelerator = accelerator
    over.mesh = mesh
    _ = over.model_group  # makes the group, on all ranks at once
    return over


def replaced_globals(function: Callable[..., Any], **replacements: Any) -> AbstractContextManager[None]:
    """Replace global names in the module of another package's function by these objects inside the ``with``."""
    module: Any = inspect.getmodule(inspect.unwrap(function))
    if missing := [name for name in replacements if not hasattr(module, name)]:
        raise BackendError(f"{module.__name__} has no {missing[0]}: install the version that the extra pins")
    return swapped(module, **replacements)
