"""Classes that inference knows by name, beside the rows of ``hugging_face.overrides``; each with the reason."""

from __future__ import annotations

#: Inner models whose activations cannot be sharded on the sequence between blocks, with the reason.
NO_SEQUENCE_PARALLELISM: dict[str, str] = {
    "EvollaModel": "its blocks attend to features of a protein encoder, which is part of the decoder",
    "Gemma3nTextModel": "its blocks pass on several streams, stacked before the batch",
    "HrmTextModel": "its blocks sit in two stacks that run in turns and add learned states to the stream",
    "Inkling2LoopTextModel": "its blocks read the outputs of all blocks before, collected outside of them",
    "Inkling2TextModel": "its blocks read the outputs of all blocks before, collected outside of them",
}

#: Classes whose indices from the number of experts on stand for experts that return their input.
EXPERTS_WITH_IDENTITIES = ("LongcatFlashExperts",)
