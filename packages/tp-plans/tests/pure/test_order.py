"""Ranks split a model in the order of its plan, so the order must not depend on how a process hashes strings."""

import os
import subprocess
import sys

SCRIPT = """
from types import SimpleNamespace as Module

from tp_plans import Plan
from tp_plans.infer.complete import complete_plan
from tp_plans.infer.sequence_parallel import with_sequence_parallelism
from tp_plans.model_tree import ModelTree


class Linear(Module):
    pass


def linear(rows, columns):
    weight = Module(shape=(rows, columns), ndim=2)
    return Linear(_parameters={"weight": weight}, in_features=columns, out_features=rows)


def norm(size):
    return type("Norm", (Module,), {})(_parameters={"weight": Module(shape=(size,), ndim=1)})


modules = {"": Module(_parameters={}, named_modules=lambda: modules.items()), "model": Module(_parameters={})}
modules["model.embed_tokens"] = Module(
    _parameters={"weight": Module(shape=(640, 64), ndim=2)}, num_embeddings=640, padding_idx=None
)
modules["model.layers"] = Module(_parameters={})
for block in range(2):
    path = f"model.layers.{block}"
    modules[path] = Module(_parameters={})
    modules[f"{path}.ln"] = norm(64)
    modules[f"{path}.attn"] = Module(_parameters={}, head_dim=16, num_key_value_groups=1, num_key_value_heads=4)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"):
        modules[f"{path}.attn.{name}"] = linear(64, 64)
    modules[f"{path}.attn.q_norm"] = norm(16)
    modules[f"{path}.odd"] = Module(_parameters={"matrix": Module(shape=(64, 64), ndim=2)})
    modules[f"{path}.odd.first"], modules[f"{path}.odd.second"] = linear(96, 64), linear(64, 64)
tree = ModelTree.of(modules[""])
plan = complete_plan(Plan({}), tree, root="model")
print(list(plan))
print(list(with_sequence_parallelism(plan, tree)))
"""


def test_every_process_writes_a_plan_in_one_order():
    def lists(seed):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = lists(1)
    assert "model.layers.*.attn.q_proj" in first
    assert lists(2) == first
    assert lists(3) == first
