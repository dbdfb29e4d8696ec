import subprocess
import sys

import pytest


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


def test_importing_the_package_loads_nothing_but_the_standard_library():
    loaded = modules_after("import tp_plans") - modules_after("pass")
    assert loaded - sys.stdlib_module_names == {"tp_plans"}


def test_importing_the_package_leaves_the_costly_parts_of_the_standard_library_out():
    costly = {"asyncio", "concurrent", "email", "http", "inspect", "multiprocessing", "socket", "unittest", "xml"}
    assert not costly & (modules_after("import tp_plans") - modules_after("import dataclasses, logging"))
