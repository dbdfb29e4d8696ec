"""Sub-layers that a plan leaves whole and whose parts are all known: split column-wise in, row-wise out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tp_plans._validate import is_integer
from tp_plans.completion.tree import HEAD_NORMS, Tree, agreed, parameters_of, size_of
from tp_plans.styles import ColwiseParallel, MLAKVProjection, NoParallel, RowwiseParallel, Style

OUTPUTS = ("o_proj", "out_proj", "dense")
OUTPUT_GATES = ("gate_proj", "g_proj")
GATED_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
FUSED_MLPS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
PLAIN_MLPS = (("fc1", "fc2"), ("up_proj", "down_proj"), ("c_fc", "c_proj"))
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LATENT_QUERY = ("q_a_proj", "q_a_layernorm", "q_b_proj", "q_proj")


def split_sublayers(tree: Tree) -> Mapping[str, Style]:
    """Rules for the sub-layers of which the plan says nothing."""
    return agreed(_split(tree), tree)


def _split(tree: Tree) -> Iterator[tuple[str, Style]]:
    for path, module in tree.inside():
        names = tree.filled(path)
        if len(names) < 2 or parameters_of(module) or not tree.untouched(path, names):
            continue
        for rules in (_attention, _latent_attention, _mlp):
            yield from ((f"{path}.{name}", style) for name, style in rules(path, module, names, tree).items())


def _attention(path: str, module: Any, names: set[str], tree: Tree) -> dict[str, Style]:
    """Query, key and value in heads, norms over one head each, a gate as wide as the queries."""
    output = next((name for name in OUTPUTS if name in names), "")
    head = getattr(module, "head_dim", None)
    if not output or not {"q_proj", "k_proj", "v_proj"} <= names or not is_integer(head, least=1):
        return {}
    width = {name: size_of(tree.module(path, name), 0) for name in names}
    columns = {"q_proj", "k_proj", "v_proj", *(name for name in OUTPUT_GATES if width.get(name) == width["q_proj"])}
    norms = {name for name in names & set(HEAD_NORMS) if _length(tree.module(path, name)) == head}
    whole_heads = all((width[name] or 1) % head == 0 for name in columns)
    fits = size_of(tree.module(path, output), 1) == width["q_proj"]
    if not (whole_heads and fits) or names != columns | norms | {output}:
        return {}
    return {
        **dict.fromkeys(sorted(columns), ColwiseParallel()),
        **dict.fromkeys(sorted(norms), NoParallel(gradient="partial")),
        output: RowwiseParallel(),
    }


def _latent_attention(path: str, module: Any, names: set[str], tree: Tree) -> dict[str, Style]:
    """Multi-head latent attention with DeepSeek's names."""
    queries = {"q_b_proj", "q_proj"} & names
    known = {*LATENT, *LATENT_QUERY, "kv_a_layernorm"}
    numbers = all(is_integer(getattr(module, name, None), least=1) for name in ("num_heads", "qk_rope_head_dim"))
    if not (set(LATENT) <= names <= known and len(queries) == 1 and numbers):
        return {}
    return {
        queries.pop(): ColwiseParallel(),
        "kv_a_proj_with_mqa": MLAKVProjection(),
        "kv_b_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel(),
    }


def _mlp(path: str, module: Any, names: set[str], tree: Tree) -> dict[str, Style]:
    """A gated, fused or plain MLP: every other thing in it works on single features."""
    for *columns, row in (*GATED_MLPS, *FUSED_MLPS, *PLAIN_MLPS):
        if names != {*columns, row}:
            continue
        widths = {size_of(tree.module(path, name), 0) for name in columns}
        inner = size_of(tree.module(path, row), 1)
        if widths == {inner}:
            return {**dict.fromkeys(columns, ColwiseParallel()), row: RowwiseParallel()}
        if inner is not None and widths == {2 * inner}:
            return {**dict.fromkeys(columns, ColwiseParallel(fused_sizes=(1, 1))), row: RowwiseParallel()}
    return {}


def _length(norm: Any) -> int | None:
    sizes = {tuple(parameter.shape) for parameter in parameters_of(norm).values()}
    return int(next(iter(sizes))[0]) if len(sizes) == 1 and len(next(iter(sizes))) == 1 else None
