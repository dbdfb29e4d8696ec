"""The code of the documentation runs, and every command that it names exists."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import fsdp_runtime
import rl_logprobs
import tp_plans
from fsdp_runtime import cli as fsdp_runtime_cli
from fsdp_runtime import nemo as fsdp_runtime_nemo
from fsdp_runtime.gpu_check import __main__ as gpu_check
from harness import pages
from harness.models import tiny_model
from rl_logprobs import nemo as rl_logprobs_nemo
from tp_plans import cli as tp_plans_cli
from tp_plans import nemo as tp_plans_nemo

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_CODE = [page for page in PAGES if pages.parts(page)]
#: Pages with code that takes long; other tests run every function that they show.
LONG = {
    "guides/compile.md",
    "guides/dry-run.md",
    "guides/expert-parallelism.md",
    "guides/logprobs.md",
    "guides/other-models.md",
    "migration/nemo-rl.md",
    "migration/torchtitan.md",
    "migration/transformers.md",
}
NOX_SESSIONS = {
    node.name for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
}


def _name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``checkpoint`` of the pages: a tiny real one."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("Qwen3ForCausalLM").float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if _name(page) in LONG else page for page in WITH_CODE],
    ids=_name,
)
def test_code_of_a_page_runs_and_prints_its_comments(
    page: Path, checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = {"__name__": "page", "checkpoint": str(checkpoint)}
    for part in pages.parts(page):
        if part.ranks:
            pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[part.ranks])
            assert pool.run(pages.run_part, part, names, tmp_path) == [[]] * part.ranks
        else:
            assert pages.run_part(part, names, tmp_path) == []


def _commands(page: Path) -> Iterator[list[str]]:
    for block in pages.blocks(page, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_of_a_page_exist(page: Path, checkpoint: Path) -> None:
    for words in _commands(page):
        words = [str(checkpoint) if word == "CHECKPOINT" else word for word in words]
        fault = _fault(words, page.read_text())
        assert fault is None, f"{shlex.join(words)}: {fault}"


def _fault(words: list[str], page: str) -> str | None:
    """Return the reason why a command of a page cannot run, or ``None``."""
    while words and ("=" in words[0] or words[0] in ("export", "srun", "python3", "python", "-m")):
        words = words[1:]
    match words:
        case []:
            return None
        case ["nox", *options]:
            named = [name for flag, name in pairwise(options) if flag == "-s"]
            return next((f"no session {name}" for name in named if name not in NOX_SESSIONS), None)
        case ["pip", "install", *requirements]:
            return next((fault for name in requirements if (fault := _missing_extra(name))), None)
        case ["tp-plans", *arguments]:
            code = tp_plans_cli.main(arguments)
            return f"exit code {code}" if code == tp_plans_cli.FAILED else None
        case ["fsdp-runtime", *arguments]:
            with contextlib.suppress(SystemExit):
                fsdp_runtime_cli.parser().parse_args(arguments)
                return None
            return "it has no such options"
        case ["fsdp_runtime.gpu_check", *arguments]:
            with contextlib.suppress(SystemExit):
                gpu_check.parser().parse_args(arguments)
                return None
            return "it has no such options"
        case ["vllm.entrypoints.openai.api_server", *_]:  # not installed here
            return None
        case [*_] if any(word.startswith("verl.trainer.") for word in words):  # composed beside verl: nox -s verl
            return None
        case ["torchrun" | "sbatch" | "bash", *arguments]:
            script = next(word for word in arguments if word.endswith((".py", ".sh", ".sbatch")))
            return None if (ROOT / script).exists() or f"`{script}`" in page else f"there is no {script}"
        case [script, *_] if script.endswith(".py"):
            return None if (ROOT / script).exists() or f"`{script}`" in page else f"there is no {script}"
    return "the test knows no such command"


def _missing_extra(requirement: str) -> str | None:
    """Return a message if an extra of a package, as in ``fsdp-runtime[transformers]``, is missing."""
    match = re.fullmatch(r"(?:\./packages/)?([a-z-]+)\[([a-z-]+)\]", requirement)
    if match is None or not (ROOT / "packages" / match[1]).exists():
        return None
    project = tomllib.loads((ROOT / "packages" / match[1] / "pyproject.toml").read_text())["project"]
    return None if match[2] in project["optional-dependencies"] else f"{match[1]} has no extra {match[2]}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_json_of_a_page_is_json(page: Path) -> None:
    for block in pages.blocks(page, "json"):
        json.loads(block.text)


@pytest.mark.parametrize("package", [tp_plans, fsdp_runtime, rl_logprobs], ids=lambda package: package.__name__)
def test_reference_has_every_public_name(package: object) -> None:
    name = str(package.__name__)  # type: ignore[attr-defined]
    page = (DOCS / "reference" / f"{name.replace('_', '-')}.md").read_text()
    shown = {path.rpartition(".")[2] for path in re.findall(rf"^::: ({name}\.[\w.]+)$", page, flags=re.MULTILINE)}
    public = set(package.__all__) - {"Layout", "Style"}  # type: ignore[attr-defined]  # unions of classes on the page
    assert public - shown == set()


def test_navigation_has_every_page() -> None:
    named = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in PAGES} - named == set()


@pytest.mark.parametrize(
    "module", [tp_plans_nemo, fsdp_runtime_nemo, rl_logprobs_nemo], ids=lambda module: module.__name__
)
def test_migration_pages_name_every_function_that_keeps_its_name(module: ModuleType) -> None:
    pages_from_nemo = "".join((DOCS / "migration" / name).read_text() for name in ("nemo-rl.md", "automodel.md"))
    kept = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    missing = [name for name in kept if f"`{name}`" not in pages_from_nemo and f".{name}`" not in pages_from_nemo]
    of_the_seeds = {"_parallelize_model", "_get_parallel_plan"}  # other private names are helpers
    assert {name for name in missing if not name.startswith("_") or name in of_the_seeds} == set()
