"""Routes: the experts of each token, by router, from a forward or a generator, and their checks."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_runtime.errors import RoutesError
from fsdp_runtime.steps.routing.routers import Router, Routers

#: The expert id of a missing route.
HOLE = -1


class Routes(UserDict[str, Tensor]):
    """The experts of each token by the path of the router; filled when ``record_routes`` ends.

    Each value is ``[tokens, k]`` int16 (int32 for more experts than int16 counts): the ids in the router's order of
    selection, -1 in the rows of tokens without a route.  The tokens are the model's input ``[batch, length]``, row
    after row; under context parallelism the full sequences, in their order.

    Args:
        layers: the routes by router.

    Example:
        >>> import torch
        >>> from fsdp_runtime.steps import Routes
        >>> routes = Routes({"layers.0.mlp.gate": torch.tensor([[0, 2], [1, 3], [2, 0]])})
        >>> routes.take(torch.tensor([2, -1]))["layers.0.mlp.gate"].tolist()
        [[2, 0], [-1, -1]]
    """

    def __init__(self, layers: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(layers or {})
        #: Whether ``record_routes`` wrote the routes, so that their values need no check; and for every token.
        self.is_recorded = self.is_complete = False

    def __repr__(self) -> str:
        return f"Routes({ {path: tuple(ids.shape) for path, ids in self.data.items()} })"

    def take(self, tokens: Tensor) -> Routes:
        """Return the routes of the given tokens, in their order, as for a micro-batch or packed sequences.

        Args:
            tokens: ``[n]`` int64, indices of tokens; -1 for a token without a route, such as padding.

        Raises:
            RoutesError: ``tokens`` is no row of integers, or a token does not exist (checked for routes on the CPU).
        """
        if tokens.dim() != 1 or not is_integer(tokens):
            raise RoutesError(f"tokens is {tuple(tokens.shape)} of {tokens.dtype}: give [n] indices of tokens, int64")
        return self._changed({path: _taken(path, ids, tokens.to(ids.device).long()) for path, ids in self.items()})

    def to(self, device: torch.device | str) -> Routes:
        """Return the routes on a device."""
        moved = self._changed({path: ids.to(device) for path, ids in self.data.items()})
        moved.is_complete = self.is_complete
        return moved

    def stacked(self) -> Tensor:
        """Return one tensor ``[layers, tokens, k]``, in the order of the routers.

        Raises:
            RoutesError: the routers select different numbers of experts.
        """
        widths = {path: ids.shape[-1] for path, ids in self.data.items()}
        if len(set(widths.values())) != 1:
            raise RoutesError(f"routes of several widths, or none, cannot be stacked: {widths}")
        return torch.stack(list(self.data.values()))

    def _changed(self, layers: dict[str, Tensor]) -> Routes:
        changed = Routes(layers)
        changed.is_recorded = self.is_recorded
        return changed


def fill_recorded(routes: Routes, layers: Mapping[str, Tensor]) -> None:
    """Fill ``routes`` with the routes of a recorded forward."""
    routes.update(layers)
    routes.is_recorded = routes.is_complete = True


def routes_from_generator(sequences: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Convert a generator's routes of each sequence to the form for ``replay_routes``.

    vLLM and SGLang return ``routed_experts`` of one sequence as ``[tokens, layers, k]``, without the last token, which
    was sampled and never run; vLLM 0.21 returns the prompt's routes separately (concatenate both), SGLang a base64 text
    (``numpy.frombuffer(base64.b64decode(text), dtype=numpy.int32).reshape(-1, layers, k)``).

    Args:
        sequences: for each row of the batch ``[tokens, layers, k]`` integers (arrays or tensors), the routes of its
            first tokens, prompt included, padding excluded.
        attention_mask: ``[batch, length]``, false at padding, on either side.

    Returns:
        ``[layers, batch * length, k]`` int32 with -1 for padding and for tokens without a route.

    Raises:
        RoutesError: a sequence is no array of integers, has another shape, or more tokens than its row.

    Example:
        >>> import torch
        >>> from fsdp_runtime.steps import routes_from_generator
        >>> one_token = torch.tensor([[[3, 1]]])  # one layer, two experts per token
        >>> routes_from_generator([one_token], torch.tensor([[0, 1, 1]])).tolist()  # left padding, then two tokens
        [[[-1, -1], [3, 1], [-1, -1]]]
    """
    if attention_mask.ndim != 2 or len(sequences) != len(attention_mask):
        raise RoutesError(
            f"{len(sequences)} sequences and attention_mask {tuple(attention_mask.shape)}: give one row of the mask "
            "[batch, length] for each sequence"
        )
    if attention_mask.is_meta:
        raise RoutesError("attention_mask is on the meta device: give one with values")
    tensors = [_read_sequence(row, sequence) for row, sequence in enumerate(sequences)]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) != 1 or any(tensor.ndim != 3 for tensor in tensors):
        sizes = [tuple(tensor.shape) for tensor in tensors]
        raise RoutesError(f"sequences {sizes}: give [tokens, layers, k] with the same layers and k for each")
    layers, width = next(iter(shapes))
    mask = attention_mask.bool().cpu()
    routes = torch.full((*mask.shape, layers, width), HOLE, dtype=torch.int32)
    for row, (sequence, real) in enumerate(zip(tensors, mask, strict=True)):
        positions = real.nonzero().squeeze(-1)
        if len(sequence) > len(positions):
            raise RoutesError(
                f"sequence {row} has routes of {len(sequence)} tokens, and its row of the attention mask has "
                f"{len(positions)}"
            )
        routes[row, positions[: len(sequence)]] = sequence.to(torch.int32).cpu()
    return routes.flatten(0, 1).transpose(0, 1).contiguous()


