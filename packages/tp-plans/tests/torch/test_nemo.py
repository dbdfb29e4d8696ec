"""NeMo RL's names: their signatures, and what they return."""

import inspect

import pytest
from torch.distributed.tensor.parallel import ParallelStyle

from harness.models import tiny_model
from tp_plans import nemo
from tp_plans.errors import UnknownStyleError
from tp_plans.hugging_face.translate import from_hugging_face


@pytest.mark.parametrize(
    ("function", "names"), [(nemo.get_hf_tp_plan, ["model"]), (nemo.translate_parallel_style, ["style"])]
)
def test_signatures_are_those_of_nemo_rl(function, names):
    assert list(inspect.signature(function).parameters) == names


def test_the_shipped_plan_comes_as_styles_of_torch_by_module():
    model = tiny_model("Qwen3ForCausalLM")
    plan = nemo.get_hf_tp_plan(model)
    assert list(plan) == list(from_hugging_face(model).to_torch())
    assert all(isinstance(style, ParallelStyle) for style in plan.values())


@pytest.mark.parametrize("word", ["colwise", "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel"])
def test_the_originals_words_are_known(word):
    assert isinstance(nemo.translate_parallel_style(word), ParallelStyle)


def test_an_unknown_word_is_refused():
    with pytest.raises(UnknownStyleError, match="columnwise"):
        nemo.translate_parallel_style("columnwise")
