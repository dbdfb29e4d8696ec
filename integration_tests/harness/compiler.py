"""What the compiler has done in this process, from counters that torch keeps private.

``torch._dynamo.utils.counters`` has no public form in torch 2.11 to 2.15; torchtitan's and torch's own tests read it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._dynamo.utils import counters


def forget_compiled() -> None:
    """Drop all compiled code, and count anew."""
    torch.compiler.reset()
    counters.clear()


def graphs_compiled() -> int:
    """Return the graphs compiled since ``forget_compiled``, each compilation of one piece of code by itself."""
    return int(counters["stats"]["unique_graphs"])


def graph_breaks() -> Mapping[str, int]:
    """Return the breaks since ``forget_compiled`` by their reasons, as the compiler words them.

    Code that is left to Python because its backend failed on it is counted with them.
    """
    return {**counters["unimplemented"], **counters["graph_break"]}
