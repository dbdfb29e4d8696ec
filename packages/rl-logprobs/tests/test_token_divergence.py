"""Divergence of student and teacher: that of the full logits, from hidden states, logits or a teacher's top-k."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import rl_logprobs
from harness.ranks import RanksFailed
from rl_logprobs import LinearLogits, VocabShard, token_divergence, topk_logprobs
from rl_logprobs.softmax import fused_linear

TOKENS = (2, 7)
BETAS = (0.0, 0.3, 1.0)
STUDENT = {"logit_scale": 1.3, "softcap": 4.0}
TEACHER = {"logit_scale": 0.7}


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(fused_linear, "CPU_TILE", (4, 5))


def side(vocab, features, seed, dtype=torch.float64, tokens=TOKENS):
    """Hidden states, weight and bias of one model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*tokens, features), (vocab, features), (vocab,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def logits_of(hidden, weight, bias=None, logit_scale=1.0, softcap=None):
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def exact(student, teacher, beta, temperature=1.0, teacher_temperature=None):
    """The definition, from full logits."""
    s = torch.log_softmax(student / temperature, -1)
    t = torch.log_softmax(teacher / (teacher_temperature or temperature), -1)
    if beta in (0, 1):
        return kl(s, t) if beta else kl(t, s)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return (1 - beta) * kl(s, m) + beta * kl(t, m)


def kl(p, q):
    return torch.where(p == -math.inf, 0, p.exp() * (p - q)).sum(-1)


def gradients(function, leaves):
    """The values and the gradients of a loss that weighs the tokens differently."""
    found = function()
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), leaves)]


