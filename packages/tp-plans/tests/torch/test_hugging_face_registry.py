"""Our table of style words beside the registry of the installed transformers: a new release's new word is told here."""

import importlib

import pytest

from tp_plans.errors import UnknownStyleError
from tp_plans.styles.words import IGNORED_STYLES, STYLE_BY_NAME, parameter_style_from_name

#: Who fills the registry, which is empty before they are imported; not every release has both.
FILLED_BY = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")


def registered():
    for name in FILLED_BY:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    return set(ALL_PARALLEL_STYLES.keys())


def is_known(word):
    if word in STYLE_BY_NAME or word in IGNORED_STYLES:
        return True
    try:
        return parameter_style_from_name(word, 3) is not None
    except UnknownStyleError:
        return False


def test_every_word_of_the_installed_registry_is_translated():
    words = registered()
    assert words >= {"colwise", "rowwise"}
    assert {word for word in words if not is_known(word)} == set()


def test_every_word_that_a_shipped_plan_uses_is_translated():
    """The plans on the classes of configs, of models with several inner configs too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    used = {}
    types = {"llama", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_moe", "gemma4_text", "longcat_flash"}
    for model_type in types & set(CONFIG_MAPPING):  # older releases lack one
        for name in ("base_model_tp_plan", "base_model_ep_plan"):
            for pattern, word in (getattr(CONFIG_MAPPING[model_type], name, None) or {}).items():
                used[word] = f"{model_type}: {pattern}"
    assert {place: word for word, place in used.items() if not is_known(word)} == {}


@pytest.mark.parametrize("word", ["colwise_of_tomorrow"])
def test_registry_test_names_a_new_word(word):
    assert not is_known(word)
