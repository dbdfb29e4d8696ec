"""The task: put a word's digits into ascending order. Its prompts, its warm-up text and its reward.

A prompt is ``order 4027 =`` and its one right answer `` 0247``. The warm-up text is a mixed bag, as text found in
the wild is: after the same prompt some writers put the digits in ascending order, some in descending order, and some
leave them as they stand. A model that learned from it can do all three and cannot know which one is wanted; only the
reward says so. That is the gap between "can" and "does" that reinforcement learning closes.
"""

import random
import zlib
from dataclasses import dataclass

LENGTHS = (3, 4, 5)
"""The numbers of digits that a question may have."""

HELD_OUT_ONE_IN = 8
"""One answer in so many is held out."""

ASCENDING_TEXTS = 0.4
"""The share of the warm-up text that is in ascending order; the other two habits have half of the rest each."""


@dataclass(frozen=True)
class Question:
    """A run of digits to be put into order.

    Attributes:
        digits: The digits as they stand, for example ``"4027"``.
    """

    digits: str

    @property
    def prompt(self) -> str:
        """The text that the model is given."""
        return f"order {self.digits} ="

    @property
    def answer(self) -> str:
        """The text that the model should add."""
        return " " + "".join(sorted(self.digits))

    @property
    def held_out(self) -> bool:
        """Whether no training prompt asks this, decided by the answer alone and the same on every machine.

        All orders of the same digits fall on the same side, so a held-out answer too is never seen in training.
        """
        return zlib.crc32(self.answer.encode()) % HELD_OUT_ONE_IN == 0


def draw_questions(count: int, rng: random.Random, *, held_out: bool) -> list[Question]:
    """Draw random questions from one side of the split.

    Args:
        count: How many to draw; the same question may come twice.
        rng: The source of randomness; the same state draws the same questions.
        held_out: Which side of the split to draw from.

    Returns:
        The questions, in the order in which they were drawn.
    """
    questions: list[Question] = []
    while len(questions) < count:
        question = Question("".join(rng.choices("0123456789", k=rng.choice(LENGTHS))))
        if question.held_out == held_out:
            questions.append(question)
    return questions


def warmup_answer(question: Question, rng: random.Random) -> str:
    """What one of the writers of the warm-up text puts behind a question's prompt."""
    if rng.random() < ASCENDING_TEXTS:
        return question.answer
    return rng.choice([f" {question.digits}", f" {''.join(sorted(question.digits, reverse=True))}"])


def reward(question: Question, completion: str) -> float:
    """One for exactly the answer, zero for anything else; there is no partial credit."""
    return float(completion == question.answer)
