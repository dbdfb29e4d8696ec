"""What the tests of states, exports and refusals run on each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from with_verl import drive, vision_drive

SAVED = {"save_contents": ["model", "optimizer", "extra", "hf_model"], "load_contents": ["model", "optimizer", "extra"]}

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def step(engine: Any, seed: int, loss: str = "ppo", **settings: Any) -> tuple[float, float]:
    """One update; the mean loss of the ranks and the norm."""
    every = drive.samples(seed=seed)
    with engine.train_mode():
        output = engine.train_batch(drive.batch_of(engine, every, **settings), drive.loss_of(loss, engine))
    engine.lr_scheduler_step()
    total = torch.tensor(sum(output["loss"]))
    dist.all_reduce(total, group=engine.get_data_parallel_group())
    norm = output["metrics"]["grad_norm"] if "grad_norm" in output["metrics"] else float("nan")
    return float(total) / engine.get_data_parallel_size(), norm


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in engine.get_per_tensor_param()[0]}


def _trained(path: str, loss: str, options: Mapping[str, Any]) -> Any:
    kind = "value_model" if loss == "value" else "language_model"
    return drive.build(drive.OURS, path, checkpoint=SAVED, model_type=kind, **options)


def save_and_go_on(path: str, folder: str, *, loss: str = "ppo", **options: Any) -> list[tuple[float, float]]:
    """Two updates, a save, and two more, whose losses and norms are returned."""
    engine = _trained(path, loss, options)
    for index in range(2):
        step(engine, index, loss)
        engine.save_checkpoint(f"{folder}/global_step_{index}/actor", None, index, 1)
    assert not os.path.exists(f"{folder}/global_step_0/actor")  # max_ckpt_to_keep=1
    return [step(engine, index, loss) for index in (2, 3)]


def go_on_after_offload(path: str, folder: str, **options: Any) -> list[tuple[float, float]]:
    """As :func:`save_and_go_on`, with the optimizer's state alone moved to the host and back, as on a GPU."""
    from fsdp_runtime.trainers.verl import engine as module

    engine = _trained(path, "ppo", options)
    for index in range(2):
        step(engine, index)
    with (
        mock.patch.object(module, "offload", partial(module.offload, device="cpu")),
        mock.patch.object(module.verl_api, "get_device_name", return_value="cuda"),
    ):
        for _ in range(2):  # verl asks again
            engine.to("cpu", model=False, optimizer=True, grad=False)
        engine.save_checkpoint(folder)
        states = [entry for state in engine.optimizer.state.values() for entry in state.values()]
        assert sum(getattr(entry, "_local_tensor", entry).untyped_storage().nbytes() for entry in states) == 0
        engine.to("cuda", model=False, optimizer=True, grad=False)
    return [step(engine, index) for index in (2, 3)]


def resume(path: str, folder: str, *, loss: str = "ppo", **options: Any) -> list[tuple[float, float]]:
    engine = _trained(path, loss, options)
    engine.load_checkpoint(f"{folder}/global_step_1/actor", None, False)
    return [step(engine, index, loss) for index in (2, 3)]


def resume_with_data_of(folder: str, path: str, **options: Any) -> None:
    """Load a state beside a state of the data of another sampler than that of verl's SFT trainer."""
    engine = drive.build(drive.OURS, path, checkpoint=SAVED, **options)
    if dist.get_rank() == 0:
        torch.save({"samples_yielded": 8, "sampler_state": {}}, Path(folder, "global_step_1", "actor", "data_0.pt"))
    dist.barrier()
    engine.load_checkpoint(f"{folder}/global_step_1/actor")


def save_by_verl(path: str, folder: str, *, contents: list[str]) -> dict[str, torch.Tensor]:
    """Save a checkpoint of verl's own engine after an update, and return its weights."""
    checkpoint = {"save_contents": contents, "load_contents": contents}
    engine = drive.build(drive.VERLS, path, checkpoint=checkpoint)
    step(engine, 0)
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    engine.checkpoint_manager.save_checkpoint(local_path=folder, hdfs_path=None, global_step=1, max_ckpt_to_keep=None)
    return weights(engine)


