"""Cases that change one field of an architecture's config, and the values that they give to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from coverage.extras import EXTRAS
from coverage.shrink import SIZES, VOCAB
from coverage.table import UNBUILDABLE, Entry, coverage_entries, text_fields

#: Fields that a forward and backward in evaluation mode does not read, by name, and ids of tokens.
_UNREAD = re.compile(
    r"_|.*(dropout|drop_rate|initializer|init_std|token_id|_tokens?|cache|version|quant|name).*|.*pdrop"
)
#: Largest number that is doubled.
_LARGEST = 4096
#: Values of enumerations that no default has.
_FURTHER = {"hidden_act": ("gelu", "relu", "silu", "gelu_pytorch_tanh"), "hidden_activation": ("silu", "relu")}


#: One case in this number is run with sequence parallelism too.
_SEQUENCE_PARALLEL = 3


@dataclass(frozen=True)
class FieldCase:
    """One row of the coverage table, a change of one field of its config, and a mode: ``"TP"`` or ``"SP"``."""

    name: str
    change: dict[str, Any]
    mode: str

    def to_json(self) -> str:
        """Return the case in one line, for ``--case``."""
        return json.dumps([self.name, self.change, self.mode])


def field_cases(random: Random, row: str = "") -> list[FieldCase]:
    """Return the cases of all rows, or of one, in random order."""
    chosen = []
    for name, entry in coverage_entries().items():
        if entry.model_type and name not in UNBUILDABLE and row in ("", name):
            for change in changes_of(entry):
                modes = ("TP", *["SP"] * (random.randrange(_SEQUENCE_PARALLEL) == 0))
                chosen += [FieldCase(name, change, mode) for mode in modes]
    random.shuffle(chosen)
    return chosen


def changes_of(entry: Entry) -> Iterator[dict[str, Any]]:
    """Yield changes of one field each, as further fields of the row's config."""
    fields = _fields(entry)
    for name, value in fields.items():
        if _is_read(name):
            yield from ({name: other} for other in other_values(name, value))
    text = fields.get("text_config")
    if isinstance(text, dict) and text.get("model_type") not in coverage_entries():
        own = {**EXTRAS.get(entry.model_type, {}).get("text_config", {}), **entry.changes.get("text_config", {})}
        for name, value in text.items():
            if _is_read(name):
                yield from ({"text_config": {**own, name: other}} for other in other_values(name, value))


def changed_field(change: Mapping[str, Any]) -> str:
    """Return the name of the field that a change is of."""
    ((name, value),) = change.items()
    return f"{name}.{list(value)[-1]}" if name == "text_config" else name


def other_values(name: str, value: Any) -> list[Any]:
    """Return other values of a field, of which some may be legal."""
    found = [each for each in _candidates(name, value) if each != value or type(each) is not type(value)]
    return [each for number, each in enumerate(found) if each not in found[:number]]


def _candidates(name: str, value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int() if name == "vocab_size":
            yield from (VOCAB + 1, 2 * VOCAB)  # the ids of the inputs stay in it
        case int():
            yield from (0, 1, value // 2, value + 1, 3 * value)
            yield from [2 * value] * (value <= _LARGEST)
            yield from [None] * (name in SIZES)
        case float():
            yield from (0.0, 1.0, value / 2, value * 2)
        case str():
            yield from (*_FURTHER.get(name, ()), *(each for each in _seen().get(name, ()) if isinstance(each, str)))
        case list() | tuple() if value and name.endswith("_config") is False:
            yield from (list(reversed(value)), [value[0]] * len(value), [value[-1]] * len(value))
        case dict() if name.startswith("rope"):
            for field, each in value.items():
                yield from ({**value, field: other} for other in other_values(field, each))
        case None:
            yield from (SIZES[name],) if name in SIZES else _seen().get(name, ())[:3]


def _fields(entry: Entry) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[entry.model_type](**text_fields(entry.model_type, entry.changes))
    fields: dict[str, Any] = config.to_dict()
    return fields


def _is_read(name: str) -> bool:
    return not _UNREAD.fullmatch(name) and (name == "tie_word_embeddings" or name not in _common())


@cache
def _common() -> frozenset[str]:
    """Return the fields that every config has."""
    from transformers import PretrainedConfig

    return frozenset(PretrainedConfig().to_dict()) | {"sub_configs", "auto_map"}


@cache
def _seen() -> Mapping[str, tuple[Any, ...]]:
    """Return the strings, numbers and flags that fields of each name have in any architecture."""
    seen: dict[str, dict[Any, None]] = {}
    for entry in coverage_entries().values():
        for name, value in _fields(entry).items() if entry.model_type else ():
            if isinstance(value, (str, bool, int, float)):
                seen.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in seen.items()}
