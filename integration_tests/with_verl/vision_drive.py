"""A vision-language model on samples with and without an image, by the engine and one sample at a time."""

from __future__ import annotations

from typing import Any

import torch

from with_verl import drive

IMAGE, SIDE = 300, 2  # the id of an image's tokens, and how many there are in its height and width


def samples() -> list[dict[str, torch.Tensor]]:
    """Every second sample begins with an image where its prompt has room."""
    generator, found = torch.Generator().manual_seed(5), drive.samples()
    for index, each in enumerate(found):
        length, tokens = len(each["ids"]), SIDE * SIDE
        each["ids"] = each["ids"] % (IMAGE - 1) + 1
        each["positions"] = torch.arange(length).expand(4, length).clone()
        if index % 2 == 0 and int(each["prompt"]) >= tokens:
            each["ids"][:tokens] = IMAGE
            each["positions"][1, :tokens] = 0
            each["positions"][2, :tokens] = torch.arange(SIDE).repeat_interleave(SIDE)
            each["positions"][3, :tokens] = torch.arange(SIDE).repeat(SIDE)
            each["positions"][1:, tokens:] = torch.arange(SIDE, SIDE + length - tokens)
            each["pixel_values"] = torch.randn(4 * tokens, 3 * 2 * 16, generator=generator)
            each["image_grid_thw"] = torch.tensor([[1, 2 * SIDE, 2 * SIDE]])
    return found


def media_of(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: sample[name] for name in ("pixel_values", "image_grid_thw") if name in sample}


def alone(path: str, temperature: float = 0.7) -> list[torch.Tensor]:
    """Log-probabilities of transformers' model, one sample at a time."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="sdpa").eval()
    found = []
    for each in samples():
        ids = each["ids"][None]
        with torch.no_grad():
            logits = model(ids, position_ids=each["positions"][1:, None], **media_of(each), use_cache=False).logits[0]
        scores = (logits[:-1].float() / temperature).log_softmax(-1)
        found.append(scores.gather(-1, ids[0, 1:, None])[:, 0])
    return found


def batch_of(engine: Any, every: list[dict[str, torch.Tensor]], **settings: Any) -> Any:
    """This rank's share of samples in verl's form, with positions of text and images, and with pixels."""
    from tensordict import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils as tu

    own = settings.pop("own", None) or every[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    data = drive.batch_of(engine, every, own=own, **settings)
    data["position_ids"] = tu.nested_tensor_from_tensor_list([each["positions"] for each in own], ragged_idx=2)
    data["multi_modal_inputs"] = NonTensorStack(*[NonTensorData(media_of(each)) for each in own])
    return data


def run(path: str, *, packed: bool, **options: Any) -> dict[str, Any]:
    """Score, and one update."""
    engine = drive.build(drive.OURS, path, model={"use_remove_padding": packed}, **options)
    every = samples()
    with engine.eval_mode():
        scored = engine.infer_batch(batch_of(engine, every, use_remove_padding=packed))["model_output"]["log_probs"]
    with engine.train_mode():
        batch = batch_of(engine, every, use_remove_padding=packed)
        output = engine.train_batch(batch, drive.loss_of("ppo", engine))
    norm = output["metrics"].get("grad_norm")
    return {"log_probs": drive.gathered(engine, scored, len(every)), "norm": norm}
