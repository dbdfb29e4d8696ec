"""One reading of a model: its modules, parameters, blocks, embedding, head, norms and experts, by path.

A :class:`ModelTree` is built once and passed along.  Torch is not imported: classes are recognised by the names of
their bases, so that any object with ``named_modules`` and each module's ``_parameters`` can be read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from tp_plans._torch_compat import own_buffers, own_parameters
from tp_plans._validate import require_model
from tp_plans.naming import leaf
from tp_plans.patterns import Patterns, wildcard

__all__ = ["ModelTree", "ancestors", "class_of_forward", "is_at_or_below", "join", "parent"]

_CONTAINERS = {"ModuleList", "ModuleDict", "Sequential"}


@dataclass(frozen=True, eq=False)
class ModelTree:
    """A model's modules and parameters by path, with the roles that its structure gives them.

    Example:
        >>> import tp_plans
        >>> class Linear:
        ...     _parameters = {}
        ...     def named_modules(self):
        ...         yield "", self
        >>> tree = tp_plans.model_tree.ModelTree.of(Linear())
        >>> list(tree.modules), tree.blocks
        ([''], ())
    """

    modules: Mapping[str, Any]  # every module by path, parents first; the model itself is at ``""``
    parameters: Mapping[str, Any]  # every parameter by path; a tied one is listed at each of its paths
    children: Mapping[str, tuple[str, ...]]  # the paths of the modules directly below each module
    # the container of the decoder's blocks where it is known, as of a model at other sizes
    known_decoder: str | None = None

    @classmethod
    def of(cls, model: Any) -> ModelTree:
        """Read a model with one call of ``named_modules``.

        Args:
            model: a ``torch.nn.Module`` on any device (meta is enough), or a tree, which is returned as it is.

        Raises:
            ModelError: ``model`` has no ``named_modules``.
        """
        if isinstance(model, ModelTree):
            return model
        require_model(model)
        modules = dict(model.named_modules())
        parameters: dict[str, Any] = {}
        children: dict[str, list[str]] = {path: [] for path in modules}
        for path, module in modules.items():
            for name, parameter in own_parameters(module).items():
                if parameter is not None:
                    parameters[join(path, name)] = parameter
            if path:
                children.setdefault(parent(path), []).append(path)
        return cls(modules, parameters, {path: tuple(below) for path, below in children.items()})

    # One module.

    @property
    def model(self) -> Any:
        """The model that was read."""
        return self.modules[""]

    def own_parameters(self, path: str) -> dict[str, Any]:
        """Return the parameters that a module itself owns, by their own names."""
        return {name: value for name, value in own_parameters(self.modules[path]).items() if value is not None}

    def has_buffers(self, path: str) -> bool:
        """Return whether a module itself owns buffers."""
        return bool(own_buffers(self.modules[path]))

    def weight(self, path: str) -> Any | None:
        """Return a module's ``weight`` if it is a matrix, else ``None``."""
        weight = own_parameters(self.modules[path]).get("weight")
        return weight if weight is not None and weight.ndim == 2 else None

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a module's ``weight``; empty where it has none."""
        weight = own_parameters(self.modules[path]).get("weight")
        return () if weight is None else tuple(map(int, weight.shape))

    def size(self, path: str, dim: int) -> int | None:
        """Return one size of a module's weight matrix, or ``None`` where it is absent or not a matrix."""
        weight = self.weight(path) if path in self.modules else None
        return None if weight is None else int(weight.shape[dim])

    def is_linear(self, path: str) -> bool:
        """Return whether a module is a linear layer with torch's forward: the product with its weight alone."""
        module = self.modules[path]
        return _inherits(module, {"Linear"}) and class_of_forward(module) == "Linear" and self.weight(path) is not None

    def computes_by_row(self, path: str) -> bool:
        """Return whether a linear layer with a custom forward may compute each row of its weight separately.

        All of its parameters have one entry per row, as the scales of Dory's head.
        """
        rows, own = self.size(path, 0), self.own_parameters(path)
        return _inherits(self.modules[path], {"Linear"}) and all(
            tensor.ndim > 0 and tensor.shape[0] == rows for tensor in own.values()
        )

    def is_plain_linear(self, path: str) -> bool:
        """Return whether a module is torch's linear layer itself: other code may read a subclass's weight.

        ``nn.MultiheadAttention`` reads its ``NonDynamicallyQuantizableLinear``'s weight without calling the layer.
        """
        return type(self.modules[path]).__name__ == "Linear"

    def is_embedding(self, path: str) -> bool:
        """Return whether a module is an embedding table ``[entries, features]``."""
        module = self.modules[path]
        named = hasattr(module, "num_embeddings") or "Embedding" in type(module).__name__
        return named and self.weight(path) is not None

    def is_norm(self, path: str) -> bool:
        """Return whether a module is a norm: so named, without submodules, and with vectors only."""
        vectors = all(parameter.ndim <= 1 for parameter in self.own_parameters(path).values())
        return "norm" in type(self.modules[path]).__name__.lower() and not self.children[path] and vectors

    def is_scale(self, path: str, features: int | None) -> bool:
        """Return whether a module owns only vectors of so many features, as a norm's weight and bias."""
        vectors = self.own_parameters(path)
        return bool(vectors) and all(tuple(vector.shape) == (features,) for vector in vectors.values())

    def is_expert_stack(self, path: str) -> bool:
        """Return whether a module holds the experts of a mixture, stacked in parameters ``[experts, in, out]``."""
        shapes = [tuple(parameter.shape) for parameter in self.own_parameters(path).values()]
        stacked = [shape for shape in shapes if len(shape) == 3]
        firsts = {shape[0] if shape else 1 for shape in shapes}
        return len(stacked) >= 2 and len(firsts) == 1 and firsts != {1}

    def is_numbered(self, path: str) -> bool:
        """Return whether a module's children are all named by numbers, as a list's are."""
        return bool(self.children[path]) and all(leaf(child).isdigit() for child in self.children[path])

    # Modules together.

    def below(self, path: str) -> Iterator[str]:
        """Iterate over all modules below one, each before its own children."""
        for child in self.children[path]:
            yield child
            yield from self.below(child)

    def children_with_parameters(self, path: str) -> set[str]:
        """Return the names of the children that own parameters, themselves or below."""
        return {leaf(child) for child in self.children[path] if child in self._with_parameters}

    @cached_property
    def _with_parameters(self) -> set[str]:
        return {above for path in self.parameters for above in ancestors(path)}

    @cached_property
    def by_wildcard(self) -> Mapping[str, Mapping[str, None]]:
        """The modules and parameters that differ in block numbers only, by their common pattern, in a fixed order."""
        paths: dict[str, dict[str, None]] = defaultdict(dict)
        for path in self.modules:
            paths[wildcard(path)][path] = None
            for parameter in (join(path, name) for name in self.own_parameters(path)):
                paths[wildcard(parameter)][parameter] = None
        return paths

    @cached_property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """The paths of every parameter that sits at several, the first path first."""
        paths: dict[int, list[str]] = defaultdict(list)
        for path, parameter in self.parameters.items():
            paths[id(parameter)].append(path)
        return tuple(tuple(group) for group in paths.values() if len(group) > 1)

    def match(self, patterns: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return the paths of the modules, and of the parameters, that each pattern matches."""
        known = Patterns(patterns)
        modules: dict[str, list[str]] = defaultdict(list)
        parameters: dict[str, list[str]] = defaultdict(list)
        for paths, matched in ((self.modules, modules), (self.parameters, parameters)):
            for path in paths:
                for pattern in known.match(path):
                    matched[pattern].append(path)
        return dict(modules), dict(parameters)

    # The parts of a language model.

    @cached_property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """The blocks of every stack, by the path of the container that holds them, vision towers included.

        A stack is an outermost ``ModuleList`` with members that are made of modules, lists in a list included,
        or a ``ModuleDict`` or ``Sequential`` with members of one class.
        """
        return dict(self._stacks(""))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of all stacks, in the order of the model."""
        return tuple(path for members in self.stacks.values() for path in members)

    @cached_property
    def decoder(self) -> str | None:
        """The container of the stack that the token embedding feeds; of several, the one with most parameters."""
        if self.known_decoder is not None:
            return self.known_decoder
        embedding = self.embedding or ""
        sizes = {path: sum(self._numel(block) for block in members) for path, members in self.stacks.items()}
        return max(sizes, key=lambda path: (shared_parts(path, embedding), sizes[path]), default=None)

    @property
    def decoder_blocks(self) -> tuple[str, ...]:
        """The blocks of the decoder's stack; none where the model has no stack."""
        return () if self.decoder is None else self.stacks[self.decoder]

    @cached_property
    def embedding(self) -> str | None:
        """The token embedding: the model's ``get_input_embeddings()``, else the largest table outside the blocks."""
        shapes = self._matrices_outside
        declared = self.declared("get_input_embeddings")
        if declared in shapes:  # a vision model gives its patch projection, which is not a matrix
            return declared
        tables = [path for path in shapes if self.is_embedding(path)]
        return max(tables, key=lambda path: prod(shapes[path]), default=None)

    @cached_property
    def lm_head(self) -> str | None:
        """The output projection: ``get_output_embeddings()``, else the last linear layer shaped as the embedding."""
        declared = self.declared("get_output_embeddings")
        if declared is not None and not self._is_in_block(declared):
            return declared
        like = [path for path in self.shaped_as_embedding if _inherits(self.modules[path], {"Linear"})]
        return like[-1] if like else None

    @cached_property
    def shaped_as_embedding(self) -> tuple[str, ...]:
        """The modules outside the blocks, besides the embedding, with a weight of the embedding's shape."""
        shapes, embedding = self._matrices_outside, self.embedding
        return tuple(path for path in shapes if embedding and path != embedding and shapes[path] == shapes[embedding])

    @property
    def root(self) -> str:
        """The module that holds both the token embedding and the decoder's blocks."""
        embedding, decoder = self.embedding or "", self.decoder or ""
        return ".".join(decoder.split(".")[: shared_parts(parent(embedding), decoder)]) if embedding else ""

    @cached_property
    def final_norm(self) -> str | None:
        """The norm of the decoder's output: the last one after its stack, in the modules that hold the stack."""
        norms = [path for path in self.after_decoder if is_at_or_below(path, self.root) and self._is_hidden_norm(path)]
        norms = [path for path in norms if not names_embedding(path)]  # BART's norm of the embeddings comes last
        return norms[-1] if norms else None

    @cached_property
    def reads_decoder_output(self) -> tuple[str, ...]:
        """The modules after the decoder's stack that may read its output: norms and linear layers of its features."""
        hidden = self.size(self.embedding or "", 1)
        return tuple(
            path
            for path in self.after_decoder
            if self._is_hidden_norm(path) or (self.is_linear(path) and self.size(path, 1) == hidden)
        )

    @cached_property
    def after_decoder(self) -> tuple[str, ...]:
        """The modules after the decoder's stack that sit directly in a module that holds the stack."""
        if self.decoder is None or self.embedding is None:
            return ()
        holders, order = set(ancestors(self.decoder)), list(self.modules)
        return tuple(path for path in order[order.index(self.decoder) + 1 :] if path and parent(path) in holders)

    def _is_hidden_norm(self, path: str) -> bool:
        """Return whether a module is a norm of the hidden states, with parameters or without."""
        if self.own_parameters(path):
            return self.is_scale(path, self.size(self.embedding or "", 1)) and not self.children[path]
        return self.is_norm(path)

    def declared(self, getter: str) -> str | None:
        """Return the path of the module that a getter of the model gives, as ``get_input_embeddings``."""
        try:
            declared = getattr(self.model, getter)()
        except (AttributeError, NotImplementedError):
            return None
        return next((path for path, module in self.modules.items() if module is declared), None)

    @cached_property
    def _matrices_outside(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weight matrices outside the blocks."""
        paths = (path for path in self.modules if not self._is_in_block(path))
        return {path: shape for path in paths if len(shape := self.shape(path)) == 2}

    def _is_in_block(self, path: str) -> bool:
        return path in self._blocks or any(above in self._blocks for above in ancestors(path))

    @cached_property
    def _blocks(self) -> frozenset[str]:
        return frozenset(self.blocks)

    def _numel(self, path: str) -> int:
        parameters = (p for module in (path, *self.below(path)) for p in self.own_parameters(module).values())
        return sum({id(parameter): prod(parameter.shape) for parameter in parameters}.values())

    def _stacks(self, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        for child in self.children[path]:
            if members := self._members(child):
                yield child, members
            else:
                yield from self._stacks(child)

    def _members(self, container: str) -> tuple[str, ...]:
        """The blocks in a container, nested containers flattened; none if it holds other modules."""
        is_list = self._is_list(container)
        if not is_list and not _inherits(self.modules[container], _CONTAINERS):
            return ()
        blocks: list[str] = []
        for child in self.children[container]:
            if type(self.modules[child]).__name__ in ("ModuleList", "ModuleDict"):
                if not (inner := self._members(child)):
                    return ()
                blocks += inner
            elif self.children[child] and not self._is_namespace(child):
                blocks.append(child)
            else:
                return ()
        # Any other dict or sequence of modules is a model, not a stack.
        uniform = len({type(self.modules[path]) for path in blocks}) == 1 and len(blocks) > 1
        return tuple(blocks) if is_list or uniform else ()

    def _is_namespace(self, path: str) -> bool:
        """Whether a module is a bare ``nn.Module()`` that holds others, as in a VQ-VAE: nothing calls it."""
        kind = type(self.modules[path])
        return kind.__name__ == "Module" and kind.__module__.startswith("torch.")

    def _is_list(self, path: str) -> bool:
        """A ``ModuleList``, or a module that acts as one: numbered children, and no forward."""
        module = self.modules[path]
        if _inherits(module, {"ModuleList"}):
            return True
        runs = any("forward" in vars(base) for base in type(module).__mro__ if base.__name__ != "Module")
        return self.is_numbered(path) and not runs


def parent(path: str) -> str:
    """Return the path of the module above; ``""`` for the top."""
    return path.rpartition(".")[0]


def join(path: str, name: str) -> str:
    """Return the path of a child or parameter of a module."""
    return f"{path}.{name}" if path else name


def ancestors(path: str) -> Iterator[str]:
    """Iterate over the paths above one, nearest first, to the top ``""``."""
    while path:
        path = parent(path)
        yield path


def is_at_or_below(path: str, root: str) -> bool:
    """Return whether a path is ``root`` or below it."""
    return not root or path == root or path.startswith(f"{root}.")


def shared_parts(one: str, other: str) -> int:
    """Return how many leading parts two paths have in common."""
    if not one or not other:
        return 0
    pairs = list(zip(one.split("."), other.split("."), strict=False))
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))


def names_embedding(path: str) -> bool:
    """Return whether a module is named after the embeddings: ``layernorm_embedding``, not ``embedding_norm``."""
    return leaf(path).endswith(("embedding", "embeddings"))


def class_of_forward(module: Any) -> str:
    """Return the name of the class that defines a linear layer's forward, ``"Linear"`` for torch's.

    Wrappers of a module on a mesh are mixed in before its class, and are no modules.
    """
    modules = (base for base in type(module).__mro__ if any(ancestor.__name__ == "Module" for ancestor in base.__mro__))
    return next((base.__name__ for base in modules if "forward" in vars(base)), "Linear")


def _inherits(module: Any, names: set[str]) -> bool:
    return any(base.__name__ in names for base in type(module).__mro__)
