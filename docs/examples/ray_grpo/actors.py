"""The actors: trainer ranks that form a gloo world of their own, and a generator that weights are streamed to."""

import hashlib
import os
import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy
import ray
import torch
import torch.distributed as dist
from batch import Sample
from evaluate import held_out_questions, right_answers
from grpo import Improvement, improve, rewards_of
from report import Report
from rollout import Generator
from run import Run, check_divisible
from settings import Settings
from task import Question
from trainer import STREAM_BUCKET, Trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from warmup import warm_up

import fsdp_runtime
from fsdp_runtime.sync import WeightExport, WeightInfo, flatten_bucket, unflatten_bucket

Digests = dict[str, str]
"""The SHA-256 of every weight's bytes, by the model's own names."""


@ray.remote
class GeneratorActor:
    """Samples with a full copy of the policy; stands in for an inference engine.

    Args:
        settings: What the user chose.
        checkpoint: The folder with the policy's config and tokenizer. The weights come from the trainer.
    """

    def __init__(self, settings: Settings, checkpoint: Path) -> None:
        self._settings = settings
        config = AutoConfig.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
        self._generator = Generator(model, AutoTokenizer.from_pretrained(checkpoint))
        self._sampling = torch.Generator().manual_seed(settings.seed)
        self._came: set[str] = set()

    def receive(self, weights: list[WeightInfo], run_of_bytes: numpy.ndarray) -> None:
        """Take over one bucket.

        Args:
            weights: Name, dtype and shape of every tensor in it.
            run_of_bytes: ``[bytes]``, uint8: one tensor after another.
        """
        # Ray hands on a view of shared memory that must not be written to, and torch has no read-only tensors.
        flat = torch.from_numpy(run_of_bytes.copy())
        self._came |= self._generator.load_some(unflatten_bucket(weights, flat))

    def received_all(self) -> None:
        """Check that the stream that ends here left no weight out.

        Raises:
            KeyError: One did not come.
        """
        came, self._came = self._came, set()
        self._generator.require_all(came)

    def sample(self, questions: Sequence[Question]) -> tuple[list[Sample], torch.Tensor]:
        """Answer every question ``--group`` times.

        Returns:
            The samples, group by group, and their rewards ``[prompts, group]``.
        """
        settings = self._settings
        prompts = [question.prompt for question in questions for _ in range(settings.group)]
        samples = self._generator.sample(
            prompts, settings.max_new_tokens, settings.temperature, self._sampling, settings.top_p
        )
        return samples, rewards_of(questions, samples, self._generator)

    def score(self) -> tuple[float, float]:
        """The shares of held-out questions that are answered exactly: sampled, and with the likeliest tokens."""
        questions = held_out_questions(self._settings.held_out)
        sampled, greedy = right_answers(self._generator, questions, self._settings, rank=0)
        return sampled / len(questions), greedy / len(questions)

    def digests(self) -> Digests:
        """Of the weights as the generator holds them."""
        return _digests(self._generator.model.named_parameters())


@ray.remote
class TrainerActor:
    """One rank of the trainer. Every method but the first two is collective: call it on all ranks at once.

    Args:
        settings: What the user chose.
        checkpoint: The folder to read the policy from.
        rank: This actor's place in the trainer's world.
        world_size: How many trainer actors there are.
    """

    def __init__(self, settings: Settings, checkpoint: Path, rank: int, world_size: int) -> None:
        self._settings, self._checkpoint = settings, checkpoint
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))

    def meeting_point(self) -> tuple[str, int]:
        """This node's address and a free port of it; asked of rank 0, where the others will meet it."""
        with socket.socket() as listening:
            listening.bind(("", 0))
            return ray.util.get_node_ip_address(), listening.getsockname()[1]

    def join(self, address: str, port: int) -> None:
        """Form the world, and load this rank's part of the policy."""
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        settings = self._settings
        mesh = fsdp_runtime.MeshSpec(dp_shard=settings.dp_shard, tp=settings.tp).build(device_type="cpu")
        check_divisible(settings, world_size=1, dp_size=fsdp_runtime.submesh(mesh, "dp").size())
        config = AutoConfig.from_pretrained(self._checkpoint)
        sequence_parallel = settings.sequence_parallel and settings.tp > 1
        dtype = getattr(torch, settings.dtype)
        self._run = Run(
            settings=settings,
            mesh=mesh,
            device=torch.device("cpu"),
            trainer=Trainer(
                config, self._checkpoint, mesh, dtype, sequence_parallel, settings.activation_checkpointing
            ),
            tokenizer=AutoTokenizer.from_pretrained(self._checkpoint),
            generator=None,
            report=Report(visible=False),
            questions=random.Random(settings.seed),
            sampling=torch.Generator(),
        )

    def warm_up(self) -> None:
        """Supervised steps on the task's text; the optimizer begins anew after them."""
        warm_up(self._run)
        self._run.trainer.reset_optimizer()

    def stream_to(self, generator: "ray.actor.ActorHandle") -> int:
        """Hand the generator the present weights, a bucket at a time.

        All ranks gather every bucket; the first one sends it through Ray's shared memory, and asks for the next when
        the generator has taken it over. So one bucket is on its way, however large the model.

        Returns:
            How many buckets this rank sent.
        """
        sent = 0
        dtype = getattr(torch, self._settings.dtype)
        model = self._run.trainer.model
        for bucket in WeightExport(bucket_bytes=STREAM_BUCKET, dtype=dtype, names="model").buckets(model):
            if dist.get_rank() == 0:
                weights = [WeightInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]
                ray.get(generator.receive.remote(weights, flatten_bucket(bucket).numpy()))
                sent += 1
        if dist.get_rank() == 0:
            ray.get(generator.received_all.remote())
        return sent

    def improve(self, samples: Sequence[Sample], rewards: torch.Tensor, step: int) -> Improvement:
        """Update the policy from all samples of a step, which is counted from zero."""
        return improve(self._run, samples, rewards, step)

    def digests(self) -> Digests:
        """Of the full weights, gathered; the same on every rank."""
        dtype = getattr(torch, self._settings.dtype)
        return _digests(fsdp_runtime.stream_weights(self._run.trainer.model, dtype=dtype, names="model"))

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face checkpoint."""
        self._run.trainer.save(folder)
        if dist.get_rank() == 0:
            self._run.tokenizer.save_pretrained(folder)

    def leave(self) -> None:
        """Dissolve the world."""
        dist.destroy_process_group()


def _digests(weights: Iterable[tuple[str, torch.Tensor]]) -> Digests:
    return {
        name: hashlib.sha256(flatten_bucket([(name, tensor.detach())]).numpy().tobytes()).hexdigest()
        for name, tensor in weights
    }
