"""Muon with AdamW for the other parameters, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_runtime._torch_compat import local_tensor
from fsdp_runtime.errors import OptionError
from fsdp_runtime.optim.cpu_offload import step_adamw
from fsdp_runtime.optim.groups import param_groups
from fsdp_runtime.optim.muon_plan import Matrix, MatrixBlock, MuonPlan, require_same_gradients
from fsdp_runtime.optim.roles import StoredMatrices, stored_matrices
from fsdp_runtime.steps.guards.calls import models_with
from fsdp_runtime.values import floating_dtype, require_one_of

#: The elements of a bucket's matrices per owner: 64 MiB in bfloat16.
_BUCKET = 2**25
#: The coefficients of Keller Jordan's quintic iteration (https://kellerjordan.github.io/posts/muon/).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Muon for the matrices of a model and AdamW for all other parameters, on any mesh.

    Every matrix gets the update of its full matrix.  One rank of the mesh owns it: the other ranks send their blocks to
    the owner, which orthogonalizes the momentum and sends the blocks of the update back.  Owners have similar work, and
    a bucket of matrices needs two collectives, which overlap with the iterations of other buckets.  Each expert of a
    stack is a matrix, and so is each part of a fused weight that the model's plan names: queries, keys, values, gate,
    up, and the rotary rows of latent attention.

    Embeddings, heads, norms, biases, routers and adapters take AdamW's step: see :func:`parameter_roles`.  The state
    is sharded as the parameters.

    Args:
        params: the model; its groups from :func:`param_groups`; or ``model.parameters()`` of a parallelized model.
        lr: the learning rate.
        weight_decay: the decoupled weight decay.  Vectors have none where ``params`` is the model.
        momentum: the decay of the momentum.
        nesterov: use Nesterov momentum.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: the least norm that a matrix is divided by.
        ns_steps: the number of iterations.
        adjust_lr_fn: the scale of an update ``[out, in]``: ``"match_rms_adamw"`` is ``0.2 * sqrt(max(out, in))``, with
            AdamW's learning rate and decay; ``"original"`` is ``sqrt(max(1, out / in))``.
        adamw_lr: AdamW's learning rate, by default ``lr``.
        betas: AdamW's.
        adamw_eps: AdamW's ``eps``.
        model: the model of ``params``, if it is not parallelized.
        ns_dtype: the dtype of the iterations and of the blocks on the wire.
        compile: compile the iterations; a mapping has keywords of ``torch.compile``.
        bucket_numel: the most elements of an owner's matrices in one bucket.

    Raises:
        OptionError: a value is not allowed, the roles of the parameters are unknown, or a group for Muon has a
            parameter without matrices.

    Source: K. Jordan, https://kellerjordan.github.io/posts/muon/; "match_rms_adamw": Moonlight (arXiv:2502.16982).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fsdp_runtime.optim import Muon
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]), nn.Linear(4, 8))
        >>> optimizer = Muon(model, lr=1e-3)
        >>> [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups]
        [(False, 2), (True, 1), (False, 2)]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        *,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        model: nn.Module | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002  # torch's word
        bucket_numel: int = _BUCKET,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps, "eps": eps}
        for name, value in numbers.items():
            if value < 0 or (name == "momentum" and value >= 1):
                raise OptionError(f"{name}={value!r}: give 0 or more{', less than 1' if name == 'momentum' else ''}")
        if len(ns_coefficients) != 3:
            raise OptionError(f"ns_coefficients={ns_coefficients!r}: give the three factors of the quintic polynomial")
        self._dtype = cast(torch.dtype, floating_dtype("ns_dtype", ns_dtype))
        self._limit, self._adamw_lr, self._model = bucket_numel, adamw_lr, model
        options = compile if isinstance(compile, Mapping) else {}
        self._orthogonalize = _orthogonalize if compile is False else torch.compile(_orthogonalize, **options)
        self._stored: dict[Tensor, StoredMatrices] = {}
        self._plans: dict[tuple[int, ...], MuonPlan] = {}
        if isinstance(params, nn.Module):
            self._model = params
            params = param_groups(params, lr=lr, weight_decay=weight_decay, adamw_lr=adamw_lr)
        settings = {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {**numbers, **settings, "betas": betas, "adamw_eps": adamw_eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; without ``use_muon`` it becomes a group for Muon and a group for AdamW."""
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else [p[1] if isinstance(p, tuple) else p for p in given]
        use_muon = param_group.get("use_muon")
        if use_muon is not False and not all(parameter in self._stored for parameter in parameters):
            self._read_models(parameters, needed=use_muon is None)
        if use_muon:
            for parameter in parameters:
                if parameter not in self._stored and parameter.ndim not in (2, 3):
                    raise OptionError(
                        f"a group with use_muon=True has a parameter of shape {tuple(parameter.shape)}, which is no "
                        "matrix: take the groups from param_groups(model), or set use_muon=False"
                    )
                self._stored.setdefault(parameter, StoredMatrices())
        if use_muon is not None:
            scale = param_group.get("adjust_lr_fn", self.defaults["adjust_lr_fn"])
            require_one_of("adjust_lr_fn", scale, ("match_rms_adamw", "original"))
            super().add_param_group({**param_group, "params": parameters})
            return
        for choice in (True, False):
            lr = {} if choice or self._adamw_lr is None else {"lr": self._adamw_lr}
            if part := [parameter for parameter in parameters if (parameter in self._stored) is choice]:
                self.add_param_group({**param_group, **lr, "params": part, "use_muon": choice})

    def _read_models(self, parameters: Sequence[Tensor], *, needed: bool) -> None:
        """Find the matrices that parameters store, in the models that contain the parameters."""
        models = models_with(parameters) or ([] if self._model is None else [self._model])
        if needed and not models:
            raise OptionError(
                f"the roles of {len(parameters)} parameters are unknown: pass model=model, or build the optimizer "
                "after parallelize(model, ...)"
            )
        for model in models:
            self._stored.update(stored_matrices(model))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of the closure.  Collective over the mesh of the parameters."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        plan = self._plan()  # raises before a parameter changes
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adamw(group)
        self._step_muon(plan)
        return loss

    def _plan(self) -> MuonPlan:
        of = {parameter: g for g in self.param_groups if g["use_muon"] for parameter in g["params"]}
        key = tuple(id(parameter) for parameter in of if parameter.grad is not None)
        if key not in self._plans:
            if not all(parameter in self._stored for parameter in of):  # parallelize has replaced the parameters
                self._read_models(list(of), needed=True)
            stored = {parameter: self._stored.get(parameter, StoredMatrices()) for parameter in of}
            require_same_gradients(stored)
            steps = {parameter: group["ns_steps"] for parameter, group in of.items() if parameter.grad is not None}
            self._plans[key] = MuonPlan({parameter: stored[parameter] for parameter in steps}, steps, self._limit)
        return self._plans[key]

    def _step_muon(self, plan: MuonPlan) -> None:
        of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        tensors = {parameter: self._momentum(parameter, of[parameter]) for parameter in plan.parameters}

        def read(matrix: Matrix, block: MatrixBlock) -> Tensor:
            _, gradient, momentum = tensors[matrix.parameter]
            part, group = momentum[block.local], of[matrix.parameter]
            return gradient[block.local].lerp(part, group["momentum"]) if group["nesterov"] else part

        def iterate(matrix: Matrix, full: Tensor) -> Tensor:
            group = of[matrix.parameter]
            arguments = (group["ns_coefficients"], group["ns_steps"], group["eps"])
            return self._orthogonalize(full.view(full.shape[-2:]), *arguments).view(full.shape)

        def apply(matrix: Matrix, block: MatrixBlock, update: Tensor) -> None:
            group = of[matrix.parameter]
            scale = _update_scale(*matrix.out_in, group["adjust_lr_fn"])
            local = tensors[matrix.parameter][0][block.local]
            local.add_(update.to(local.device), alpha=-float(group["lr"]) * scale)

        plan.run(read, iterate, apply, self._dtype)

    def _momentum(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Decay a parameter and update its momentum; return the local parameter, gradient and momentum."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, gradient = local_tensor(state["momentum_buffer"]), _local_gradient(parameter)
        momentum.lerp_(gradient, 1 - group["momentum"])
        local = local_tensor(parameter)
        return local.mul_(1 - float(group["lr"]) * group["weight_decay"]), gradient, momentum

    def _step_adamw(self, group: Mapping[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        step_adamw(
            {**group, "lr": float(group["lr"]), "eps": group["adamw_eps"], "amsgrad": False, "maximize": False},
            [local_tensor(parameter) for parameter in parameters],
            [_local_gradient(parameter) for parameter in parameters],
            [{name: local_tensor(value) for name, value in state.items()} for state in states],
        )


def _local_gradient(parameter: Tensor) -> Tensor:
    """Return the local gradient in the layout and the dtype of the parameter."""
    gradient = cast(Tensor, parameter.grad)
    if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, parameter).placements:
        gradient = gradient.redistribute(placements=cast(DTensor, parameter).placements)
    return local_tensor(gradient).to(parameter.dtype)


def _orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, in its dtype."""
    # The operators and their order are torch.optim.Muon's, so that equal inputs give equal bits.
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _update_scale(rows: int, columns: int, method: str) -> float:
    """Return the factor of the learning rate for a matrix ``[out, in]``, as in ``torch.optim.Muon``."""
    if method == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