def load_verls(path: str, folder: str, *, contents: list[str], **options: Any) -> dict[str, torch.Tensor]:
    checkpoint = {"save_contents": ["model"], "load_contents": contents}
    engine = drive.build(drive.OURS, path, checkpoint=checkpoint, **options)
    engine.load_checkpoint(folder)
    return weights(engine)


def load_of_exports(path: str, folder: str, contents: list[str], **options: Any) -> tuple[str, float]:
    """Load the export of an engine after an update; what was said, and how far the weights moved."""
    checkpoint = {"save_contents": ["hf_model"], "load_contents": contents}
    engine = drive.build(drive.OURS, path, checkpoint=checkpoint, **options)
    engine.save_checkpoint(folder)
    step(engine, 0)
    before, said = weights(engine), ""
    try:
        engine.load_checkpoint(folder)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    now = weights(engine)
    return said, max(float((now[name] - weight).abs().max()) for name, weight in before.items())


def asked_too_early(path: str, **options: Any) -> list[str]:
    """What a model that is not trained says of each call of training, and of what changed before weights were sent."""
    engine = drive.build(drive.OURS, path, forward_only=True, **options)
    batch, loss = drive.batch_of(engine, drive.samples()), drive.loss_of("ppo", engine)
    calls = (
        lambda: engine.train_batch(batch, loss),
        lambda: engine.forward_backward_batch(batch, loss),
        engine.optimizer_step,
        engine.lr_scheduler_step,
        lambda: next(engine.get_per_tensor_param_delta_shard()[0]),
    )
    found = []
    for call in calls:
        try:
            call()
            found.append("nothing was raised")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def adapters(path: str, **options: Any) -> dict[str, Any]:
    """An adapter is trained, exported by itself, and switched off for a reference."""
    engine = drive.build(drive.OURS, path, model=LORA, **options)
    every = drive.samples()

    def scored() -> list[torch.Tensor]:
        with engine.eval_mode():
            output = engine.infer_batch(drive.batch_of(engine, every))["model_output"]["log_probs"]
        return drive.gathered(engine, output, len(every))

    before = scored()
    curve = [step(engine, index) for index in range(2)]
    after = scored()
    with engine.disable_adapter():
        off = scored()
    factors, config = engine.get_per_tensor_param(base_sync_done=True)
    base, _ = engine.get_per_tensor_param(base_sync_done=False)
    copy = {name: tensor.clone() for name, tensor in factors}
    return {
        "curve": curve,
        "moved": max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)),
        "off": max(float((a - b).abs().max()) for a, b in zip(before, off, strict=True)),
        "factors": copy,
        "config": {name: config[name] for name in ("r", "lora_alpha", "peft_type", "task_type", "target_modules")},
        "base": [name for name, _ in base],
    }


def deltas(path: str, **options: Any) -> dict[str, int]:
    """Weights that a receiver builds from full tensors and then from what changed, compared with a full export."""
    engine = drive.build(drive.OURS, path, sync_dtype="bf16", **options)
    received = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.prime_delta_snapshots()
    changed = []
    for index in range(2):
        step(engine, index)
        entries, _ = engine.get_per_tensor_param_delta_shard()
        changed.append(0)
        for slots, dtype, counts, where, values, group in entries:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, (counts.tolist(), where, values), group=group)
            ((name, shape),) = slots
            assert tuple(received[name].shape) == tuple(shape)
            assert str(received[name].dtype) == f"torch.{dtype}"
            for count, at, new in parts:
                assert count == [len(at)] == [len(new)]
                received[name].view(-1)[at.long()] = new
                changed[-1] += len(at)
        now = dict(engine.get_per_tensor_param()[0])
        assert set(now) == set(received)
        for name, tensor in now.items():
            assert torch.equal(tensor, received[name]), name
    total = sum(tensor.numel() for tensor in received.values())
    covered = dict.fromkeys(received, 0)
    for name, local, spec in engine.get_per_tensor_param_shard()[0]:
        assert local.dtype == torch.bfloat16
        covered[name] += local.numel() if spec.contributes else 0
    numbers = torch.tensor([*covered.values()])
    dist.all_reduce(numbers)
    assert numbers.tolist() == [tensor.numel() for tensor in received.values()]
    return {"changed": changed[-1], "total": total}


