"""One mean over a batch: the gradient does not depend on how the batch is cut."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_logprobs
from rl_logprobs import global_mean, mean_weights

PER = ("token", "sequence", "group", "constant length")
LENGTH = 17.0


def batch(seed):
    """Sequences of random lengths with random masks, each in a group; at least one token is scored."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [draw.randint(1, 7) for _ in range(draw.randint(1, 9))]
    inputs = [torch.randn(length, 3, generator=generator, dtype=torch.float64) for length in lengths]
    masks = [(torch.rand(length, generator=generator) < 0.7).long() for length in lengths]
    masks[0][0] = 1
    groups = [draw.randrange(3) for _ in lengths]
    return inputs, masks, groups


def parameters():
    return torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)


def values_of(inputs, theta):
    return (inputs @ theta).tanh()


def exact_gradient(inputs, masks, groups, per):
    """The gradient of the mean by its definition, sequence by sequence in one process."""
    theta = parameters()
    values = [values_of(x, theta)[mask != 0] for x, mask in zip(inputs, masks, strict=True)]
    if per == "token":
        loss = torch.cat(values).mean()
    elif per == "sequence":
        loss = torch.stack([value.mean() for value in values if len(value)]).mean()
    elif per == "constant length":
        loss = torch.stack([value.sum() / LENGTH for value in values if len(value)]).mean()
    else:
        members = [torch.cat([v for v, g in zip(values, groups, strict=True) if g == name]) for name in set(groups)]
        loss = torch.stack([value.mean() for value in members if len(value)]).mean()
    return torch.autograd.grad(loss, theta)[0]


def options_of(per, groups, sequences):
    """Options of the weights, and the segment of each sequence."""
    if per == "constant length":
        return {"per": "sequence", "length": LENGTH}, sequences
    return {"per": per}, groups if per == "group" else sequences


def packed(inputs, masks, segments, sequences):
    """The tokens of some sequences as one packed row."""
    join = [torch.cat([part[i] for i in sequences]) if sequences else part[0][:0] for part in (inputs, masks)]
    numbers = torch.cat([torch.full((len(masks[i]),), segments[i]) for i in sequences]) if sequences else join[1]
    return join[0][None], join[1][None], numbers[None].long()


def padded(inputs, masks, sequences):
    """The same as rows padded to one length."""
    x, mask = (torch.nn.utils.rnn.pad_sequence([p[i] for i in sequences], batch_first=True) for p in (inputs, masks))
    return x, mask


def dealt(items, parts, draw):
    """The items in random order, dealt to random parts, some of which may be empty."""
    found = [[] for _ in range(parts)]
    for item in draw.sample(items, len(items)):
        found[draw.randrange(parts)].append(item)
    return found


@settings(max_examples=60)
@given(seed=st.integers(0, 2**16), per=st.sampled_from(PER), parts=st.integers(1, 4), packing=st.booleans())
def test_any_micro_batches_give_the_gradient_of_the_whole_batch(seed, per, parts, packing):
    inputs, masks, groups = batch(seed)
    options, segments = options_of(per, groups, list(range(len(inputs))))
    cut = dealt(range(len(inputs)), parts, random.Random(seed))
    if packing or per == "group":
        micro_batches = [packed(inputs, masks, segments, part) for part in cut]
        options |= {"segments": [m[2] for m in micro_batches], "num_segments": len(inputs) + 3}
    else:
        micro_batches = [(*padded(inputs, masks, part), None) for part in cut if part]
    weights = mean_weights([m[1] for m in micro_batches], **options)
    theta = parameters()
    for x, mask, numbers in micro_batches:
        given = {} if numbers is None or per == "token" else {"segments": numbers}
        global_mean(values_of(x, theta), mask, weights, **given).backward()
    torch.testing.assert_close(theta.grad, exact_gradient(inputs, masks, groups, per), rtol=1e-12, atol=1e-14)


