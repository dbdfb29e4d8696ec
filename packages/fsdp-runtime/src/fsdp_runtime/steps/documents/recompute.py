"""Documents of packed rows in modules that recompute their activations.

Backward recomputes a module with the arguments of its forward.  By then another batch may have gone forward, so the
documents have to be among these arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from fsdp_runtime.steps.documents.isolation import CurrentDocuments, mixed_in

_KEYWORD = "_fsdp_runtime_documents"


class _Takes:
    """Mixed in inside of recomputation: uses the documents that are passed."""

    packing: ClassVar[CurrentDocuments]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if _KEYWORD not in kwargs:
            return forward(*args, **kwargs)
        (documents,) = kwargs.pop(_KEYWORD)
        current, self.packing.documents = self.packing.documents, documents
        try:
            return forward(*args, **kwargs)
        finally:
            self.packing.documents = current


class _Passes:
    """Mixed in around recomputation: passes the documents of the current forward."""

    packing: ClassVar[CurrentDocuments]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs[_KEYWORD] = (self.packing.documents,)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def take_documents(modules: Iterable[nn.Module], packing: CurrentDocuments) -> None:
    """Let modules take documents as a keyword; before they are made to recompute."""
    mixed_in(modules, _Takes, packing=packing)


def pass_documents(modules: Iterable[nn.Module], packing: CurrentDocuments) -> None:
    """Pass documents to modules as a keyword; after they were made to recompute."""
    mixed_in(modules, _Passes, packing=packing)