def replayed(path: str, *, packed: bool = True, **options: Any) -> dict[str, Any]:
    """R2: routes are recorded by compute_log_prob and replayed in the update, against a changed router."""
    from verl.workers.config.engine import EngineRouterReplayConfig

    options["router_replay"] = EngineRouterReplayConfig(mode="R2")
    engine = drive.build(drive.OURS, path, model={"use_remove_padding": packed}, **options)
    every = drive.samples()
    data = drive.batch_of(engine, every, use_remove_padding=packed)
    with engine.eval_mode():
        scored = engine.infer_batch(data)["model_output"]
    routes = scored["routed_experts"]
    with torch.no_grad():  # routes of the changed router would differ
        for name, parameter in engine.module.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(-1)
    batch = drive.batch_of(engine, every, use_remove_padding=packed)
    batch["routed_experts"] = routes
    with engine.train_mode():
        output = engine.train_batch(batch, drive.loss_of("ppo", engine))
    missing = ""
    try:
        with engine.train_mode():
            engine.train_batch(drive.batch_of(engine, every, use_remove_padding=packed), drive.loss_of("ppo", engine))
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    gathered = drive.gathered(engine, routes, len(every))
    loss = torch.tensor(sum(output["loss"]))
    dist.all_reduce(loss, group=engine.get_data_parallel_group())
    norm = output["metrics"].get("grad_norm")
    return {"routes": gathered, "loss": float(loss) / engine.get_data_parallel_size(), "norm": norm, "missing": missing}


def distilled(engine_name: str, path: str, **options: Any) -> dict[str, Any]:
    """Top-k distillation of verl, and the squares of probabilities."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import ActorConfig, DistillationConfig

    engine = drive.build(engine_name, path, **options)
    every = drive.samples()
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)
    config = DistillationConfig()
    object.__setattr__(config.distillation_loss, "topk", 5)
    object.__setattr__(config.distillation_loss, "loss_mode", "forward_kl_topk")
    object.__setattr__(config.distillation_loss, "use_task_rewards", False)
    object.__setattr__(config.distillation_loss, "use_policy_gradient", False)
    loss = partial(distillation_ppo_loss, config=actor, distillation_config=config)
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    generator = torch.Generator().manual_seed(3)
    ids, logprobs = [], []
    for each in every:
        length = len(each["ids"])
        ids.append(torch.stack([torch.randperm(drive.VOCAB, generator=generator)[:5] for _ in range(length)]))
        logprobs.append(torch.randn(length, 5, generator=generator).log_softmax(-1) - 0.2)

    def batch(**settings: Any) -> Any:
        data = drive.batch_of(engine, every, **settings)
        data["teacher_ids"] = torch.nested.as_nested_tensor(ids[rank::size], layout=torch.jagged)
        data["teacher_logprobs"] = torch.nested.as_nested_tensor(logprobs[rank::size], layout=torch.jagged)
        return data

    with engine.eval_mode():
        squares = engine.infer_batch(batch(calculate_sum_pi_squared=True))["model_output"]["sum_pi_squared"]
    with engine.train_mode():
        output = engine.train_batch(batch(distillation_use_topk=True, return_model_output=True), loss)
    names = ("distillation_losses", "student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage")
    found = {name: drive.gathered(engine, output["model_output"][name], len(every)) for name in names}
    return {
        **found,
        "sum_pi_squared": drive.gathered(engine, squares, len(every)),
        "norm": output["metrics"].get("grad_norm"),
    }


def uneven(
    path: str, shares: list[list[int]], *, dynamic: bool, images: bool = False, **options: Any
) -> tuple[float, float, dict[str, Any]]:
    """An update on samples that are dealt unevenly over dp."""
    engine = drive.build(drive.OURS, path, **options)
    samples_and_batch = vision_drive if images else drive
    every = samples_and_batch.samples()
    own = [every[index] for index in shares[engine.get_data_parallel_rank()]]
    settings = {} if dynamic else {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    batch = samples_and_batch.batch_of(engine, every, own=own, **settings)
    with engine.train_mode():
        output = engine.train_batch(batch, drive.loss_of("ppo", engine))
    loss = torch.tensor(sum(output["loss"]))
    dist.all_reduce(loss, group=engine.get_data_parallel_group())
    return float(loss) / engine.get_data_parallel_size(), output["metrics"].get("grad_norm"), weights(engine)


def refused(path: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The error of building an engine and running a batch."""
    every = drive.samples()
    try:
        engine = drive.build(drive.OURS, path, **options)
        own = settings.get("own_of_rank")
        given = {name: value for name, value in settings.items() if name != "own_of_rank"}
        if own is not None:
            given["own"] = [every[index] for index in own[engine.get_data_parallel_rank()]]
        with engine.eval_mode():
            engine.infer_batch(drive.batch_of(engine, every, **given))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def lengths_of_rows(path: str, **options: Any) -> list[int]:
    """The lengths of rows of the full batch, packed and padded; nothing is run."""
    from fsdp_runtime.trainers.verl.rows import rows_of

    engine = drive.build(drive.OURS, path, **options)
    batches = (drive.batch_of(engine, drive.samples(), use_remove_padding=packed) for packed in (True, False))
    rows = [rows_of(each, engine.mesh, engine.engine_config, packs=True) for each in batches]
    return [each.tokens.shape[1] for each in rows]


