"""What each rank of a tensor-parallel group will hold, from two JSON files and without torch.

    tp-plans show LlamaForCausalLM --json > plan.json
    python planner.py plan.json llama-3-8b.json --tp 4

The second file has a model's parameters, path to shape, and the numbers that the plan takes from its config.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tp_plans import Plan, Shard, TpPlansError, check, explain
from tp_plans.explanation import ShardedParameter


@dataclass(frozen=True)
class Parameter:
    """As much of a tensor as plans ask about."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.itemsize


class Tree:
    """A module as its parameters' names tell it: it answers what plans ask of a ``torch.nn.Module``.

    Args:
        numbers: what every module and its config say of heads.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.__dict__.update(numbers, config=SimpleNamespace(**numbers))
        self._numbers = numbers
        self._parameters: dict[str, Parameter] = {}
        self._children: dict[str, Tree] = {}

    def add(self, path: str, parameter: Parameter) -> None:
        """Put a parameter at its dotted path."""
        name, _, rest = path.partition(".")
        if not rest:
            self._parameters[name] = parameter
        else:
            self._children.setdefault(name, Tree(self._numbers)).add(rest, parameter)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Tree"]]:
        """This and all modules below, by path."""
        yield prefix, self
        for name, child in self._children.items():
            yield from child.named_modules(f"{prefix}.{name}".lstrip("."))


def tree_of(description: Mapping[str, Any], itemsize: int) -> Tree:
    """The model that a description tells of."""
    tree = Tree(description["numbers"])
    for path, shape in description["parameters"].items():
        tree.add(path, Parameter(tuple(shape), itemsize))
    return tree


def rank_sizes(plan: Plan, model: Tree, *, tp: int) -> list[int]:
    """Bytes of parameters on every rank.

    Raises:
        CheckFailedError: the plan does not fit the model, or cannot be dealt over ``tp`` ranks.
    """
    check(plan, model, tp=tp).raise_on_error()
    placed = explain(plan, model, tp=tp).parameters
    return [sum(bytes_on(rank, parameter) for parameter in placed) for rank in range(tp)]


def bytes_on(rank: int, parameter: ShardedParameter) -> int:
    """What a rank holds of a parameter: the first ranks get chunks of equal size, the last one what is left."""
    if not isinstance(parameter.layout, Shard):
        return parameter.size
    dim = parameter.layout.dim
    whole, chunk = parameter.shape[dim], parameter.local_shape[dim]
    return parameter.size // whole * max(0, min(chunk, whole - rank * chunk))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the size on every rank."""
    parser = argparse.ArgumentParser(description="Parameter sizes of every tensor-parallel rank, from JSON.")
    parser.add_argument("plan", type=Path, help="a plan, as tp-plans show NAME --json prints it")
    parser.add_argument("model", type=Path, help="an object of 'parameters', path to shape, and of 'numbers'")
    parser.add_argument("--tp", type=int, required=True, help="size of the tensor-parallel axis")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes an element; 2 for bfloat16")
    options = parser.parse_args(arguments)
    try:
        plan = Plan.from_json(options.plan.read_text())
        model = tree_of(json.loads(options.model.read_text()), options.itemsize)
        sizes = rank_sizes(plan, model, tp=options.tp)
    except TpPlansError as error:
        parser.exit(1, f"{error}\n")
    total = sum(parameter.nbytes for _, module in model.named_modules() for parameter in module._parameters.values())
    print(f"{plan.name}: {total:,} bytes over tp={options.tp}")
    for rank, size in enumerate(sizes):
        print(f"rank {rank}: {size:,} bytes, {size / total:.2%}")


if __name__ == "__main__":
    main()