def cut_over_ranks(seeds):
    """For each seed, the largest error of the reduced gradient for a random cut over dp, cp and micro-batches."""
    errors = {}
    world = dist.get_world_size()
    meshes = {
        (dp, world // dp): dist.device_mesh.init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "cp"))
        for dp in (1, 2, 4)
    }
    for seed in seeds:
        draw = random.Random(seed)
        inputs, masks, groups = batch(seed)
        dp, cp = draw.choice(sorted(meshes))
        mesh = meshes[dp, cp]
        data_rank, context_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
        per, factor = draw.choice(PER), draw.choice([1.0, float(dp), float(world), 3.0])
        by_rows = draw.random() < 0.5 and per != "group"  # rows without numbers, in the same order on all ranks of cp
        options, segments = options_of(per, groups, list(range(len(inputs))))
        micro_batches = dealt(dealt(range(len(inputs)), dp, draw)[data_rank], draw.randint(1, 3), draw)
        found = []
        for part in micro_batches:
            x, mask, numbers = packed(inputs, masks, segments, part)
            if by_rows:
                x, mask = padded(inputs, masks, part) if part else (x, mask)
            # Each rank of cp has every cp-th token, so that it has a part of each sequence and of each row.
            found.append((x[:, context_rank::cp], mask[:, context_rank::cp], numbers[:, context_rank::cp]))
        if not by_rows:
            options |= {"segments": [m[2] for m in found], "num_segments": len(inputs) + 3}
        groups_of_ranks = {"group": mesh.get_group("dp"), "cp_group": mesh.get_group("cp")}
        weights = mean_weights([m[1] for m in found], **options, **groups_of_ranks, gradient_divide_factor=factor)
        theta = parameters()
        for x, mask, numbers in found:
            given = {} if by_rows or per == "token" else {"segments": numbers}
            global_mean(values_of(x, theta), mask, weights, **given).backward()
        dist.all_reduce(theta.grad)
        reduced = theta.grad / factor
        errors[seed] = (reduced - exact_gradient(inputs, masks, groups, per)).abs().max().item()
    return errors


def test_any_cut_over_ranks_gives_the_gradient_of_the_whole_batch(four_ranks):
    for errors in four_ranks.run(cut_over_ranks, range(50)):
        assert len(errors) == 50
        assert max(errors.values()) < 1e-12, max(errors, key=errors.get)


def wrongly_reduced(bug, per):
    """The gradient of two data-parallel by two context-parallel ranks with one of the usual errors."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    inputs, masks, groups = batch(3)
    cut = [range(0, len(inputs), 3), [i for i in range(len(inputs)) if i % 3]][mesh.get_local_rank("dp")]
    options, segments = options_of(per, groups, list(range(len(inputs))))
    x, mask, numbers = (p[:, mesh.get_local_rank("cp") :: 2] for p in packed(inputs, masks, segments, list(cut)))
    ranks = {"group": mesh.get_group("dp"), "cp_group": mesh.get_group("cp")}
    factor = 2.0
    if bug == "mean of means":  # each rank divides by its own numbers
        ranks, factor = {}, 1.0
    if bug == "divided by cp twice":  # the counts cover cp, and the reduction's factor does not say that it sums
        factor = 1.0
    if bug == "inflated by the group's size":  # groups are counted on each rank, so that a shared one counts twice
        ranks = {"cp_group": mesh.get_group("cp")}
    if per != "token":
        options |= {"segments": numbers, "num_segments": len(inputs)}
    weights = mean_weights(mask, **options, **ranks, gradient_divide_factor=factor)
    theta = parameters()
    values = values_of(x, theta)
    if bug == "divided by the padded length":
        scored = torch.tensor(mask.numel() * 1.0)
        dist.all_reduce(scored)
        loss = (values * mask).sum() / scored * factor
    else:
        loss = global_mean(values, mask, weights, segments=None if per == "token" else numbers)
    loss.backward()
    dist.all_reduce(theta.grad)
    expected = exact_gradient(inputs, masks, groups, per)
    return ((theta.grad / 2.0 - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("bug", "per"),
    [
        (None, "token"),
        (None, "group"),
        ("mean of means", "token"),
        ("divided by the padded length", "token"),
        ("divided by cp twice", "sequence"),
        ("inflated by the group's size", "group"),
    ],
)
def test_the_usual_errors_change_the_gradient(four_ranks, bug, per):
    errors = four_ranks.run(wrongly_reduced, bug, per)
    assert (max(errors) < 1e-12) if bug is None else (min(errors) > 1e-2), errors


def test_masked_values_do_not_matter_whatever_they_are():
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]], requires_grad=True)
    loss = global_mean(values, torch.tensor([[1, 0], [0, 1]]))
    loss.backward()
    assert loss == 2
    assert values.grad.tolist() == [[0.5, 0], [0, 0.5]]


def test_a_batch_without_scored_tokens_has_the_mean_0_and_no_gradient():
    for per in ("token", "sequence"):
        values = torch.ones(2, 3, requires_grad=True)
        loss = global_mean(values, torch.zeros(2, 3), per=per)
        loss.backward()
        assert loss == 0
        assert (values.grad == 0).all()


def test_a_given_count_replaces_the_units_with_a_scored_token():
    values, mask = torch.ones(3, 2), torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert global_mean(values, mask, mean_weights(mask, per="sequence")) == 1
    torch.testing.assert_close(
        global_mean(values, mask, mean_weights(mask, per="sequence", count=3)), torch.tensor(2 / 3)
    )


MASK = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mean_weights(MASK, per="row"), rl_logprobs.errors.OptionError, "token, sequence, group, got 'row'"),
        (lambda: mean_weights(MASK, per="group"), rl_logprobs.errors.OptionError, "needs segments"),
        (lambda: mean_weights(MASK, length=3), rl_logprobs.errors.OptionError, "per='sequence', not 'token'"),
        (
            lambda: mean_weights(MASK, gradient_divide_factor=0),
            rl_logprobs.errors.OptionError,
            "positive and finite, got 0",
        ),
        (lambda: mean_weights([]), rl_logprobs.errors.OptionError, "at least one mask"),
        (
            lambda: mean_weights(MASK, per="sequence", segments=MASK.long()),
            rl_logprobs.errors.OptionError,
            "num_segments",
        ),
        (
            lambda: mean_weights(MASK, per="sequence", segments=MASK.long() + 4, num_segments=5),
            rl_logprobs.errors.ShapeError,
            r"segment 5 is outside \[0, 5\)",
        ),
        (
            lambda: mean_weights(MASK, per="sequence", segments=MASK, num_segments=5),
            rl_logprobs.errors.DtypeError,
            "float32",
        ),
        (
            lambda: mean_weights([MASK, MASK], per="sequence", segments=MASK.long(), num_segments=5),
            rl_logprobs.errors.ShapeError,
            "2 masks and 1 segments",
        ),
        (
            lambda: mean_weights(MASK, per="sequence", num_segments=2),
            rl_logprobs.errors.OptionError,
            "without segments",
        ),
        (
            lambda: mean_weights(torch.tensor(1), per="sequence"),
            rl_logprobs.errors.ShapeError,
            r"\[..., tokens\], got shape \(\)",
        ),
        (lambda: global_mean(MASK, MASK[:1]), rl_logprobs.errors.ShapeError, r"\(1, 3\).*\(2, 3\)"),
        (
            lambda: global_mean(MASK, MASK, mean_weights(MASK, per="sequence"), segments=MASK.long()),
            rl_logprobs.errors.OptionError,
            "made without segments",
        ),
    ],
)
def test_contradictions_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def of_ranks():
    """What the ranks of a mesh and its axes give, and the messages of arguments that cannot be right."""
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=names)
    mask = torch.ones(1, 1 + dist.get_rank())
    axes = {"group": [mesh.get_group("dp_replicate"), mesh.get_group("dp_shard")], "cp_group": mesh.get_group("cp")}
    factors = {}
    for name, ranks in {"mesh": {"mesh": mesh}, "groups": axes, "dp": {"mesh": mesh["dp_shard"]}}.items():
        weights = mean_weights(mask, **ranks)
        factors[name] = (weights.count.item(), weights.gradient_divide_factor)
    factors["sum"] = mean_weights(mask, mesh=mesh, gradient_divide_factor=1).gradient_divide_factor
    factors["same batch"] = mean_weights(mask, group=()).gradient_divide_factor
    unknown = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    unnamed = dist.device_mesh.init_device_mesh("cpu", (4,))
    messages = []
    for wrong in ({}, {"cp_group": axes["cp_group"]}, {"mesh": unknown}, {"mesh": unnamed}, {"mesh": mesh, **axes}):
        with pytest.raises(rl_logprobs.errors.OptionError) as error:
            mean_weights(mask, **wrong)
        messages.append(str(error.value))
    return factors, messages


def test_mean_weights_knows_the_ranks_of_a_mesh_or_refuses(four_ranks):
    for rank, (factors, messages) in enumerate(four_ranks.run(of_ranks)):
        own = 4.0 + 2 * (rank % 2)  # this rank and the other of its axis dp_shard
        assert factors == {"mesh": (10, 2), "groups": (10, 2), "dp": (own, 2), "sum": 1, "same batch": 1}
        assert "data-parallel ranks among these 4 are unknown: give mesh=" in messages[0]
        assert messages[1] == messages[0]
        assert "axis fsdp: give a mesh with axes of dp, dp_replicate" in messages[2]
        assert "without a name" in messages[3]
        assert "give the mesh, or the groups" in messages[4]
