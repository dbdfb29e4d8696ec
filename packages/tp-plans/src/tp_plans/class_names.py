"""Classes that inference knows by name, beside the rows of ``hugging_face.overrides``; each with the reason."""

from __future__ import annotations

#: Inner models that cannot shard activations on the sequence between blocks, with the reason.
NO_SEQUENCE_PARALLELISM: dict[str, str] = {
    "EvollaModel": "its blocks attend to features of a protein encoder, which is part of the decoder",
    "Gemma3nTextModel": "its blocks pass on several streams, stacked before the batch",
    "HrmTextModel": "its blocks sit in two stacks that run in turns and add learned states to the stream",
    "Inkling2LoopTextModel": "its blocks read the outputs of all blocks before, collected outside of them",
    "Inkling2TextModel": "its blocks read the outputs of all blocks before, collected outside of them",
}

#: Classes with identity experts: an index at or above the number of experts returns the input.
EXPERTS_WITH_IDENTITIES = ("LongcatFlashExperts",)