def assert_close(found, expected, tolerance=1e-12):
    for actual, desired in zip(found, expected, strict=True):
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        torch.testing.assert_close(actual, desired, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("forms", [*itertools.product(("head", "logits"), repeat=2)], ids="-".join)
def test_values_and_gradients_are_those_of_the_full_logits(small_tiles, forms, beta):
    student, teacher = side(13, 6, 1), side(13, 9, 2)
    leaves = [part.requires_grad_() for part in student]
    temperatures = {"temperature": 0.8, "teacher_temperature": 1.7}
    expected = gradients(
        lambda: exact(logits_of(*leaves, **STUDENT), logits_of(*teacher, **TEACHER), beta, *temperatures.values()),
        leaves,
    )

    def given_as(form, parts, options):
        return LinearLogits(*parts, **options) if form == "head" else logits_of(*parts, **options)

    found = gradients(
        lambda: token_divergence(
            given_as(forms[0], leaves, STUDENT), given_as(forms[1], teacher, TEACHER), beta=beta, **temperatures
        ),
        leaves,
    )
    assert_close(found, expected)


@settings(max_examples=40)
@given(
    vocab=st.integers(1, 60),
    dtypes=st.tuples(*[st.sampled_from([torch.bfloat16, torch.float32, torch.float64])] * 2),
    beta=st.sampled_from([0.0, 1e-3, 0.5, 1.0]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_any_pair_of_logits_gives_the_float64_divergence(vocab, dtypes, beta, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, *TOKENS, vocab, generator=generator, dtype=torch.float64) * scale
    student, teacher = (logits.to(dtype) for logits, dtype in zip(pair, dtypes, strict=True))
    found = token_divergence(student, teacher, beta=beta, temperature=0.9)
    tolerance = 1e-12 if torch.float64 in dtypes else 1e-5
    torch.testing.assert_close(
        found.double(), exact(student.double(), teacher.double(), beta, 0.9), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_heads_of_other_dtypes_keep_float32_accuracy(dtypes, beta):
    student, teacher = (side(200, 6, seed, dtype) for seed, dtype in zip((1, 2), dtypes, strict=True))
    leaves = [part.requires_grad_() for part in student]
    found = gradients(lambda: token_divergence(LinearLogits(*leaves), LinearLogits(*teacher), beta=beta), leaves)
    wide = [[part.detach().double().requires_grad_() for part in parts] for parts in (student, teacher)]
    expected = gradients(lambda: exact(logits_of(*wide[0]), logits_of(*wide[1]), beta), wide[0])
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for actual, desired in zip(found[1:], expected[1:], strict=True):
        assert actual.dtype is dtypes[0]
        torch.testing.assert_close(actual.double(), desired, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_the_derivatives_for_a_temperature_per_token(small_tiles, beta):
    student, teacher = side(6, 2, 1, tokens=(1, 3)), side(6, 4, 2, tokens=(1, 3))
    temperature = torch.tensor([[0.5, 1.0, 2.0]])
    assert torch.autograd.gradcheck(
        lambda *parts: token_divergence(
            LinearLogits(*parts, softcap=3.0), LinearLogits(*teacher), beta=beta, temperature=temperature
        ),
        [part.requires_grad_() for part in student],
    )


@pytest.mark.parametrize("beta", BETAS)
def test_the_teacher_has_no_gradient(beta):
    student, teacher = side(13, 6, 1), [part.requires_grad_() for part in side(13, 9, 2)]
    student[0].requires_grad_()
    for reference in (LinearLogits(*teacher), logits_of(*teacher)):
        token_divergence(LinearLogits(*student), reference, beta=beta).sum().backward()
    assert all(part.grad is None for part in teacher)


@pytest.mark.parametrize("beta", BETAS)
def test_masked_tokens_are_zero_and_reach_no_gradient_whatever_their_values(small_tiles, beta):
    student, teacher = side(13, 6, 1), side(13, 9, 2)
    mask = torch.ones(TOKENS)
    mask[0, :3] = mask[1, 5] = 0
    kept = mask.bool()
    leaves = [part.requires_grad_() for part in student]

    def loss(masked):
        states, *head = leaves
        return token_divergence(
            LinearLogits(states if masked else states[kept], *head),
            LinearLogits(teacher[0] if masked else teacher[0][kept], *teacher[1:]),
            beta=beta,
            mask=mask if masked else None,
        ).sum()

    expected = torch.autograd.grad(loss(masked=False), leaves)
    with torch.no_grad():
        leaves[0][0, 0], teacher[0][1, 5] = math.nan, math.inf
    assert_close(torch.autograd.grad(loss(masked=True), leaves), expected)
    logits = logits_of(*side(13, 9, 3))
    logits[0, 1] = math.nan
    found = token_divergence(LinearLogits(*leaves), logits, beta=beta, mask=mask)
    assert (found[~kept] == 0).all()
    assert all(part.isfinite().all() for part in torch.autograd.grad(found.sum(), leaves))


@pytest.mark.parametrize("beta", BETAS)
def test_packed_rows_are_their_documents(beta):
    student, teacher = side(13, 6, 1, tokens=(9,)), side(13, 9, 2, tokens=(9,))
    packed = token_divergence(LinearLogits(*student), LinearLogits(*teacher), beta=beta)
    parts = [
        token_divergence(
            LinearLogits(student[0][rows], *student[1:]), LinearLogits(teacher[0][rows], *teacher[1:]), beta=beta
        )
        for rows in (slice(0, 4), slice(4, 9))
    ]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_vocabularies_that_are_padded_differently_are_one(small_tiles, beta):
    student, teacher = side(16, 6, 1), side(20, 9, 2)
    leaves = [part.requires_grad_() for part in student]

    def padded():
        return token_divergence(
            LinearLogits(*leaves, shard=VocabShard(11)), LinearLogits(*teacher, shard=VocabShard(11)), beta=beta
        )

    expected = gradients(lambda: exact(logits_of(*leaves)[..., :11], logits_of(*teacher)[..., :11], beta), leaves)
    assert_close(gradients(padded, leaves), expected)


def test_impossible_tokens_count_as_the_definition_says():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64)
    student[0, 2] = teacher[0, 2] = student[1, 3] = teacher[2, 4] = -math.inf
    student.requires_grad_()
    for beta in BETAS:
        found = token_divergence(student, teacher, beta=beta)
        torch.testing.assert_close(found, exact(student, teacher, beta), rtol=1e-12, atol=1e-12)
        assert found[1].isinf() == (beta == 0)
        assert found[2].isinf() == (beta == 1)
    (gradient,) = torch.autograd.grad(token_divergence(student, teacher, beta=0.3).sum(), student)
    assert gradient.isfinite().all()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("beta", BETAS)
def test_no_tensor_of_tokens_times_vocabulary_exists(monkeypatch, beta):
    monkeypatch.setattr(fused_linear, "CPU_TILE", (16, 32))
    student, teacher = (side(100, 6, seed, tokens=(2, 25)) for seed in (1, 2))
    leaves = [part.requires_grad_() for part in student]
    with Largest() as largest:
        token_divergence(LinearLogits(*leaves), LinearLogits(*teacher), beta=beta).sum().backward()
    assert largest.elements == student[1].numel() == 600


TOPK = (("renormalised", {"tail": False}), ("with the tail", {}))


def exact_topk(student, top, beta, tail):
    s = torch.log_softmax(student, -1).gather(-1, top.ids)
    if not tail:
        return exact(s, top.logprobs, beta)
    parts = (torch.cat([part, (1 - part.exp().sum(-1, keepdim=True)).log()], -1) for part in (s, top.logprobs))
    return exact(*parts, beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("form", ["head", "logits"])
@pytest.mark.parametrize("tail", [True, False])
def test_a_teacher_of_the_most_probable_ids(form, tail, beta):
    student = [part.requires_grad_() for part in side(13, 6, 1)]
    top = topk_logprobs(logits_of(*side(13, 9, 2)), 4)
    given = LinearLogits(*student) if form == "head" else logits_of(*student)
    found = gradients(lambda: token_divergence(given, top, beta=beta, tail=tail), student)
    assert_close(found, gradients(lambda: exact_topk(logits_of(*student), top, beta, tail), student))


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_all_ids_of_a_teacher_are_the_full_divergence_and_more_ids_come_closer(beta):
    student, teacher = (logits_of(*side(13, 6, seed)) for seed in (1, 2))
    full = token_divergence(student, teacher, beta=beta)
    distances = [
        (full - token_divergence(student, topk_logprobs(teacher, k), beta=beta)).abs().sum() for k in (2, 6, 13)
    ]
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1e-12


def test_ids_of_a_teacher_without_probability_are_left_out():
    student = side(13, 6, 1)
    student[0].requires_grad_()
    top = topk_logprobs(logits_of(*side(13, 9, 2)), 4)
    mask = torch.ones(TOKENS)
    mask[1, 2] = 0
    ids, logprobs = top.ids.clone(), top.logprobs.clone()
    logprobs[0, 0, 3] = -math.inf
    ids[1, 2], logprobs[1, 2] = 99, math.nan
    for beta in BETAS:
        found = token_divergence(LinearLogits(*student), (ids, logprobs), beta=beta, mask=mask)
        short = topk_logprobs(logits_of(*side(13, 9, 2)), 3)
        expected = token_divergence(LinearLogits(*student), top, beta=beta)
        expected[0, 0] = token_divergence(LinearLogits(*student), short, beta=beta)[0, 0]
        torch.testing.assert_close(found, expected * mask, rtol=1e-12, atol=1e-12)
        assert torch.autograd.grad(found.sum(), student[0])[0].isfinite().all()


def on_mesh(vocab, beta, student_form, teacher_form):
    """Values and gradients with the student over ``tp`` of two (tokens over ``dp``), the teacher in several forms."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wide = init_device_mesh("cpu", (4,), mesh_dim_names=("teacher_tp",))
    student, teacher = side(vocab, 6, 1), side(vocab, 9, 2)
    row = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    tp = mesh["tp"]
    if student_form == "local shard":
        rows = torch.arange(vocab).tensor_split([-(-vocab // 2)])[tp.get_local_rank()]
        leaves = [student[0][row].clone(), student[1][rows], student[2][rows]]
        options = {"shard": VocabShard(vocab, tp.get_group())}
    else:
        hidden = distribute_tensor(student[0], mesh, [Shard(0), Shard(1) if student_form == "SP" else Replicate()])
        head = [distribute_tensor(part, mesh, [Replicate(), Shard(0)]) for part in student[1:]]
        leaves, options = [hidden, *head], {}
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    given = LinearLogits(*leaves, softcap=4.0, **options)
    if student_form == "logits":
        logits = logits_of(student[0], *student[1:], softcap=4.0)
        leaves = [distribute_tensor(logits, mesh, [Shard(0), Shard(2)]).requires_grad_()]
        (given,) = leaves
    if teacher_form == "full head":
        reference = LinearLogits(teacher[0][row], *teacher[1:])
    elif teacher_form == "full logits":
        reference = logits_of(*teacher)[row]
    elif teacher_form == "logits":
        reference = distribute_tensor(logits_of(*teacher), mesh, [Shard(0), Shard(2)])
    elif teacher_form == "same tp":
        states = teacher[0][row] if student_form == "local shard" else teacher[0]
        reference = LinearLogits(states, *(distribute_tensor(part, tp, [Shard(0)]) for part in teacher[1:]))
    elif teacher_form == "tp of four, SP":
        head = [distribute_tensor(part, wide, [Shard(0)]) for part in teacher[1:]]
        reference = LinearLogits(distribute_tensor(teacher[0], wide, [Shard(1)]), *head)
    elif teacher_form == "Megatron's padding":
        width = -(-vocab // 4) + 3
        start = min(vocab, dist.get_rank() * width)
        padded = [torch.nn.functional.pad(part[start : start + width].T, (0, width)).T[:width] for part in teacher[1:]]
        reference = LinearLogits(teacher[0][row], *padded, shard=VocabShard(vocab, wide.get_group()))
    else:
        reference = topk_logprobs(logits_of(*teacher), 3)
    with CommDebugMode() as forward:
        found = token_divergence(given, reference, beta=beta, temperature=0.9, teacher_temperature=None)
    weights = torch.linspace(-1, 1, math.prod(TOKENS), dtype=torch.float64).view(TOKENS)[row]
    with CommDebugMode() as backward:
        grads = torch.autograd.grad((found * weights).sum(), leaves)
    grads = [g.redistribute(placements=[Replicate()] * 2).to_local() if isinstance(g, DTensor) else g for g in grads]
    return found.detach(), grads, (forward.get_total_counts(), backward.get_total_counts())


FORMS = [
    ("DTensor", "same tp", (1, 1)),
    ("DTensor", "full head", (1, 1)),
    ("local shard", "same tp", (1, 1)),
    ("local shard", "full logits", (1, 1)),
    ("SP", "tp of four, SP", (3 + 3, 1)),
    ("DTensor", "Megatron's padding", (1 + 3, 1)),
    ("logits", "logits", (1, 0)),
    ("logits", "full head", (1, 0)),
    ("logits", "tp of four, SP", (2 + 3, 0)),
]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("student_form", "teacher_form", "counts"), FORMS, ids=lambda each: str(each))
def test_every_split_agrees_with_one_process(four_ranks, student_form, teacher_form, counts, beta):
    vocab = 97
    student = [part.requires_grad_() for part in side(vocab, 6, 1)]
    teacher = logits_of(*side(vocab, 9, 2))
    logits = logits_of(*student, softcap=4.0)
    expected = exact(logits, teacher, beta, 0.9)
    weights = torch.linspace(-1, 1, math.prod(TOKENS), dtype=torch.float64).view(TOKENS)
    leaves = [logits] if student_form == "logits" else student
    results = four_ranks.run(on_mesh, vocab, beta, student_form, teacher_form)
    expected_counts = (counts[0] + (0 < beta < 1), counts[1])
    for rank, (found, grads, seen) in enumerate(results):
        rows, tp = slice(rank // 2, rank // 2 + 1), rank % 2
        assert seen == expected_counts
        tolerance = 1e-11
        torch.testing.assert_close(found, expected[rows].detach(), rtol=tolerance, atol=tolerance)
        if student_form == "local shard":
            desired = torch.autograd.grad((expected[rows] * weights[rows]).sum(), leaves, retain_graph=True)
            half = torch.arange(vocab).tensor_split([-(-vocab // 2)])[tp]
            assert_close(grads, [desired[0][rows], *(part[half] for part in desired[1:])], tolerance)
        else:
            desired = torch.autograd.grad((expected * weights).sum(), leaves, retain_graph=True)
            if student_form != "logits":  # the head's replicas over dp hold the gradient of their own tokens
                own = torch.autograd.grad((expected[rows] * weights[rows]).sum(), leaves, retain_graph=True)
                desired = [desired[0], *own[1:]]
            assert_close(grads, desired, tolerance)


def topk_on_mesh(beta, form):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    hidden, *head = side(13, 6, 1)
    top = topk_logprobs(distribute_tensor(logits_of(*side(13, 9, 2)), mesh, [Shard(2)]), 4)
    leaves = [hidden.requires_grad_(), *(distribute_tensor(part, mesh, [Shard(0)]).requires_grad_() for part in head)]
    given = LinearLogits(*leaves)
    if form == "logits":
        leaves = [distribute_tensor(logits_of(hidden, *head).detach(), mesh, [Shard(2)]).requires_grad_()]
        (given,) = leaves
    with CommDebugMode() as counter:
        found = token_divergence(given, top, beta=beta)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
    grads = torch.autograd.grad((found * weights).sum(), leaves)
    full = [part.full_tensor() if isinstance(part, DTensor) else part for part in grads]
    return [found.detach(), *full], counter.get_total_counts()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("form", ["head", "logits"])
def test_a_teacher_of_the_most_probable_ids_on_a_sharded_vocabulary(four_ranks, form, beta):
    leaves = [part.requires_grad_() for part in side(13, 6, 1)]
    top, logits = topk_logprobs(logits_of(*side(13, 9, 2)), 4), logits_of(*leaves)
    expected = gradients(lambda: exact_topk(logits, top, beta, True), leaves if form == "head" else [logits])
    for found, collectives in four_ranks.run(topk_on_mesh, beta, form):
        assert collectives == 2
        assert_close(found, expected, 1e-11)


REFUSED = {
    "another vocabulary": (lambda s, t: (LinearLogits(*s), LinearLogits(*side(14, 9, 2)), {}), "ShapeError", "13.*14"),
    "another vocabulary of logits": (
        lambda s, t: (logits_of(*s), logits_of(*side(14, 9, 2)), {}),
        "ShapeError",
        "one vocabulary",
    ),
    "other tokens": (
        lambda s, t: (LinearLogits(*s), LinearLogits(t[0][:, 1:], *t[1:]), {}),
        "ShapeError",
        r"teacher has tokens \(2, 6\)",
    ),
    "other width": (lambda s, t: (LinearLogits(*s), LinearLogits(s[0], *t[1:]), {}), "ShapeError", "weight must be"),
    "beta below": (lambda s, t: (LinearLogits(*s), LinearLogits(*t), {"beta": -0.1}), "OptionError", "beta.*-0.1"),
    "beta above": (lambda s, t: (LinearLogits(*s), LinearLogits(*t), {"beta": 1.5}), "OptionError", "beta.*1.5"),
    "beta nan": (lambda s, t: (LinearLogits(*s), LinearLogits(*t), {"beta": math.nan}), "OptionError", "nan"),
    "temperature": (lambda s, t: (LinearLogits(*s), logits_of(*t), {"temperature": 0.0}), "OptionError", "positive"),
    "teacher's temperature": (
        lambda s, t: (LinearLogits(*s), logits_of(*t), {"teacher_temperature": -1.0}),
        "OptionError",
        "positive",
    ),
    "integer logits": (lambda s, t: (LinearLogits(*s), logits_of(*t).long(), {}), "DtypeError", "floating"),
    "a mask of other tokens": (
        lambda s, t: (LinearLogits(*s), LinearLogits(*t), {"mask": torch.ones(2, 3)}),
        "ShapeError",
        r"mask of shape \(2, 3\)",
    ),
    "a teacher's logits as log-probabilities": (
        lambda s, t: (LinearLogits(*s), tuple(logits_of(*t).topk(3))[::-1], {}),
        "OptionError",
        "not logits",
    ),
    "a temperature of known log-probabilities": (
        lambda s, t: (LinearLogits(*s), topk_logprobs(logits_of(*t), 3), {"teacher_temperature": 2.0}),
        "OptionError",
        "leave out",
    ),
    "an id twice": (
        lambda s, t: (LinearLogits(*s), (torch.zeros(*TOKENS, 2).long(), torch.full((*TOKENS, 2), -2.0)), {}),
        "KeptTokensError",
        "twice",
    ),
    "an id outside": (
        lambda s, t: (LinearLogits(*s), (torch.full((*TOKENS, 1), 13), torch.full((*TOKENS, 1), -2.0)), {}),
        "KeptTokensError",
        "outside",
    ),
    "no id with a probability": (
        lambda s, t: (
            LinearLogits(*s),
            (torch.zeros(*TOKENS, 1).long(), torch.full((*TOKENS, 1), -math.inf)),
            {"tail": False},
        ),
        "OptionError",
        "no id",
    ),
    "ids without log-probabilities": (
        lambda s, t: (LinearLogits(*s), (torch.zeros(*TOKENS, 2).long(), torch.zeros(*TOKENS, 3)), {}),
        "ShapeError",
        "both be",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_named(case):
    change, error, message = REFUSED[case]
    student, teacher, options = change(side(13, 6, 1), side(13, 9, 2))
    with pytest.raises(getattr(rl_logprobs.errors, error), match=message):
        token_divergence(student, teacher, **options)


def placed_otherwise(case):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wide = init_device_mesh("cpu", (4,), mesh_dim_names=("teacher_tp",))
    hidden, *head = side(13, 6, 1)
    student = LinearLogits(hidden, *(distribute_tensor(part, mesh["tp"], [Shard(0)]) for part in head))
    states, *head = side(13, 9, 2)
    teacher = logits_of(states, *head)
    if case == "logits over other ranks":
        teacher = distribute_tensor(teacher, wide, [Shard(2)])
    elif case == "logits over the tokens' ranks":
        teacher = distribute_tensor(teacher, mesh, [Shard(2), Replicate()])
    elif case == "states of a mesh without the head's ranks":
        head = [distribute_tensor(part, wide, [Shard(0)]) for part in head]
        teacher = LinearLogits(distribute_tensor(states, mesh, [Replicate(), Replicate()]), *head)
    with CommDebugMode() as counter:
        try:
            token_divergence(student, teacher)
        finally:
            assert counter.get_total_counts() == 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("logits over other ranks", "shard both vocabularies the same way"),
        ("logits over the tokens' ranks", "shard both vocabularies the same way"),
        ("states of a mesh without the head's ranks", "which hidden's mesh"),
    ],
)
def test_misplaced_teachers_are_refused_on_every_rank_before_any_collective(four_ranks, case, message):
    with pytest.raises(RanksFailed) as caught:
        four_ranks.run(placed_otherwise, case)
    failures = caught.value.errors.values()
    assert [failure.type_name for failure in failures] == ["PlacementError"] * 4
    assert all(message in failure.message for failure in failures)


def wrong_start():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    hidden, *head = side(12, 6, 1)
    rows = slice(0, 6)  # the same ones on both ranks
    shard = VocabShard(12, mesh.get_group(), start=0)
    token_divergence(LinearLogits(hidden, *head), LinearLogits(hidden, *(part[rows] for part in head), shard=shard))


def test_rows_of_a_teacher_that_no_rank_holds_are_missed_on_every_rank(two_ranks):
    with pytest.raises(RanksFailed) as caught:
        two_ranks.run(wrong_start)
    assert [failure.type_name for failure in caught.value.errors.values()] == ["PlacementError"] * 2
