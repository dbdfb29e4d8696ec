"""AdamW with master weights and moments in host memory.

Sources of the method: ZeRO-Offload (Ren et al., arXiv:2101.06840); torchao's ``CPUOffloadOptimizer``; Megatron-LM's
``HybridDeviceOptimizer``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from fsdp_runtime._torch_compat import local_tensor, tensor_version
from fsdp_runtime.errors import MismatchError, OptionError
from fsdp_runtime.memory import host_copies
from fsdp_runtime.optim.host_step import Piece, Staging, StepBeside, chunks_of, pieces_of
from fsdp_runtime.swaps import swapped

logger = logging.getLogger(__name__)
#: Parameters of these dtypes have float32 masters and moments.
_LOW = (torch.bfloat16, torch.float16)
_Chunks = list[tuple[dict[str, Any], list[Piece]]]


class CPUOffloadAdamW(Optimizer):
    """AdamW with its state in host memory: the device holds shards and gradients only.

    The step runs on the host, by torch's fused kernel, chunk by chunk.  While the host computes one chunk, gradients of
    the next chunk arrive and parameters of the last chunk leave, through pinned memory.  The step begins at its call,
    so a norm of all gradients and clipping come before it.  A bfloat16 or float16 parameter has a float32 master in the
    state, under ``"master"``, and float32 moments.  Parameters of other dtypes are their own masters, and a step equals
    a step of ``torch.optim.AdamW``.  A parameter may be written in place between steps, except through ``.data``: its
    master follows.

    Build it over ``model.parameters()`` after ``parallelize``.  Learning-rate schedulers, ``torch.amp.GradScaler``,
    :func:`fsdp_runtime.save_training_state` and torch's DCP work as with ``torch.optim.AdamW``.

    **Set OMP_NUM_THREADS.**  ``torchrun`` sets it to 1 for several ranks per host, and the step then takes many times
    as long: divide the host's cores by its ranks.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: use the largest second moment so far.
        maximize: ascend.
        fraction: fraction of the parameters with state on the host, counted in elements of full tensors, from the last
            parameter on; the others step on the device.

    Raises:
        OptionError: ``fraction`` or another option is out of its range.
        OffloadError: the state of this host's ranks does not fit into its memory.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime.optim import CPUOffloadAdamW
        >>> model = nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight]), optimizer.state[model.weight]["master"].dtype
        (['exp_avg', 'exp_avg_sq', 'master', 'step'], torch.float32)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        fraction: float = 1.0,
    ) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise OptionError(f"fraction={fraction}: give the part of the parameters on the host, from 0 to 1")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise OptionError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}: give numbers of at least 0, and "
                "betas below 1"
            )
        self.fraction = fraction
        # The version of a parameter after its last step, and its master: a later write to the parameter counts.
        self._stepped: dict[Tensor, tuple[int, Tensor]] = {}
        self._stages: tuple[Staging, Staging] | None = None
        self._forward: tuple[StepBeside, Callable[[], Any]] | None = None
        self._is_beside = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize})
        self._require_room()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the result of ``closure``, which computes the gradients, if one is given.

        On return the host has computed all parameters, and the current stream of the device waits for the last of them.
        """
        self._require_no_step()
        with torch.enable_grad():
            loss = None if closure is None else closure()
        on_host, on_device = self._divided()
        for group, parameters in on_device:
            if parameters:
                pieces = list(self._pieces(parameters))
                _compute(group, pieces, [(piece.gradient, piece.parameter) for piece in pieces])
        chunks = [
            ({**group}, chunk) for group, parameters in on_host for chunk in chunks_of([*self._pieces(parameters)])
        ]
        copies = host_copies.make_copies(chunks[0][1][0].parameter.device if chunks else torch.device("cpu"))
        beside = None
        if self._forward is None:
            self._step_on_host(chunks, copies)
        else:
            copies = copies.for_thread()
            beside = self._step_beside(chunks, copies, *self._forward)
        copies.wait(copies.record())
        for _, parameters in (*on_host, *on_device):
            for parameter in parameters:
                state = self.state[parameter]
                state["step"] += 1
                if "master" in state:
                    self._stepped[parameter] = tensor_version(local_tensor(parameter)), state["master"]
        return loss if beside is None else beside.result()

    def step_during(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """Take a step while ``forward`` runs; return its result when both are complete.

        The step runs in another thread.  A block's forward waits for the block's parameters, and any other module's for
        all parameters outside of blocks.  ``state_dict``, saves, streams and all functions of this package wait for all
        parameters.  Other code in ``forward`` may read old values, such as a moving average of parameters.  Gradients
        are cleared before ``forward``; their memory is free at the return.

        Args:
            model: the model of the parameters, parallelized or not.
            forward: calls the model, several times or with a backward too.  The step is complete also if it raises.

        Raises:
            ModelError: a parameter is not in the model, or no blocks are found; nothing changes.
            OptionError: ``forward`` takes a step, or reads the optimizer's ``state_dict``.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from fsdp_runtime.optim import CPUOffloadAdamW
            >>> model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]))
            >>> optimizer = CPUOffloadAdamW(model.parameters(), lr=1e-3)
            >>> model[0][0](torch.ones(1, 2)).sum().backward()
            >>> optimizer.step_during(model, lambda: model[0][0](torch.ones(1, 2))).shape
            torch.Size([1, 2])
        """
        with swapped(self, _forward=(StepBeside(model, self._parameters()), torch.enable_grad()(forward))):
            return self.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of ``state_dict`` for the same parameters on the same mesh; state goes to its place.

        Raises:
            MismatchError: the state is of other groups, shapes, placements or of another optimizer; nothing changes.
        """
        saved_groups, states = state_dict["param_groups"], state_dict["state"]
        sizes = [[len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups)]
        if sizes[0] != sizes[1]:
            raise MismatchError(f"the groups have {sizes[0]} parameters, and the saved ones {sizes[1]}")
        numbers = chain.from_iterable(group["params"] for group in saved_groups)
        pairs = list(zip(self._parameters(), numbers, strict=True))
        for parameter, number in pairs:
            _require_state(number, parameter, states.get(number, {}))
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self.state.clear()
        for parameter, number in pairs:
            if number in states:
                self.state[parameter] = {name: value.detach().clone() for name, value in states[number].items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fraction": self.fraction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stepped, self._stages, self._forward, self._is_beside = {}, None, None, False

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _on_host(self) -> set[Tensor]:
        """Return the trained parameters with state on the host: the last ones, the same on every mesh."""
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad][::-1]
        *before, total = accumulate((parameter.numel() for parameter in parameters), initial=0)
        return {p for p, count in zip(parameters, before, strict=True) if count < self.fraction * total}

    def _divided(self) -> tuple[list[tuple[dict[str, Any], list[Tensor]]], ...]:
        """Return the groups with their parameters that have gradients: on the host, and on the device."""
        chosen = self._on_host()
        on_host, on_device = [], []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                device = torch.device("cpu") if parameter in chosen else parameter.device
                self._prepare(parameter, device, amsgrad=group["amsgrad"])
            on_host.append((group, [parameter for parameter in trained if parameter in chosen]))
            on_device.append((group, [parameter for parameter in trained if parameter not in chosen]))
        return on_host, on_device

    def _prepare(self, parameter: Tensor, device: torch.device, *, amsgrad: bool) -> None:
        """Make a parameter's state where it is missing, and move loaded state to its device."""
        state, dtype = self.state[parameter], _master_dtype(parameter)
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        for name in (*names, *(("master",) if dtype != parameter.dtype else ())):
            if name not in state:
                state[name] = _empty_like(parameter, dtype, device)
                local = local_tensor(state[name])
                local.copy_(local_tensor(parameter)) if name == "master" else local.zero_()
            elif state[name].device != device or state[name].dtype != dtype:
                loaded, state[name] = state[name], _empty_like(parameter, dtype, device)
                local_tensor(state[name]).copy_(local_tensor(loaded))
        state["step"] = state["step"].cpu()

    def _pieces(self, parameters: Iterable[Tensor]) -> Iterator[Piece]:
        for parameter in parameters:
            state, gradient = self.state[parameter], parameter.grad
            # Others may have written to a parameter since the last step, which rounded its master to it.
            version, master = self._stepped.get(parameter, (None, None))
            is_written = master is state.get("master") and version != tensor_version(local_tensor(parameter))
            reads = "master" not in state or is_written
            yield from pieces_of(parameter, gradient, state, reads_parameter=reads)  # type: ignore[arg-type]  # not None

    def _step_beside(
        self, chunks: _Chunks, copies: host_copies.HostCopies, beside: StepBeside, forward: Callable[[], Any]
    ) -> Future[Any]:
        for parameter in self._parameters():  # the chunks hold the gradients
            parameter.grad = None
        step = partial(self._step_on_host, chunks, copies)
        refusal = self.register_state_dict_pre_hook(lambda _self: self._require_no_step())
        with swapped(self, _is_beside=True), refusal:
            return beside.run([[piece.whole for piece in chunk] for _, chunk in chunks], step, forward, copies)

    def _require_no_step(self) -> None:
        if self._is_beside:
            raise OptionError("step_during runs a step: take the next step and state_dict when it has returned")

    def _step_on_host(
        self, chunks: _Chunks, copies: host_copies.HostCopies, sent: Callable[[], None] | None = None
    ) -> None:
        if not chunks:
            return
        if self._stages is None:
            self._stages = Staging(), Staging()
            if chunks[0][1][0].parameter.device.type != "cpu" and torch.get_num_threads() == 1:
                logger.warning("the optimizer's step runs on one thread of the host: set OMP_NUM_THREADS for each rank")
        for stage, (_, chunk) in zip(self._stages, chunks, strict=False):
            stage.fetch(chunk, copies)
        for index, (group, chunk) in enumerate(chunks):
            stage = self._stages[index % 2]
            views = stage.arrived()
            _compute(group, chunk, views)
            stage.send(chunk)
            if sent is not None:
                sent()
            if index + 2 < len(chunks):
                stage.fetch(chunks[index + 2][1], copies)

    def _require_room(self) -> None:
        nbytes = 0
        for parameter in self._on_host():
            dtype = _master_dtype(parameter)
            tensors = 2 + bool(self.defaults["amsgrad"]) + (dtype != parameter.dtype)
            nbytes += tensors * dtype.itemsize * local_tensor(parameter).numel()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        host_copies.require_host_memory(
            ranks * nbytes,
            f"the optimizer states of {ranks} ranks on this host",
            "give a smaller fraction=, or train on more hosts",
        )


