"""Workarounds for versions of torch: each is needed by a supported version, and sits where the table says."""

import ast
import re
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

import pytest

import tp_plans

PACKAGE = Path(tp_plans.__file__).parent


@dataclass(frozen=True, slots=True)
class Workaround:
    """Code that only some supported versions of torch need."""

    place: str  # module and name under ``tp_plans.torch_styles``
    last: tuple[int, int]  # the last torch version that needs it; a test fails once no supported version does
    upstream: str  # the issue or pull request, or that none was found
    reason: str  # the failure without it


#: Every place in the torch styles that depends on a version of torch.
WORKAROUNDS = (
    Workaround(
        "gradients._detach",
        (2, 11),
        "no upstream issue found",
        "a DTensor that requires a gradient cannot be redistributed in inference mode",
    ),
    Workaround(
        "blocks._is_placed",
        (2, 13),
        "no upstream issue found",
        "the compiler takes ``in`` of a tuple of classes for False",
    ),
    Workaround(
        "gradients._DenseGradient",
        (2, 11),
        "https://github.com/pytorch/pytorch/issues/107661",
        "an expanded gradient (a sum's) of an uneven shard is accumulated as a replicated copy",
    ),
    Workaround(
        "placement._OwnPart",
        (2, 14),
        "https://github.com/pytorch/pytorch/issues/152954",
        "the compiler recurses without end over the symbolic length of a replicated DTensor that is sharded",
    ),
    Workaround(
        "placement._OwnSum",
        (2, 14),
        "https://github.com/pytorch/pytorch/issues/152954",
        "the same, of the gradient of partial sums that are sharded",
    ),
    Workaround(
        "placement.plain_full_tensor",
        (2, 11),
        "no upstream issue found",
        "gathering shards of unequal length leaves a view of padded rows",
    ),
    Workaround(
        "row_all_to_all.all_to_all",
        (2, 11),
        "no upstream issue found; the same failure: https://github.com/deepspeedai/DeepSpeed/pull/8491",
        "the compiler gives no gradient to an autograd function if a collective wrote its output in place",
    ),
)


def oldest_supported():
    (requirement,) = (each for each in requires("tp-plans") if each.startswith(("torch<", "torch>")))
    return tuple(map(int, re.search(r">=(\d+)\.(\d+)", requirement).groups()))


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=lambda each: each.place)
def test_workaround_is_needed_by_a_supported_torch(workaround):
    needed = workaround.last >= oldest_supported()
    assert needed, f"remove {workaround.place}: torch {workaround.last} was the last to need it"


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=lambda each: each.place)
def test_workaround_sits_at_its_place_and_names_its_source(workaround):
    module, _, name = workaround.place.partition(".")
    tree = ast.parse((PACKAGE / "torch_styles" / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert workaround.upstream.startswith(("https://github.com/pytorch/pytorch/", "no upstream issue found"))


def test_every_comment_on_a_version_of_torch_is_in_the_table():
    files = {place.place.partition(".")[0] for place in WORKAROUNDS}
    versioned = {
        file.stem for file in (PACKAGE / "torch_styles").glob("*.py") if re.search(r"torch 2\.\d+", file.read_text())
    }
    assert versioned <= files
