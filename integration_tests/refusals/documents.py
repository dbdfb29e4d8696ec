"""What packed rows and shared prefixes refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime.steps import SharedPrefixes
from fsdp_runtime.steps.documents.documents import find_documents
from fsdp_runtime.steps.documents.isolation import run_per_document
from fsdp_runtime.steps.documents.recurrences import RECURRENCES, Call
from harness.models import tiny_model
from refusals import Provocations
from refusals.worlds import headed, ids, parallelized, refuse, row, with_attention

PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])
PREFIXES: dict[str, Any] = {"plan": None, "steps": (SharedPrefixes(),)}


def _llama() -> Any:
    return tiny_model("LlamaForCausalLM")


def _packed(model: nn.Module | None = None) -> None:
    refuse(model or _llama(), plan=None, packed_sequences=True)


def _packed_forward(**inputs: Any) -> None:
    with parallelized(_llama(), plan=None, packed_sequences=True) as model:
        model(input_ids=ids(1, 6), position_ids=PACKED, **inputs)


def _shared(model: nn.Module | None = None, axes: dict[str, int] | None = None, **options: Any) -> None:
    refuse(model or _llama(), axes, **PREFIXES, **options)


def _shared_forward(model: Any = None, *, length: int = 6, **inputs: Any) -> None:
    with parallelized(model or _llama(), **PREFIXES) as found:
        found(input_ids=ids(1, length), subtree_end=torch.full((1, 6), 6), **inputs)


def _with_state() -> None:
    def scan(hidden_states: Tensor, initial_states: Any = None) -> None: ...

    Call.of(scan, RECURRENCES["mamba2_chunk_scan"], (), {"initial_states": torch.ones(1)})


def _both_ways() -> Any:
    model = _llama()
    model.config.is_causal = False
    return model


def _find(**given: Any) -> None:
    find_documents(**{"position_ids": None, "seq_idx": None, "cu_seq_lens": None, **given}, shape=(2, 4))


def _value_of_pairs() -> None:
    documents = find_documents(PACKED, None, None, (1, 6))
    assert documents is not None
    run_per_document(lambda values: values, (torch.arange(36).view(6, 6),), {}, documents, singly=False)


CASES: Provocations = {
    "fsdp_runtime/steps/documents/documents.py": {
        "LayoutError: cu_seq_lens_q": lambda: _find(cu_seq_lens=torch.zeros(2, 4)),
        "LayoutError: give one entry a token": lambda: _find(position_ids=torch.zeros(1, 3)),
    },
    "fsdp_runtime/steps/documents/isolation.py": {
        "LayoutError: has a value for each pair of tokens": _value_of_pairs,
        "LayoutError: packed rows need a mask": lambda: _packed_forward(
            attention_mask=torch.ones(1, 1, 6, 5), use_cache=False
        ),
    },
    "fsdp_runtime/steps/documents/recurrences.py": {"LayoutError: of a recurrence has no": _with_state},
    "fsdp_runtime/steps/documents/shared_prefixes.py": {
        "OptionError: leave packed_sequences out, and pack single": lambda: _shared(packed_sequences=True),
        "ModelError: takes no mask of ancestors": lambda: _shared(with_attention("flash_attention_2")),
        "ModelError: passes a state from token": lambda: _shared(row("jamba")),
        "ModelError: cannot share prefixes": lambda: _shared(row("doge, mixture")),
        "ModelError: on the full sequence of all cp ranks": lambda: _shared(row("deepseek_v32"), {"cp": 2}),
        "ModelError: has bidirectional attention": lambda: _shared(_both_ways()),
        "LayoutError: subtree_end needs position_ids": (
            lambda: _shared_forward(),
            lambda: _shared_forward(position_ids=PACKED, use_cache=True),
        ),
    },
    "fsdp_runtime/_transformers_compat/masks.py": {
        "ModelError: bidirectional attention cannot": lambda: _shared_forward(
            headed("bert", "masked"), position_ids=PACKED
        ),
        "LayoutError: only self-attention without a cache": lambda: _shared_forward(length=5, position_ids=PACKED),
    },
    "fsdp_runtime/steps/documents/step.py": {
        "ModelError: attends to later tokens": lambda: _packed(headed("bert", "masked")),
        "LayoutError: a key/value cache has no boundaries": lambda: _packed_forward(use_cache=True),
    },
}
