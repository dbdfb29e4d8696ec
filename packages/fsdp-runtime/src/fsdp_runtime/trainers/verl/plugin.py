"""The module that verl imports at start: it registers the engines and config groups.

A plug-in that fails is logged by verl at DEBUG and left out, and the user sees only
"Unknown backend: fsdp_runtime"; ``VERL_USE_EXTERNAL_MODULES=fsdp_runtime.trainers.verl.plugin`` shows the error.
"""

from __future__ import annotations

from fsdp_runtime.trainers.verl.config_groups import store_groups
from fsdp_runtime.trainers.verl.engine import LanguageModelEngine, ValueModelEngine
from fsdp_runtime.trainers.verl.verl_api import EngineRegistry

#: Kinds of devices that the engine runs on.
DEVICES = ("cuda", "cpu")

EngineRegistry.register(model_type="language_model", backend="fsdp_runtime", device=[*DEVICES])(LanguageModelEngine)
EngineRegistry.register(model_type="value_model", backend="fsdp_runtime", device=[*DEVICES])(ValueModelEngine)
store_groups()
