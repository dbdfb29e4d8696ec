import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest


@cache
def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after one statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return set(printed.split())


@pytest.mark.parametrize("heavy", ["torch", "transformers", "safetensors", "numpy"])
def test_importing_the_package_leaves_heavy_modules_out(heavy):
    loaded = modules_after("import tp_plans")
    assert "tp_plans" in loaded
    assert heavy not in loaded


def test_touching_every_public_name_leaves_torch_out():
    loaded = modules_after("import tp_plans; [getattr(tp_plans, name) for name in tp_plans.__all__]")
    assert "torch" not in loaded


def test_to_torch_without_torch_names_the_extra_that_installs_it():
    script = (
        "import sys; sys.modules['torch'] = None\nimport tp_plans\nplan = tp_plans.plan_for('llama')\n"
        "try: plan.to_torch()\nexcept ImportError as error: print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed == "Plan.to_torch needs torch: pip install 'tp-plans[torch]'\n"


def test_importing_the_package_loads_nothing_but_the_standard_library():
    loaded = modules_after("import tp_plans") - modules_after("pass")
    assert loaded - sys.stdlib_module_names == {"tp_plans"}


def test_importing_the_package_leaves_the_costly_parts_of_the_standard_library_out():
    costly = {"asyncio", "concurrent", "email", "http", "inspect", "multiprocessing", "socket", "unittest", "xml"}
    assert not costly & (modules_after("import tp_plans") - modules_after("import dataclasses, logging"))


def test_importing_the_package_reads_one_file_only():
    """What is public is fetched at the first use of a name."""
    script = "import sys, tp_plans; print(*(name for name in sys.modules if name.startswith('tp_plans.')))"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout.split() == []


@pytest.mark.parametrize("first", ["import tp_plans.checks", "import tp_plans.models", "import tp_plans.cli"])
def test_a_public_name_is_the_same_whatever_was_imported_before(first):
    script = f"{first}; import tp_plans; print(all(map(callable, (tp_plans.check, tp_plans.architectures))))"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "True"


ONE_BY_ONE = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "tp_plans"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def test_any_module_can_be_imported_first():
    import tp_plans

    folder = Path(tp_plans.__file__).parent
    paths = [path.relative_to(folder.parent).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.stem != "__main__"]
    without_torch = [name for name in names if name.split(".")[1:2] not in (["torch_styles"], ["verification"])]
    done = subprocess.run([sys.executable, "-c", ONE_BY_ONE, *without_torch], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_public_name_is_also_a_module():
    """A module would take the name's place once it is imported."""
    import tp_plans

    modules = {path.stem for path in Path(tp_plans.__file__).parent.iterdir()}
    assert modules & set(tp_plans.__all__) == set()


def test_all_public_names_are_listed_and_no_other_is_found():
    import tp_plans

    assert set(tp_plans.__all__) <= set(dir(tp_plans))
    assert tp_plans.__all__ == sorted(tp_plans.__all__)
    with pytest.raises(AttributeError, match="module 'tp_plans' has no attribute 'nothing'"):
        tp_plans.nothing  # noqa: B018
