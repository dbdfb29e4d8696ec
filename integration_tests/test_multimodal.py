"""Vision-language models on ranks: towers sharded over tp, ranks without images, frozen and recomputed towers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from coverage.measure import Refused
from coverage.multimodal import multimodal_model
from coverage.multimodal_absent import measure_absent_media
from coverage.multimodal_inputs import multimodal_inputs
from coverage.multimodal_measure import measure_multimodal
from coverage.multimodal_media import IMAGES_PER_ROW
from coverage.outcome import summarize
from fsdp_runtime import load_weights, parallelize, stream_weights
from harness.parity import GRADIENT_BOUND, OUTPUT_BOUND, gradient_errors, largest, logits_of, mesh_for
from harness.ranks import RankPool

#: Model types with every way in which towers are built, and the modes in which each is measured by default.
PAIRS = [
    ("qwen3_vl", "SP"),  # fused queries, keys and values; features added between blocks
    ("llava", "TP"),  # separate projections
]
#: Further model types that are measured in the slow runs.
OTHERS = [
    "aria",
    "aya_vision",
    "blip",
    "blip-2",
    "cohere2_vision",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "diffusion_gemma",
    "dots3_note",
    "exaone4_5",
    "florence2",
    "fuyu",
    "gemma3",
    "gemma4",
    "git",
    "glm4v",
    "glm5_next",
    "granite4_vision",
    "hyperclovax_vision_v2",
    "instructblip",
    "internvl",
    "kosmos-2",
    "kyutai_speech_to_text",
    "lfm3_vl",
    "minimax_m3_vl",
    "mllama",
    "molmo2",
    "ovis2",
    "paligemma",
    "phi4_multimodal",
    "pix2struct",
    "pp_formulanet",
    "qianfan_ocr",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_omni_moe_thinker",
    "qwen3_vl_moe",  # norms of heads that transformers' plan leaves out
    "qwen4_exp",
    "step3p7",
    "t5gemma2",
    "udop",
    "vision-encoder-decoder",
]


def _measured(pairs: list[tuple[str, str]]) -> list[Any]:
    return [measure_multimodal(name, mode, tp=2) for name, mode in pairs]


def test_logits_and_gradients_with_sharded_towers_are_those_of_one_process(two_ranks: RankPool) -> None:
    ranks = two_ranks.run(_measured, PAIRS)
    for index, (name, mode) in enumerate(PAIRS):
        outcome = summarize([results[index] for results in ranks])
        assert outcome.status == "right", f"{name}, {mode}: {outcome.note}"
        assert (outcome.share or 0) > 0.95, f"{name}: {outcome.whole}"


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_measured_model_type_is_right_with_images(two_ranks: RankPool, name: str) -> None:
    ranks = two_ranks.run(_measured, [(name, "TP"), (name, "SP")])
    for index in range(2):
        outcome = summarize([results[index] for results in ranks])
        assert outcome.status == "right", outcome.note


def _rows(inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """Rank 0 gets the rows with images, rank 1 those without."""
    rows = [row for row, images in enumerate(IMAGES_PER_ROW) if (images > 0) is (rank == 0)]
    by_row = {"input_ids", "mm_token_type_ids", "token_type_ids"}
    own = {name: value[rows] for name, value in inputs.items() if name in by_row}
    return own if rank else {**{name: value for name, value in inputs.items() if name not in by_row}, **own}


def _gradients_with_images_on_one_rank(name: str, options: dict[str, Any]) -> tuple[float, float, list[str]]:
    """The largest errors of the logits and the gradients, and the parameters without a gradient."""
    mesh = mesh_for({"dp_shard": 2})
    rank = mesh.get_local_rank("dp_shard")
    model = multimodal_model(name)
    inputs = multimodal_inputs(model)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not (options.get("frozen") and path.startswith("model.visual")))
    candidate = copy.deepcopy(model)
    expected = [_weighted(model, _rows(inputs, each)) for each in range(2)]
    sum(loss for _, loss in expected).backward()  # type: ignore[union-attr]
    wanted = {path: parameter.grad for path, parameter in model.named_parameters()}

    parallelize(candidate, mesh, activation_checkpointing=options.get("checkpointing", "none"))
    logits, loss = _weighted(candidate, _rows(inputs, rank))
    (loss * 2).backward()  # FSDP2 averages over the two ranks
    missing = [path for path, p in candidate.named_parameters() if p.grad is None and wanted[path] is not None]
    errors = gradient_errors(wanted, candidate)
    return largest(logits - expected[rank][0]), max(errors.values()), missing


def _weighted(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits = logits_of(model, inputs)
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    return logits, (logits * weights).sum()


CASES = [
    ("qwen3_vl", {}),
    ("qwen3_vl", {"checkpointing": "block"}),
    ("qwen3_vl", {"frozen": True}),
    ("llava", {}),
]


def _all_cases() -> list[tuple[float, float, list[str]]]:
    return [_gradients_with_images_on_one_rank(name, options) for name, options in CASES]


def test_a_rank_without_an_image_gets_the_gradients_of_all_rows(two_ranks: RankPool) -> None:
    for rank, found in enumerate(two_ranks.run(_all_cases)):
        for case, (output, gradient, missing) in zip(CASES, found, strict=True):
            assert not missing, (rank, case, missing)
            assert max(output / OUTPUT_BOUND, gradient / GRADIENT_BOUND) <= 1, (rank, case, output, gradient)


#: Model types whose towers sit otherwise, and the reason for a refusal: blocks without a forward and codes as features;
#: inputs of a tower that no method takes.
ON_ONE_RANK = {"chameleon": "", "evolla": "protein_input_ids"}
#: The same in the slow runs: the method of a module further in, arguments that only the method inside names.
MORE_ON_ONE_RANK = {"diffusion_gemma": "", "kosmos-2.5": "", "minicpm_ocr": "", "udop": "image"}


def _on_one_rank(names: list[str]) -> list[dict[str, float] | str]:
    found: list[dict[str, float] | str] = []
    for name in names:
        try:
            found.append(measure_absent_media(name, "TP", "image", tp=1))
        except Refused as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    "cases", [pytest.param(ON_ONE_RANK, id="two"), pytest.param(MORE_ON_ONE_RANK, id="more", marks=pytest.mark.slow)]
)
def test_rank_without_media_equals_one_process_or_every_rank_refuses(
    two_ranks: RankPool, cases: dict[str, str]
) -> None:
    for ranks in two_ranks.run(_on_one_rank, [*cases]):
        for (name, reason), found in zip(cases.items(), ranks, strict=True):
            told = f"some data-parallel ranks have rows with media ({reason}) and others have none"
            assert found == {} if not reason else str(found).startswith(told), (name, found)


#: What is measured of towers on two data-parallel ranks of two ranks of ``tp``: the model type, the mode, the options.
PROPERTIES = [("qwen3_vl", "SP", {"activation_checkpointing": "block"})]  # fused projections; frozen
#: The same in the slow runs.
MORE_PROPERTIES = [
    ("llava", "TP", {"activation_checkpointing": "block"}),  # separate projections, a tower of which a part is unused
    ("gemma3", "SP", {}),
    ("internvl", "TP", {}),
    ("qwen2_5_omni_thinker", "TP", {}),
]


def _properties(name: str, mode: str, options: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """What one rank finds of one model with FSDP2, sharded towers, and gradients of images."""
    mesh = mesh_for({"dp_shard": 2, "tp": 2})
    model = multimodal_model(name)
    inputs = multimodal_inputs(model)
    tower = next(path for path in ("model.visual", "model.vision_tower") if path in dict(model.named_modules()))
    for parameter in model.get_submodule(tower).parameters():
        parameter.requires_grad_(mode == "TP")
    reference = copy.deepcopy(model)
    logits, loss = _weighted(reference, inputs)
    loss.backward()
    wanted = {path: parameter.grad for path, parameter in reference.named_parameters()}

    sharded = parallelize(model, mesh, sequence_parallel=mode == "SP", **options)
    found, loss = _weighted(sharded, inputs)
    loss.backward()
    gradients = gradient_errors(wanted, sharded)
    lists = [path for path, module in reference.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = [f"{path}.0" for path in lists if path.startswith(tower) and path.endswith(("blocks", "layers", "layer"))]
    assert blocks
    if torch.distributed.get_rank() == 0:
        reference.save_pretrained(checkpoint)
    torch.distributed.barrier()
    saved = load_file(Path(checkpoint, "model.safetensors"))
    streamed = dict(stream_weights(sharded))
    units = {path for path, module in sharded.named_modules() if isinstance(module, FSDPModule)}
    for parameter in sharded.parameters():
        parameter.data.zero_()
    load_weights(sharded, checkpoint)
    loaded = dict(stream_weights(sharded))
    return {
        "errors": (largest(found - logits) / OUTPUT_BOUND, max(gradients.values()) / GRADIENT_BOUND),
        "frozen": [
            path
            for path, parameter in sharded.named_parameters()
            if not parameter.requires_grad and parameter.grad is not None
        ],
        "blocks that are no units": [path for path in blocks if path not in units],
        "split": len([n for n, p in sharded.named_parameters() if isinstance(p, DTensor) and p.device_mesh.ndim == 2]),
        "streamed otherwise": _different(streamed, saved),
        "loaded otherwise": _different(loaded, saved),
    }


def _different(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> list[str]:
    """The names of the saved tensors that are absent or have other values."""
    return [name for name, value in saved.items() if name not in tensors or not torch.equal(tensors[name], value)]


def _all_properties(cases: list[tuple[str, str, dict[str, Any]]], folder: str) -> list[dict[str, Any]]:
    return [_properties(name, mode, options, f"{folder}/{name}") for name, mode, options in cases]


@pytest.mark.parametrize(
    "cases", [pytest.param(PROPERTIES, id="one"), pytest.param(MORE_PROPERTIES, id="more", marks=pytest.mark.slow)]
)
def test_towers_under_fsdp_and_tp_are_trained_frozen_recomputed_streamed_and_loaded(
    four_ranks: RankPool, tmp_path: Path, cases: list[tuple[str, str, dict[str, Any]]]
) -> None:
    for rank in four_ranks.run(_all_properties, cases, str(tmp_path)):
        for case, found in zip(cases, rank, strict=True):
            assert max(found["errors"]) <= 1, (case, found["errors"])
            assert found["split"] > 0, case
            for what in ("blocks that are no units", "frozen", "streamed otherwise", "loaded otherwise"):
                assert found[what] == [], (case, what)


#: Model types with video and with audio, of every way in which their rows are made.
MEDIA = [("qwen3_vl", "video"), ("qwen2_5_omni_thinker", "audio"), ("voxtral", "audio"), ("llava_next_video", "video")]


def _measured_media(mode: str) -> list[Any]:
    return [measure_multimodal(name, mode, tp=2, media=media) for name, media in MEDIA]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["TP", "SP"])
def test_models_are_right_with_video_and_audio(two_ranks: RankPool, mode: str) -> None:
    ranks = two_ranks.run(_measured_media, mode)
    for index, case in enumerate(MEDIA):
        outcome = summarize([results[index] for results in ranks])
        assert outcome.status == "right", (case, outcome.note)
