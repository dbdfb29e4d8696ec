"""What this repository takes from vLLM's weight transfer, as data, and whether a release still has it.

python -m with_vllm.interface FOLDER [RELEASE]: FOLDER holds vLLM's sources, unpacked from a wheel or installed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_TRANSFER = "distributed/weight_transfer/"

#: Parameters by file and by what is called, of the releases that are supported.
_BOTH: dict[str, str] = {
    f"{_TRANSFER}base.py:TrainerWeightTransferEngine.trainer_init": "cls, init_info, *, client, source",
    f"{_TRANSFER}base.py:TrainerWeightTransferEngine.send_weights": "self",
    f"{_TRANSFER}base.py:TrainerWeightTransferEngine.shutdown": "self",
    f"{_TRANSFER}base.py:VLLMWeightSyncClient.init_weight_transfer_engine": "self, init_info",
    f"{_TRANSFER}base.py:VLLMWeightSyncClient.start_weight_update": "self",
    f"{_TRANSFER}base.py:VLLMWeightSyncClient.update_weights": "self, update_info",
    f"{_TRANSFER}base.py:VLLMWeightSyncClient.finish_weight_update": "self, weight_version",
    f"{_TRANSFER}clients.py:HTTPVLLMWeightSyncClient.__init__": "self, base_url, timeout",
    f"{_TRANSFER}factory.py:WeightTransferTrainerFactory.trainer_init": "cls, init_info, *, client, source",
    f"{_TRANSFER}nccl_engine.py:NCCLTrainerInitInfo": "master_address, master_port, world_size",
}
FACTS: dict[str, dict[str, str]] = {
    "0.32": {
        **_BOTH,
        f"{_TRANSFER}base.py:WeightSource.metadata": "self",
        f"{_TRANSFER}base.py:WeightSource.__iter__": "self",
        f"{_TRANSFER}base.py:ParamMeta": "name, dtype, shape",
    },
    "0.33": {
        **_BOTH,
        f"{_TRANSFER}base.py:WeightSource.metadata": "self",
        f"{_TRANSFER}base.py:WeightSource.iter_full": "self",
        f"{_TRANSFER}base.py:WeightSource.iter_local": "self",
        f"{_TRANSFER}base.py:WeightSource.implements_iter_full": "self",
        f"{_TRANSFER}base.py:WeightSource.implements_iter_local": "self",
        f"{_TRANSFER}base.py:ParamMeta": "name, dtype, shape, owners, mesh_shape, placements",
    },
}
#: The routes that a client calls, by method: most of the server's development mode; then four for TRL's
#: asynchronous trainer and its rollout worker, and two for adapters.
ROUTES = {
    *("GET /weight_info", "GET /is_paused", "GET /get_world_size", "POST /pause", "POST /resume"),
    *("POST /init_weight_transfer_engine", "POST /shutdown_weight_transfer_engine", "POST /start_weight_update"),
    *("POST /update_weights", "POST /finish_weight_update", "POST /update_weight_version"),
    *("GET /health", "GET /v1/models", "GET /server_info", "POST /v1/completions"),
    *("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"),
}


def differences(folder: Path, facts: Mapping[str, str]) -> list[str]:
    """Return what the sources in a folder, that of the package or above it, have otherwise."""
    root = folder / "vllm" if (folder / "vllm").is_dir() else folder
    found: dict[str, str] = {}
    for name in {fact.partition(":")[0] for fact in facts}:
        if (root / name).exists():
            found |= {f"{name}:{key}": text for key, text in _parameters(ast.parse((root / name).read_text()))}
    wrong = [
        f"{fact}: ({found.get(fact)}), not ({text})" for fact, text in facts.items() if not _has(found.get(fact), text)
    ]
    routes = set(_routes(root / "entrypoints"))
    return [*wrong, *(f"no route {route}" for route in sorted(ROUTES - routes))]


def _has(found: str | None, wanted: str) -> bool:
    """A dataclass may have more fields after those that are given."""
    return found is not None and (found == wanted or found.startswith(wanted + ", "))


def _parameters(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        fields = [n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        yield cls.name, ", ".join(name for name in fields if name != "backend")
        for function in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
            named = [argument.arg for argument in function.args.args]
            only = [argument.arg for argument in function.args.kwonlyargs]
            yield f"{cls.name}.{function.name}", ", ".join([*named, *(["*", *only] if only else [])])


def _routes(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "post")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield f"{node.func.attr.upper()} {node.args[0].value}"


def main(folder: str, release: str = "0.33") -> int:
    """Print what is otherwise; 1 if anything is."""
    wrong = differences(Path(folder), FACTS[release])
    sys.stdout.writelines(f"{line}\n" for line in wrong or [f"vLLM {release}: as it was"])
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