def checked_routes(routers: Routers, routes: Routes | Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """Return the routes ``[tokens, k]`` by router, checked."""
    # ``routes`` are by path, or ``[layers, tokens, k]`` with one layer for each router, each mixture or each block.
    layers = _by_path(routers, routes)
    trusted = isinstance(routes, Routes) and routes.is_recorded
    for path, ids in layers.items():
        router = routers.by_path[path]
        if ids.ndim != 2 or not is_integer(ids):
            raise RoutesError(f"routes of {path} are {tuple(ids.shape)} {ids.dtype}: give integers [tokens, k]")
        if router.top_k is not None and ids.shape[-1] != router.top_k:
            raise RoutesError(
                f"routes of {path} have {ids.shape[-1]} experts per token, and it selects {router.top_k}: leave out "
                "shared experts"
            )
        if not trusted:
            _check_ids(router, ids)
    counts = {path: len(ids) for path, ids in layers.items()}
    if len(set(counts.values())) > 1:
        raise RoutesError(f"the routes of different layers have different numbers of tokens: {counts}")
    return layers


def _read_sequence(row: int, sequence: Any) -> Tensor:
    try:
        routes = torch.as_tensor(sequence)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoutesError(f"sequences[{row}] is no array of integers [tokens, layers, k]: {error}") from error
    if not is_integer(routes) or routes.is_meta:
        raise RoutesError(f"sequences[{row}] is of {routes.dtype} on {routes.device}: give integers with values")
    return routes


def is_integer(values: Tensor) -> bool:
    """Return whether a tensor's dtype is an integer's."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _taken(path: str, ids: Tensor, tokens: Tensor) -> Tensor:
    try:
        return ids[tokens.clamp(min=0)].masked_fill(tokens[:, None] < 0, HOLE)
    except IndexError as error:
        raise RoutesError(f"tokens exceed the {len(ids)} tokens with routes of {path}: {error}") from error


def _by_path(routers: Routers, routes: Any) -> dict[str, Tensor]:
    known = routers.by_path
    if isinstance(routes, Mapping):
        unknown = [path for path in routes if path not in known and path not in routers.tables]
        if unknown:
            raise RoutesError(f"routes of {unknown[0]}, which is no router of this model: it has {', '.join(known)}")
        return {path: ids for path, ids in routes.items() if path in known}
    if not isinstance(routes, Tensor) or routes.ndim != 3:
        actual = tuple(routes.shape) if isinstance(routes, Tensor) else type(routes).__name__
        raise RoutesError(
            f"routes are {actual}: give a tensor [layers, tokens, k] (routes_from_generator makes one from what vLLM "
            "and SGLang return), Routes, or a mapping from router to [tokens, k]"
        )
    # A generator returns no routes of multi-token heads.
    known = {path: router for path, router in known.items() if (router.layer or 0) < routers.layers}
    if len(routes) == len(known):
        return dict(zip(known, routes, strict=True))
    ordered = [*known.values()]
    if len(routes) == routers.layers and all(router.layer is not None for router in ordered):
        return {router.path: routes[router.layer] for router in ordered}
    if len(routes) == len(known) + len(routers.tables):
        raise RoutesError(
            f"routes of {len(routes)} layers include {', '.join(routers.tables)}, where experts follow from "
            f"the token ids: give the {len(known)} others, or one for each of {routers.layers} blocks"
        )
    raise RoutesError(
        f"routes of {len(routes)} layers: this model has {len(known)} routers in {routers.layers} blocks; give one "
        "layer for each of either"
    )


def _check_ids(router: Router, ids: Tensor) -> None:
    out = (ids < HOLE) | (ids >= router.experts)
    partial = (ids < 0).any(-1) & (ids >= 0).any(-1)
    ordered = ids.sort(-1).values
    twice = ((ordered.diff(dim=-1) == 0) & (ordered[:, 1:] >= 0)).any(-1)
    if not bool((out.any(-1) | partial | twice).any()):
        return
    if bool(out.any()):
        token, column = (int(index) for index in out.nonzero()[0])
        reason = f"expert {int(ids[token, column])}, and there are {router.experts} (-1 marks a token without a route)"
    elif bool(twice.any()):
        token = int(twice.nonzero()[0])
        reason = f"experts {ids[token].tolist()}, one of them twice: mark rows that were never filled by -1"
    else:
        token = int(partial.nonzero()[0])
        reason = f"experts {ids[token].tolist()}: give all of a token's experts, or -1 for each"
    raise RoutesError(f"routes of {router.path}: token {token} has {reason}")
