"""Adapters of peft whose factors are not zero."""

from __future__ import annotations

from typing import Any

import torch


def filled(model: Any) -> Any:
    """Convert a ``PeftModel`` to float64 in evaluation mode, and move what is trained away from its initial values."""
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "lora_" in name else 0.01))
    return model.eval()
