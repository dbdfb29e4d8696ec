"""The warm-up: supervised steps on the task's text, through the same sharded path as the GRPO steps."""

from batch import Sample, chunks, collate, padded_length
from run import Run, scheduled
from task import draw_questions, warmup_answer

import rl_logprobs


def warm_up(run: Run) -> None:
    """Teach the policy what the text of the task looks like."""
    settings = run.settings
    run.trainer.reset_optimizer()
    with run.report.progress("warm-up", settings.warmup_steps) as bar:
        for step in range(settings.warmup_steps):
            lr = scheduled(settings.warmup_lr, step, settings.warmup_steps)
            loss = _supervised_step(run, lr)
            bar.advance(f"loss {loss:.3f}")


def _supervised_step(run: Run, lr: float) -> float:
    """One step of cross entropy on fresh text; returns this rank's loss."""
    samples = _draw_text(run, run.settings.warmup_batch)
    mine = chunks(samples, run.dp_size)[run.dp_rank]
    batch = collate(mine, padded_length(samples), run.tokenizer.pad_token_id, run.device)
    weights = rl_logprobs.mean_weights(batch.mask, mesh=run.mesh)
    loss = rl_logprobs.global_mean(-run.trainer.logprobs(batch), batch.mask, weights)
    run.trainer.step(loss, lr, run.settings.max_grad_norm)
    return loss.item()


def _draw_text(run: Run, count: int) -> list[Sample]:
    """Training questions with the answers of the warm-up text; the same on every rank."""
    tokenizer = run.tokenizer
    questions = draw_questions(count, run.questions, held_out=False)
    prompts = tokenizer([question.prompt for question in questions])["input_ids"]
    answers = tokenizer([warmup_answer(question, run.questions) for question in questions], add_special_tokens=False)[
        "input_ids"
    ]
    return [
        Sample(prompt, [*answer, tokenizer.eos_token_id], []) for prompt, answer in zip(prompts, answers, strict=True)
    ]
