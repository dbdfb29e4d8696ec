"""AdamW with moments in bfloat16, or in 8 bits with a scale per block of a row, on shards of any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime._torch_compat import has_values, local_tensor
from fsdp_runtime.errors import MismatchError, ModelError, OptionError
from fsdp_runtime.sharded.boxes import local_part, zeros_by_rows
from fsdp_runtime.values import require_bool, require_one_of
from tp_plans.boxes import Box

States = Literal["8bit", "bf16"]
#: A moment of a smaller parameter stays in float32; the full shape decides, so that every mesh takes the same steps.
LEAST_ELEMENTS = 4096
#: Elements that a step converts at a time.
_AT_ONCE = 2**24
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: The ends of codes in a state: a moment is stored as ``exp_avg``, its scales as ``exp_avg_scale``.
SCALE = "_scale"
_tables: dict[tuple[bool, torch.device], tuple[Tensor, Tensor]] = {}


def _dynamic_levels(*, signed: bool) -> list[float]:
    """Return the 256 values of a code: seven decades with ever finer steps ("8-bit Optimizers", arXiv:2110.02861)."""
    levels = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        values = [(0.1 + 0.9 * (step + 0.5) / count) * 10.0 ** (decade - 6) for step in range(count)]
        levels += [*values, *(-value for value in values)] if signed else values
    return sorted(levels)


@dataclass(frozen=True)
class Blocks:
    """The blocks of one parameter's rows, and this rank's part of them."""

    size: int  # elements of a block; the last block of a row may be shorter
    columns: range  # of this rank, in the full row
    count: int  # blocks of a full row
    groups: Sequence[ProcessGroup]  # of the ranks that hold the other columns

    @classmethod
    def of(cls, parameter: Tensor, size: int) -> Blocks:
        """Return the blocks of a parameter, which its full shape decides."""
        _, box = local_part(parameter)
        groups = []
        if isinstance(parameter, DTensor):
            mesh, last = parameter.device_mesh, parameter.ndim - 1
            dims = enumerate(getattr(placement, "dim", None) for placement in parameter.placements)
            groups = [mesh.get_group(axis) for axis, dim in dims if dim == last and mesh.size(axis) > 1]
        return cls(size, range(*box[-1]), -(-parameter.shape[-1] // size), groups)

    def amax(self, values: Tensor) -> Tensor:
        """Return the largest magnitude of each block ``[rows, blocks]`` over all ranks."""
        amax = values.new_zeros((len(values), self.count))
        if values.numel():
            before, first = self.columns.start % self.size, self.columns.start // self.size
            after = -(before + len(self.columns)) % self.size
            padded = torch.nn.functional.pad(values.abs(), (before, after)).view(len(values), -1, self.size)
            amax[:, first : first + padded.shape[1]] = padded.amax(-1)
        for group in self.groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    def per_element(self, scales: Tensor) -> Tensor:
        """Return the scale of each of this rank's elements ``[rows, columns]``."""
        start, stop = self.columns.start, self.columns.stop
        first, last = start // self.size, -(-stop // self.size)
        expanded = scales[:, first:last].repeat_interleave(self.size, 1)
        return expanded[:, start - first * self.size : stop - first * self.size]


