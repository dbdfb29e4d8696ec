"""Models that answer as ``torch.nn.Module`` does, as far as plans are checked, explained and suggested."""

from math import prod
from types import SimpleNamespace


class Module:
    """Answers as a ``torch.nn.Module`` does, as far as ``check`` asks."""

    def __init__(self, *, attributes=None, parameters=None, **children):
        self.__dict__.update(attributes or {})
        self._parameters = parameters or {}
        self.children = children

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{name}".lstrip("."))


def tensor(*shape, itemsize=4):
    return SimpleNamespace(shape=shape, ndim=len(shape), nbytes=prod(shape) * itemsize)


class Linear(Module):
    def __init__(self, out, inner, *, weight=None):
        super().__init__(parameters={"weight": weight or tensor(out, inner), "bias": tensor(out)})


class Embedding(Module):
    def __init__(self, rows, width, **attributes):
        super().__init__(parameters={"weight": tensor(rows, width)}, attributes=attributes)


class Norm(Module):
    def __init__(self, width):
        super().__init__(parameters={"weight": tensor(width)})


def decoder(*, heads=4, kv_heads=2, head_dim=8, hidden=32, inner=96, vocab=131, layers=2, tied=False):
    config = SimpleNamespace(num_key_value_heads=kv_heads)

    def block():
        return Module(
            input_layernorm=Norm(hidden),
            post_attention_layernorm=Norm(hidden),
            self_attn=Module(
                attributes={"head_dim": head_dim, "num_key_value_groups": heads // kv_heads, "config": config},
                q_proj=Linear(heads * head_dim, hidden),
                k_proj=Linear(kv_heads * head_dim, hidden),
                v_proj=Linear(kv_heads * head_dim, hidden),
                o_proj=Linear(hidden, heads * head_dim),
            ),
            mlp=Module(gate_proj=Linear(inner, hidden), up_proj=Linear(inner, hidden), down_proj=Linear(hidden, inner)),
        )

    embedding = Embedding(vocab, hidden)
    head = Linear(vocab, hidden, weight=embedding._parameters["weight"] if tied else None)
    blocks = Module(**{str(index): block() for index in range(layers)})
    return Module(model=Module(embed_tokens=embedding, layers=blocks, norm=Norm(hidden)), lm_head=head)
