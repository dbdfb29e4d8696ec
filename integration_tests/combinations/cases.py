"""A case: a family, a mesh, and a few options, changes, rows and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from random import Random
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from combinations.batches import KINDS
from combinations.changes import APART, CHANGES
from combinations.events import EVENTS, OF_ADAPTERS, OF_DECODERS, OF_MIXTURES, SLOTS
from combinations.families import DECODERS, FAMILIES, MIXTURES
from combinations.optimizers import OPTIMIZERS
from combinations.own_gradients import OWN_GRADIENTS
from fsdp_runtime.steps import (
    FSDP2,
    ActivationCheckpointing,
    CheckInputs,
    Compile,
    ContextParallel,
    PackedSequences,
    SharedPrefixes,
    Step,
    TensorParallel,
)

MESHES: Mapping[int, tuple[dict[str, int], ...]] = {
    2: ({"tp": 2}, {"dp_shard": 2}, {"cp": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    4: (
        {"dp_shard": 2, "tp": 2},
        {"cp": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 2, "tp": 2, "ep": 4},
        {"tp": 4},
        {"cp": 4},
        {"dp_replicate": 2, "tp": 2},
        {"dp_replicate": 2, "cp": 2},
        {"dp_shard": 2, "cp": 2, "ep": 2},
    ),
}
#: Calls by name.
CALLS = EVENTS | OWN_GRADIENTS
#: The keywords that take steps; ``steps`` takes the others.
KEYWORDS: Mapping[type[Step[Any]], str] = {
    PackedSequences: "packed_sequences",
    TensorParallel: "plan",
    ContextParallel: "context_parallel",
    ActivationCheckpointing: "activation_checkpointing",
    Compile: "compile",
    FSDP2: "fsdp",
}
ACCUMULATE = "accumulation"
#: Calls that write to parameters: not while a graph keeps them.
_WRITES = ("resume", "set state dict")
#: Calls of a crowded case, which finds more in a second than one of two parts: the steps around the calls are shared.
CROWD = 10
_LORA = ("change", "LoRA")


#: Values of every step's options, beside those of a call without keywords.
STEPS: tuple[Step[Any], ...] = (
    FSDP2(offload_policy=CPUOffloadPolicy()),
    FSDP2(reshard_after_forward=False),
    FSDP2(reshard_last_block=True),
    FSDP2(prefetch_forward=1),
    FSDP2(frozen_params="replicate"),
    ActivationCheckpointing("block"),
    ActivationCheckpointing("mlp"),
    ActivationCheckpointing("selective"),
    ActivationCheckpointing("none", offload=True),
    ActivationCheckpointing("block", offload=True),
    ActivationCheckpointing("selective", offload=True),
    CheckInputs(),
    Compile({"backend": "aot_eager"}),
    ContextParallel("ulysses"),
    ContextParallel("ring"),
    ContextParallel(load_balancer=None),
    PackedSequences(),
    SharedPrefixes(),
    TensorParallel(sequence_parallel=True),
    TensorParallel(logits="full"),
    TensorParallel(towers="replicated"),
)


@cache
def step_options() -> dict[str, Step[Any]]:
    """Return ``STEPS`` by their description."""
    return {step.describe(): step for step in STEPS}


@cache
def atoms() -> tuple[tuple[str, str], ...]:
    """Return everything that a case can have, as pairs of a kind and a name."""
    named = {
        "step": step_options(),
        "rows": KINDS[1:],
        "change": CHANGES,
        "apart": APART,
        "event": CALLS,
        "loop": (ACCUMULATE,),
        "optimizer": [*OPTIMIZERS][1:],
    }
    return tuple((kind, name) for kind, names in named.items() for name in names)


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        family: a name in :data:`FAMILIES`.
        mesh: axis and size.
        parts: pairs of a kind and a name; an event's name has its slot behind ``@``.
    """

    family: str
    mesh: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, str], ...]

    def names(self, kind: str) -> list[str]:
        """Return the names of one kind."""
        return [name for each, name in self.parts if each == kind]

    @property
    def rows(self) -> str:
        """The kind of rows."""
        return next(iter(self.names("rows")), KINDS[0])

    @property
    def optimizer(self) -> str:
        """The name of the optimizer."""
        return next(iter(self.names("optimizer")), next(iter(OPTIMIZERS)))

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of ``parallelize``."""
        steps = [step_options()[name] for name in self.names("step")]
        if self.rows == "packed" and not any(isinstance(step, PackedSequences) for step in steps):
            steps.append(PackedSequences())
        by_keyword = {KEYWORDS[type(step)]: step for step in steps if type(step) in KEYWORDS}
        return {**by_keyword, "steps": tuple(step for step in steps if type(step) not in KEYWORDS)}

    def smaller(self) -> Iterator[Case]:
        """Yield the halves of a long case, then the case without one of its parts."""
        if (half := len(self.parts) // 2) > 2:
            yield Case(self.family, self.mesh, self.parts[:half])
            yield Case(self.family, self.mesh, self.parts[half:])
        for place in range(len(self.parts)):
            yield Case(self.family, self.mesh, self.parts[:place] + self.parts[place + 1 :])

    def to_json(self) -> str:
        """Return the case in one line, for ``--case``."""
        return json.dumps([self.family, dict(self.mesh), [list(part) for part in self.parts]])

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Return the case of a line."""
        family, mesh, parts = json.loads(text)
        return cls(family, tuple(mesh.items()), tuple((kind, name) for kind, name in parts))


