"""Which modules mix tokens by their convolution and recurrence alone, and convolution within documents."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2.modeling_lfm2 import Lfm2Attention, Lfm2ShortConv, causal_conv1d_fn

from fsdp_runtime.steps.documents.recurrences import _is_token_wise, convolve_documents, functions_called


@pytest.mark.parametrize(
    ("mixes", "forward"),
    [
        (False, lambda tokens: tokens.relu() * 3),
        (True, lambda tokens: tokens.cumsum(1)),
        (True, lambda tokens: torch.roll(tokens, 1, dims=1)),  # a token shift
        (True, lambda tokens: tokens - tokens.mean(1, keepdim=True)),
        (True, lambda tokens: tokens * torch.arange(tokens.shape[1])[:, None]),  # a position
    ],
)
def test_a_module_that_mixes_tokens_itself_is_noticed(mixes: bool, forward: object) -> None:
    assert _is_token_wise(forward, torch.zeros(2, 3, 16)) is (not mixes)  # type: ignore[arg-type]


def test_tensors_without_data_prove_nothing() -> None:
    assert _is_token_wise(torch.relu, torch.zeros(2, 3, 16, device="meta")) is None


def test_only_classes_whose_forward_calls_known_functions_qualify() -> None:
    class OtherModule(Lfm2ShortConv):  # not one of transformers' own
        pass

    assert functions_called(Lfm2ShortConv) == ("causal_conv1d_fn",)
    assert functions_called(Lfm2Attention) == ()
    assert functions_called(OtherModule) == ()


@pytest.mark.parametrize("lengths", [[4, 1, 7], [12], [1, 1, 2, 8]])
def test_a_convolution_within_documents_equals_that_of_each_document_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((2, 6, 12), (6, 4), (6,))
    )
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    found = convolve_documents(causal_conv1d_fn, tokens, weight, bias, "silu", numbers)
    alone: list[Tensor] = [causal_conv1d_fn(part, weight, bias, "silu") for part in tokens.split(lengths, dim=2)]
    assert (found - torch.cat(alone, dim=2)).abs().max() < 1e-14
