"""The example of every public docstring runs as written, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import rl_logprobs
from rl_logprobs import nemo

PUBLIC = {name: getattr(rl_logprobs, name) for name in rl_logprobs.__all__}
PUBLIC |= {name: value for name, value in vars(nemo).items() if getattr(value, "__module__", None) == nemo.__name__}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(rl_logprobs.__path__, "rl_logprobs.")
    if "triton" not in module.name  # optional
]
ERRORS = [name for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - set(ERRORS)))
def test_every_public_name_has_an_example(name):
    assert ">>>" in inspect.getdoc(PUBLIC[name])


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_run_as_written(module):
    found = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert found.failed == 0