def _compute(group: Mapping[str, Any], chunk: list[Piece], views: list[tuple[Tensor, Tensor]]) -> None:
    """Update the masters of a chunk and their state in place, and round the masters to the parameters in ``views``."""
    masters = [piece.state.get("master", parameter) for piece, (_, parameter) in zip(chunk, views, strict=True)]
    for piece, master, (_, parameter) in zip(chunk, masters, views, strict=True):
        if piece.reads_parameter and master is not parameter:
            master.copy_(parameter)
    on_host = bool(chunk) and chunk[0].state["exp_avg"].device.type == "cpu"
    gradients = [gradient.to(master.dtype) for master, (gradient, _) in zip(masters, views, strict=True)]
    step_adamw(group, masters, gradients, [piece.state for piece in chunk], fused=True if on_host else None)
    for master, (_, parameter) in zip(masters, views, strict=True):
        if master is not parameter:
            parameter.copy_(master)


def step_adamw(
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    *,
    fused: bool | None = None,
) -> None:
    """Take torch's AdamW step of plain tensors, in place."""
    adamw(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        fused=fused,
        amsgrad=group["amsgrad"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in _LOW else parameter.dtype


def _empty_like(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_like(
        parameter.detach(), dtype=dtype, device=device, memory_format=torch.contiguous_format, requires_grad=False
    )


def _require_state(number: int, parameter: Tensor, state: Mapping[str, Any]) -> None:
    if not state:
        return
    if missing := {"step", "exp_avg", "exp_avg_sq"} - state.keys():
        raise MismatchError(f"the state of parameter {number} lacks {', '.join(sorted(missing))}: it is not AdamW's")
    for name, value in state.items():
        layouts = [getattr(tensor, "placements", None) for tensor in (parameter, value)]
        if name != "step" and (value.shape != parameter.shape or layouts[0] != layouts[1]):
            raise MismatchError(
                f"{name} of parameter {number} has shape {tuple(value.shape)} and placements {layouts[1]}, and the "
                f"parameter {tuple(parameter.shape)} and {layouts[0]}: load a state of another mesh by "
                "load_training_state or torch's DCP"
            )