def crowded(random: Random, ranks: int) -> Iterator[Case]:
    """Yield cases of many calls, with one option, change or kind of rows, without end."""
    events = [part for part in atoms() if part[0] == "event" and part[1] not in OF_ADAPTERS]
    others = [part for part in atoms() if part[0] != "event"]
    while True:
        chosen = [random.choice(others), *random.choices(events, k=CROWD)]
        if (case := draw(random, ranks, chosen)) is not None:
            yield case


def mixed(random: Random, ranks: int) -> Iterator[Case]:
    """Yield crowded cases and those of :func:`pairs` by turns."""
    for both in zip(crowded(random, ranks), pairs(random, ranks), strict=False):
        yield from both


def pairs(random: Random, ranks: int) -> Iterator[Case]:
    """Yield a case for each pair of parts, in random order, then cases of three parts without end."""
    both = [*combinations(atoms(), 2)]
    random.shuffle(both)
    yield from (case for chosen in both if (case := draw(random, ranks, chosen)) is not None)
    while True:
        if (case := draw(random, ranks, random.sample(atoms(), 3))) is not None:
            yield case


def draw(random: Random, ranks: int, parts: Any) -> Case | None:
    """Return a case with these parts on a random family and mesh; ``None`` where they exclude one another."""
    kinds = [type(step_options()[name]) for kind, name in parts if kind == "step"]
    of_one = [kind for kind, _ in parts if kind in ("rows", "loop", "optimizer")]
    if Compile in kinds and ("event", "two backwards") in parts:
        return None  # compiled code frees what its first backward has read
    if Compile in kinds and ("event", "hooks of modules") in parts:
        return None  # compiled code does not look for hooks of modules that came later
    if len({*kinds}) < len(kinds) or len({*of_one}) < len(of_one):
        return None
    found = [(kind, f"{name}@{_slot(random, name)}" if kind == "event" else name) for kind, name in parts]
    events = {name for kind, name in parts if kind == "event"}
    if events.intersection(OF_ADAPTERS) and not any(kind == "change" for kind, _ in parts):
        found.append(_LORA)
    elif events.intersection(OF_ADAPTERS) and not any("LoRA" in name or name == "DoRA" for _, name in parts):
        return None
    families = [*FAMILIES]
    if events.intersection(OF_MIXTURES):
        families = [*MIXTURES]
    elif events.intersection(OF_DECODERS):
        families = [*DECODERS]
    meshes = [mesh for mesh in MESHES[ranks] if ContextParallel not in kinds or "cp" in mesh]
    mesh = random.choice(meshes)
    if "ep" in mesh:
        families = [name for name in families if name in MIXTURES]
    return Case(random.choice(families), tuple(mesh.items()), tuple(found)) if families else None


def _slot(random: Random, event: str) -> str:
    if event in OWN_GRADIENTS:  # while there are no others
        return random.choice((SLOTS[0], SLOTS[-1]))
    return random.choice(SLOTS[2:] if event in _WRITES else SLOTS)
