"""``fsdp-runtime verl-check``: report whether verl finds this engine, one line per finding.

verl logs a plug-in that fails to import at DEBUG and goes on; its user then reads "Unknown backend: fsdp_runtime".  The
check imports verl as a run does, asks its registries, and imports missing modules again, to show the error.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest.mock import patch

GROUP, NAME, PLUGIN = "verl.plugins", "fsdp_runtime", "fsdp_runtime.trainers.verl.plugin"
#: Tested verl versions: from the first, below the second.
TESTED = ("0.9.1", "0.10")
#: Packages that verl 0.9.1 imports but does not require, with the part that fails without each.
_NEEDED = {
    "ray": "import verl",
    "peft": "import verl.workers.engine",
    "uvicorn": "verl.trainer.sft_trainer",
    "fastapi": "verl.trainer.sft_trainer",
    "TransferQueue": "verl.trainer.main_ppo",
    "cachetools": "verl.trainer.main_ppo",
    "rl-logprobs": "the engine",
}


class CheckLine(NamedTuple):
    """One line of the report."""

    level: str  # ``ok``, ``warning`` or ``error``
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8}{self.text}"


def check() -> Iterator[CheckLine]:
    """Yield findings in the order of their dependencies; stop at the first finding that prevents the next."""
    if (installed := _version("verl")) is None:
        yield CheckLine("error", "verl is not installed: pip install 'fsdp-runtime[verl]'")
        return
    from packaging.version import Version  # a requirement of verl

    release = Version(installed)
    tested = Version(TESTED[0]) <= release < Version(TESTED[1])
    wanted = f"tested with {TESTED[0]} and later, below {TESTED[1]}"
    yield CheckLine("ok" if tested else "warning", f"verl {release}, {wanted}")
    missing = [name for name in _NEEDED if _version(name) is None]
    for name in missing:
        yield CheckLine("error", f"{name} is not installed, and {_NEEDED[name]} needs it: pip install {name}")
    if error := _import_error("verl"):
        yield CheckLine("error", f"import verl fails: {error}")
        return
    yield from _plugins()
    if not missing and not (error := _import_error(PLUGIN)):
        yield from _registered()
        yield from _interface()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _import_error(module: str) -> str:
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001  # a plug-in may fail in any way; its error is the finding
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _plugins() -> Iterator[CheckLine]:
    """Import every plug-in of verl again: a failing plug-in fails again, with its error."""
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    names = [name.strip() for name in policy.split(",")]
    plugins = list(entry_points(group=GROUP))
    if NAME not in {each.name for each in plugins}:
        yield CheckLine("error", f"no entry point {NAME} in {GROUP}: install fsdp-runtime again")
    for each in plugins:
        if policy == "none" or (policy != "auto" and each.name not in names):
            level = "error" if each.name == NAME else "warning"
            yield CheckLine(level, f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves out {each.name}")
        elif error := _import_error(each.value.partition(":")[0]):
            yield CheckLine("error", f"plug-in {each.name} ({each.value}) fails, which verl does not say: {error}")
        else:
            yield CheckLine("ok", f"plug-in {each.name} ({each.value})")


def _registered() -> Iterator[CheckLine]:
    """The engine of each kind of model on this machine's device, and the config groups."""
    import torch
    from hydra.core.config_store import ConfigStore
    from verl.utils.device import get_device_name

    for kind in ("language_model", "value_model"):
        devices = [device for device in ("cuda", "cpu") if _has_engine(kind, device)]
        registered = ", ".join(devices) or "not registered"
        yield CheckLine("ok" if devices else "error", f"engine {NAME} of a {kind}: {registered}")
    store = ConfigStore.instance()
    for group in ("engine", "model_engine", "actor", "ref", "critic"):
        name = NAME if "engine" in group else f"{NAME}_{group}"
        if f"{name}.yaml" not in store.list(group):
            yield CheckLine("error", f"config group {group} has no {name}")
    if (device := get_device_name()) == "cuda" and not torch.cuda.is_available():
        machine = "verl takes this machine for one with cuda, and there is none"
        yield CheckLine("warning", f"{machine}: docs/examples/verl runs on the CPU")
    else:
        yield CheckLine("ok", f"verl runs on {device}")


def _has_engine(kind: str, device: str) -> bool:
    from verl.workers.engine.base import EngineRegistry

    # verl's registry uses the variable instead of this machine's device.
    with patch.dict(os.environ, VERL_ENGINE_DEVICE=device), suppress(AssertionError, ValueError):
        return bool(EngineRegistry.get_engine_cls(kind, NAME))
    return False


def _interface() -> Iterator[CheckLine]:
    """The verl functions that the engine uses, and flags of this verl that the engine does not know."""
    from fsdp_runtime.trainers.verl.engine import FsdpRuntimeEngine
    from fsdp_runtime.trainers.verl.flags import unknown_fields
    from fsdp_runtime.trainers.verl.verl_api import SIGNATURES, BaseEngine

    for path, parameters in SIGNATURES.items():
        if (now := _parameters(path)) != parameters:
            yield CheckLine("error", f"{path} takes ({', '.join(now)}), not ({', '.join(parameters)})")
    for name, method in inspect.getmembers(BaseEngine, inspect.isfunction):
        theirs, ours = (_names(function) for function in (method, getattr(FsdpRuntimeEngine, name)))
        if theirs != tuple(name for name in ours if name in theirs):
            yield CheckLine("error", f"BaseEngine.{name} takes ({', '.join(theirs)}), not ({', '.join(ours)})")
    for field in unknown_fields():
        yield CheckLine("warning", f"{field} is not known here, so that nothing reads it: leave it at its default")


def _parameters(path: str) -> tuple[str, ...]:
    try:
        return _names(resolve_name(path))
    except (ImportError, AttributeError):
        return ("nothing: it is gone",)


def _names(function: Any) -> tuple[str, ...]:
    stars: dict[Any, str] = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
    return tuple(stars.get(each.kind, "") + name for name, each in inspect.signature(function).parameters.items())