#: What makes one rank's batch wrong, by what its error says of it.
SPOILS: Mapping[str, Callable[[Any], Any]] = {
    "sample 2 has the temperature 0": lambda batch: batch.set("temperature", torch.tensor([0.7, 0.7, 0.0, 0.7])),
    "sample 1 has the token id 317, .*vocabulary of 317": lambda batch: batch["input_ids"].values()[14].fill_(317),
    "sample 0 has the token id -1": lambda batch: batch["input_ids"].values()[3].fill_(-1),
    "sample 3 has an empty prompt": lambda batch: _cut(batch, "prompts", slice(0)),
    "sample 3 has no tokens": lambda batch: _cut(batch, "input_ids", slice(0)),
    "sample 3 has 9 position_ids for 10 tokens": lambda batch: _cut(batch, "position_ids", slice(9)),
    "nothing more and old_log_probs less": lambda batch: batch.pop("old_log_probs"),
    "cannot be read: KeyError.*loss_mask": lambda batch: batch.pop("loss_mask"),
}


def _cut(batch: Any, name: str, kept: slice) -> None:
    *rows, last = batch[name].unbind()
    batch[name] = torch.nested.as_nested_tensor([*rows, last[kept]], layout=torch.jagged)


def spoiled(path: str, **options: Any) -> dict[str, str]:
    """The errors of updates on batches that are wrong on one rank of dp, and of one that is right after them."""
    engine = drive.build(drive.OURS, path, **options)
    found = {}
    for name, spoil in {**SPOILS, "fine": len}.items():
        batch = drive.batch_of(engine, drive.samples())
        if engine.get_data_parallel_rank() == 1:
            spoil(batch)
        try:
            with engine.train_mode():
                engine.train_batch(batch, drive.loss_of("ppo", engine))
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def not_a_number(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """An update with an advantage that is not a number, as a broken reward makes it, on one rank."""
    engine = drive.build(drive.OURS, path)
    before, every = weights(engine), drive.samples()
    every[0]["advantages"][1] = float("nan")
    with engine.train_mode():
        output = engine.train_batch(drive.batch_of(engine, every), drive.loss_of("ppo", engine))
    return before, weights(engine), output["metrics"]["grad_norm"]


def rollout_routes(path: str, **options: Any) -> tuple[float, str]:
    """R3: the routes of a rollout, without those of each sample's last token, give its log-probabilities again."""
    from verl.workers.config.engine import EngineRouterReplayConfig

    every = drive.samples()

    def scored(mode: str, routes: Any) -> tuple[Any, Any]:
        engine = drive.build(drive.OURS, path, router_replay=EngineRouterReplayConfig(mode=mode), **options)
        data = drive.batch_of(engine, every)
        if routes is not None:
            data["routed_experts"] = routes
        with engine.eval_mode():
            return engine, engine.infer_batch(data)["model_output"]

    engine, before = scored("R2", None)
    rows = [row.clone() for row in before["routed_experts"].unbind()]
    for row in rows:
        row[-1] = 0  # as verl's agent loop fills what was never run
    _, after = scored("R3", torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    try:
        scored("R3", None)
        missing = "nothing was raised"
    except Exception as error:
        missing = str(error)
    both = (drive.gathered(engine, each["log_probs"], len(every)) for each in (before, after))
    return max(float((one - other).abs().max()) for one, other in zip(*both, strict=True)), missing