def _table(device: torch.device, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the levels of a code, and the middles between them."""
    key = signed, device
    if (table := _tables.get(key)) is None:
        levels = torch.tensor(_dynamic_levels(signed=signed), dtype=torch.float64)
        table = levels.to(device, torch.float32), ((levels[1:] + levels[:-1]) / 2).to(device, torch.float32)
        if has_values(table[0]):
            _tables[key] = table
    return table


def round_stochastically(values: Tensor, parameter: Tensor, box: Box, seed: int) -> Tensor:
    """Round float32 values to bfloat16 up or down, with probabilities that keep their mean."""
    # A hash of the seed and of an element's index in the full parameter draws, so that no mesh changes a draw.
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for size, (start, stop) in zip(parameter.shape, box, strict=True):
        index = (index * size)[..., None] + torch.arange(start, stop, device=values.device)
    mixed = index.contiguous().view(values.shape).mul_(-0x61C8864680B583EB).add_(seed * 0x632BE59BD9B4E019 % 2**63)
    mixed ^= (mixed >> 31) & 0x1FFFFFFFF
    mixed.mul_(-0x40A7B892E31B1A47)
    drawn = ((mixed >> 32) & 0xFFFF).to(torch.int32)
    rounded = ((values.view(torch.int32) + drawn) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class LowBitAdamW(Optimizer):
    """AdamW with moments in 8 bits or bfloat16: 2 or 4 bytes per element instead of 8.

    The steps do not depend on the mesh.  The full shape of a parameter decides the storage of its moments, and a block
    with one scale is a part of a row of the full parameter: 256 elements, as in "8-bit Optimizers via Block-wise
    Quantization" (arXiv:2110.02861).  Ranks with parts of one row (a row-wise layer over ``tp``) exchange the maxima
    of their blocks.  Moments in bfloat16, and parameters with ``stochastic_rounding``, are rounded up or down with
    probabilities that keep the mean: rounded to nearest, a step below half a unit in the last place would be lost, and
    ``exp_avg_sq`` could not decay.  Vectors and parameters of fewer than 4,096 elements keep moments in float32.
    A step computes in float32.

    Args:
        params: parameters or groups, as for ``torch.optim.AdamW``; build the optimizer after ``parallelize``.
        lr: the learning rate.
        betas: the decays of both moments.
        eps: is added to the square root of the second moment.
        weight_decay: the decoupled weight decay.
        states: ``"8bit"`` or ``"bf16"``.
        block_size: elements of a row that share a scale in 8 bits.
        stochastic_rounding: round parameters in bfloat16 stochastically; parameters in other dtypes are unchanged.
        seed: of stochastic rounding.

    Raises:
        OptionError: a value is not allowed.
        ModelError: a step gets a gradient with other placements than its parameter.
        MismatchError: ``load_state_dict`` gets the state of another optimizer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime.optim import LowBitAdamW
        >>> layer = nn.Linear(256, 64)
        >>> optimizer = LowBitAdamW(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(2, 256)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg"].dtype, optimizer.state[layer.weight]["exp_avg_scale"].shape
        (torch.uint8, torch.Size([64, 1]))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        states: States = "8bit",
        block_size: int = 256,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        require_one_of("states", states, get_args(States))
        require_bool("stochastic_rounding", stochastic_rounding)
        if type(block_size) is not int or block_size < 1:
            raise OptionError(f"block_size={block_size!r}: give a positive number of elements, such as 256")
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise OptionError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: give 0 or more, betas below 1, and a "
                "positive eps"
            )
        if type(seed) is not int or seed < 0:
            raise OptionError(f"seed={seed!r}: give 0 or a positive integer")
        options = {"states": states, "block_size": block_size, "stochastic_rounding": stochastic_rounding, "seed": seed}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` computes the loss again, and its result is returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for number, (parameter, group) in enumerate(parameters, start=1):
            if parameter.grad is not None:
                self._step(parameter, group, number)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class; codes and scales keep their dtypes.

        Raises:
            MismatchError: the state is of another optimizer, or has other ``states`` or ``block_size``.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for name in ("states", "block_size"):
                if saved.get(name) != group[name]:
                    raise MismatchError(
                        f"the state has {name}={saved.get(name)!r}, and this {type(self).__name__} {group[name]!r}: "
                        "build the optimizer of the saved run"
                    )
        super().load_state_dict(state_dict)
        ids = [each for group in state_dict["param_groups"] for each in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(ids, parameters, strict=True):  # torch has cast the codes to the parameter's dtype
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    def _step(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        gradient = parameter.grad
        placed = getattr(gradient, "placements", "a plain tensor")
        if isinstance(parameter, DTensor) and placed != parameter.placements:
            raise ModelError(
                f"a gradient of shape {tuple(parameter.shape)} is {placed}, and its parameter {parameter.placements}: "
                "reduce it before the step"
            )
        state = self.state[parameter]
        blocks = Blocks.of(parameter, group["block_size"]) if parameter.ndim else None
        if not state:
            state.update(_initial(parameter, group["states"], blocks))
        state["step"] += 1
        seed = (group["seed"] * 1_000_003 + state["step"]) * 1_000_003 + number
        for piece in _pieces(parameter, state, blocks):
            piece.step(group, state["step"], seed)


@dataclass(frozen=True, eq=False)
class _Piece:
    parameter: Tensor
    box: Box  # of the rows
    local: dict[str, Tensor]  # the rows of the parameter, of its gradient and of its state
    blocks: Blocks | None

    def step(self, group: dict[str, Any], step: int, seed: int) -> None:
        """Take AdamW's step in float32 and round its results."""
        local, (beta1, beta2) = self.local, group["betas"]
        gradient = local["grad"].float()
        average = self._moment("exp_avg").lerp_(gradient, 1 - beta1)
        square = self._moment("exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
        lr = float(group["lr"])
        values = local["parameter"].float().mul(1 - lr * group["weight_decay"])
        values.addcdiv_(average, divisor, value=-lr / (1 - beta1**step))
        if group["stochastic_rounding"] and local["parameter"].dtype == torch.bfloat16:
            values = round_stochastically(values, self.parameter, self.box, 3 * seed)
        local["parameter"].copy_(values)
        for index, (name, moment) in enumerate(zip(_MOMENTS, (average, square), strict=True)):
            self._store(name, moment, 3 * seed + index + 1)

    def _moment(self, name: str) -> Tensor:
        codes = self.local[name]
        if (scales := self.local.get(name + SCALE)) is None or self.blocks is None:
            return codes.to(torch.float32, copy=True)
        levels, _ = _table(codes.device, signed=name == "exp_avg")
        per_element = self.blocks.per_element(scales.flatten(0, -2)).view(codes.shape)
        values = levels.index_select(0, codes.reshape(-1).int()).view(codes.shape).mul_(per_element)
        return values if name == "exp_avg" else values.square_()

    def _store(self, name: str, values: Tensor, seed: int) -> None:
        codes, scales = self.local[name], self.local.get(name + SCALE)
        if scales is not None and self.blocks is not None:
            # Codes of ``exp_avg_sq`` are of its root: of the square, they would be zero where ``exp_avg`` is not yet.
            rows = (values if name == "exp_avg" else values.sqrt_()).flatten(0, -2)
            amax = self.blocks.amax(rows)
            scales.copy_(amax.view(scales.shape))
            _, middles = _table(values.device, signed=name == "exp_avg")
            per_element = self.blocks.per_element(amax)
            shares = rows / torch.where(per_element == 0, 1.0, per_element)
            nearest = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)
            codes.copy_(nearest.view(codes.shape))
        elif codes.dtype == torch.bfloat16:
            codes.copy_(round_stochastically(values, self.parameter, self.box, seed))
        else:
            codes.copy_(values)


def is_low_bit(parameter: Tensor) -> bool:
    """Return whether moments are in few bits, by the full shape of the parameter."""
    return parameter.ndim > 1 and parameter.numel() >= LEAST_ELEMENTS


def _initial(parameter: Tensor, states: States, blocks: Blocks | None) -> dict[str, Any]:
    low = is_low_bit(parameter)
    dtype = {"8bit": torch.uint8, "bf16": torch.bfloat16}[states] if low else torch.float32
    state: dict[str, Any] = {"step": 0}
    for name in _MOMENTS:
        state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if low and states == "8bit" and blocks is not None:
            state[name + SCALE] = zeros_by_rows(parameter, blocks.count, torch.float32)
    return state


def _pieces(parameter: Tensor, state: dict[str, Any], blocks: Blocks | None) -> Iterator[_Piece]:
    """Yield runs of rows; all rows at once where ranks exchange the maxima of their blocks."""
    local, box = local_part(parameter.detach())
    tensors = {name: local_tensor(value) for name, value in state.items() if isinstance(value, Tensor)}
    tensors |= {"parameter": local, "grad": local_tensor(parameter.grad)}  # type: ignore[arg-type]
    if not local.ndim:
        yield _Piece(parameter, box, tensors, blocks)
        return
    whole = blocks is not None and bool(blocks.groups) and "exp_avg_scale" in state
    rows = len(local) if whole else _AT_ONCE * len(local) // max(1, local.numel())
    for start in range(0, max(len(local), int(whole)), max(1, rows)):
        stop, first = min(start + max(1, rows), len(local)), box[0][0]
        part = {name: tensor[start:stop] for name, tensor in tensors.items()}
        yield _Piece(parameter, ((first + start, first + stop), *box[1:]), part, blocks)
