"""Models with several stacks of blocks that embed tokens: an encoder and a decoder."""

from __future__ import annotations

from tp_plans.model_tree import ModelTree, join, parent


def token_streams(tree: ModelTree) -> tuple[str, ...]:
    """Return the modules that each hold a token embedding and blocks; none if the model has one stream."""
    table = tree.shape(tree.embedding) if tree.embedding else None
    holders = dict.fromkeys(parent(stack) for stack in tree.stacks)
    streams = tuple(
        path
        for path in holders
        if path and any(tree.is_embedding(child) and tree.shape(child) == table for child in tree.children[path])
    )
    return streams if len(streams) > 1 else ()


def token_blocks(tree: ModelTree) -> tuple[str, ...]:
    """Return the blocks of all streams of tokens; the decoder's if there is one stream."""
    streams = token_streams(tree)
    stacks = [stack for stack in tree.stacks if parent(stack) in streams]
    return tuple(block for stack in stacks for block in tree.stacks[stack]) or tree.decoder_blocks


def token_tables(tree: ModelTree) -> tuple[str, ...]:
    """Return the token embedding, and the tables that are tied to it or embed the tokens of another stream."""
    if tree.embedding is None:
        return ()
    weight = join(tree.embedding, "weight")
    tied = [parent(path) for group in tree.tied if weight in group for path in group]
    shape = tree.shape(tree.embedding)
    children = (child for path in token_streams(tree) for child in tree.children[path])
    streams = [child for child in children if tree.shape(child) == shape]
    return tuple(path for path in dict.fromkeys((tree.embedding, *tied, *streams)) if tree.is_embedding(path))
