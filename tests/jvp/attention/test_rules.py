"""Arguments beyond SDPA's against the definition in fp64: values, derivatives, and gradients through both."""

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from fullstride.jvp import attention, attention_dual, attention_varlen, document_starts, jvp, partial_jvp
from fullstride.jvp.attention import arguments
from fullstride.jvp.attention.dropout import seeded_factors
from tests.jvp.attention import rules
from tests.jvp.attention.rules import CASES, IDS, PLAIN, B, H, defined, draw, numbers
from tests.jvp.derivatives import check_backward, check_forward, close, detached, ours, torchs

FORMS = [(name, form) for name in CASES for form in ("auto", "plain")] + [(name, "plain") for name in PLAIN]


def made(name: str, form: str, seed: int) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """The op, its definition, primals and tangents."""
    lengths, given, named = (CASES | PLAIN)[name](seed)
    op = functools.partial(attention, implementation=form, **given)
    return op, functools.partial(defined, **named), draw(seed, *lengths), draw(seed + 10, *lengths)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_output_and_tangent_by_every_way(name, form, seed):
    op, reference, primals, tangents = made(name, form, seed)
    check_forward(op, reference, primals, tangents)
    close(op(*primals), reference(*primals))
    pair: Any = functools.partial(attention_dual, **op.keywords)
    close(pair(*primals, *tangents), torchs(reference, primals, tangents))
    close(pair(*primals, tangents[0]), torchs(reference, primals, [tangents[0], None, None]))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_gradients_by_every_way(name, form):
    op, reference, primals, tangents = made(name, form, 2)
    weights = list(numbers(5, 2, *reference(*primals).shape))
    check_backward(op, reference, primals, tangents, weights)


LEARNED = {
    "alibi_slopes": lambda s, named: (
        named | {"added": -s[:, None, None] * (rules.places(5, 8)[0] + 3 - torch.arange(8)).abs()}
    ),
    "sinks": lambda s, named: named | {"sinks": s},
}


@pytest.mark.parametrize("form", ["auto", "plain"])
@pytest.mark.parametrize("way", [ours, torchs, detached])
@pytest.mark.parametrize("name", LEARNED)
def test_slopes_and_sinks_learn(name, way, form, seed):
    primals, tangents, learned = draw(seed, 5, 8), draw(seed + 10, 5, 8), numbers(seed, H).abs().requires_grad_()

    def loss(op: Any, by: Any) -> Tensor:
        o, to = by(op, primals, tangents)
        return (o * (to.detach() if way is detached else to).sin()).sum()

    op = functools.partial(attention, implementation=form, **{name: learned})
    expected = loss(functools.partial(defined, **LEARNED[name](learned, {})), torchs)
    close(torch.autograd.grad(loss(op, way), learned), torch.autograd.grad(expected, learned))


def test_sinks_that_move(seed):
    primals, tangents, s, ts = draw(seed, 5, 8), draw(seed + 10, 5, 8), numbers(seed, H), numbers(seed + 1, H)
    reference = lambda q, k, v, s: defined(q, k, v, sinks=s)  # noqa: E731
    check_forward(lambda q, k, v, s: attention(q, k, v, sinks=s), reference, [*primals, s], [*tangents, ts])


@pytest.mark.parametrize("p", [0.3, 0.8])
def test_dropout_drops_the_same_of_output_and_tangent(p, seed):
    primals, tangents = draw(seed, 7, 11), draw(seed + 10, 7, 11)
    options: dict[str, Any] = {"dropout_p": p, "dropout_seed": torch.tensor(seed + 7), "implementation": "plain"}
    op = functools.partial(attention, **options)
    factors = seeded_factors(torch.empty(B, H, 7, 11, dtype=torch.float64), p, seed + 7)
    reference = functools.partial(defined, factors=factors)
    check_forward(op, reference, primals, tangents)
    check_backward(op, reference, primals, tangents, list(numbers(5, 2, *reference(*primals).shape)))
    close(attention_dual(*primals, *tangents, **options), torchs(reference, primals, tangents))
    assert not torch.equal(op(*primals), attention(*primals, **options | {"dropout_seed": seed + 8}))


def test_dropout_without_a_seed_follows_torchs_generator(seed):
    primals, tangents = draw(seed, 7, 11), draw(seed + 10, 7, 11)
    op = functools.partial(attention, dropout_p=0.4, implementation="plain")
    outs = []
    for way in (ours, torchs, detached):
        torch.manual_seed(seed)
        outs.append(way(op, primals, tangents))
    close(outs[1], outs[0])
    close(outs[2], outs[0])
    torch.manual_seed(seed)
    factors = nn.functional.dropout(torch.ones(B, H, 7, 11, dtype=torch.float64), 0.4)
    close(outs[0], torchs(functools.partial(defined, factors=factors), primals, tangents))


def test_a_seeded_draw_is_uniform_and_independent():
    p, n = 0.3, 200
    kept = torch.stack([seeded_factors(torch.empty(n, n, dtype=torch.float64), p, seed) for seed in range(5)]) > 0
    assert torch.equal(kept, torch.stack([seeded_factors(torch.empty(n, n), p, seed) > 0 for seed in range(5)]))
    centred = kept.double() - (1 - p)
    tolerance = 5 * (p * (1 - p)) ** 0.5 / n  # five standard deviations of the mean of n^2 draws
    assert centred.mean((1, 2)).abs().max() < tolerance
    for shifted in (centred.roll(1, 1), centred.roll(1, 2), centred.roll(1, 0), centred.mT):
        assert (centred * shifted).mean((1, 2)).abs().max() < tolerance


def test_some_samples_of_a_batch_with_rules(seed):
    primals, tangents = numbers(seed, 3, B, H, 9, 5), numbers(seed + 1, 3, 1, H, 9, 5)
    options: dict[str, Any] = {"document_ids": IDS, "sinks": numbers(seed, H), "alibi_slopes": numbers(seed, B, H)}
    dropped: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": 3, "softcap": 2.0, "implementation": "plain"}
    for given in (options, options | dropped):
        out, tangent = partial_jvp(functools.partial(attention, **given), tuple(primals), tuple(tangents))
        some = {n: x[:1] if n in ("document_ids", "alibi_slopes") else x for n, x in given.items()}
        close(out, attention(*primals, **given))
        close(tangent, torchs(functools.partial(attention, **some), [x[:1] for x in primals], list(tangents))[1])
    op = functools.partial(attention, dropout_p=0.5, implementation="plain")
    with pytest.raises(ValueError, match="dropout_p would drop other weights of the tangent; pass dropout_seed"):
        partial_jvp(op, tuple(primals), tuple(tangents))


def test_blocks_that_a_mask_lists_itself(seed):
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1], [0, 1]]]]).int()
    mask = BlockMask.from_kv_blocks(counts, indices, counts - 1, indices, BLOCK_SIZE=(4, 5), seq_lengths=(11, 9))
    whole = BlockMask.from_kv_blocks(counts - 1, indices, counts, indices, BLOCK_SIZE=(4, 5), seq_lengths=(11, 9))
    hidden = torch.tensor([[True] * 5 + [False] * 4] + [[False] * 5 + [True] * 4] * 2).repeat_interleave(4, 0)[:11]
    whole.mask_mod = lambda b, h, i, j: j < 0  # not asked in whole blocks
    primals, tangents = draw(seed, 11, 9), draw(seed + 10, 11, 9)
    for each in (mask, whole):
        op = functools.partial(attention, attn_mask=each)
        check_forward(op, functools.partial(defined, hidden=hidden), primals, tangents)


def test_documents_one_after_the_other_become_packed_sequences(seed):
    ids = torch.tensor([[4, 4, 0, 0, 0, 9, 9], [9, 9, 9, 9, 9, 9, 9]])
    primals, tangents = ([x.double() for x in draw(s, 7, 7)] for s in (seed, seed + 10))
    starts, longest = document_starts(ids)
    assert starts.tolist() == [0, 2, 5, 7, 14]
    assert longest == 7
    rows = lambda x: x.transpose(1, 2).flatten(0, 1)  # noqa: E731
    of_rows: Any = functools.partial(attention_varlen, is_causal=True)
    packed = lambda *x: of_rows(*map(rows, x), starts, starts, longest, longest)  # noqa: E731
    op = lambda *x: rows(attention(*x, document_ids=ids, is_causal=True))  # noqa: E731
    close(ours(packed, primals, tangents), ours(op, primals, tangents))
    with pytest.raises(ValueError, match="rows of a document lie apart, .* pass document_ids to attention"):
        document_starts(IDS)


Q = torch.ones(2, 4, 9, 8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"is_causal": "top"}, "is_causal is 'top', expected True, False or 'bottom-right'"),
    "ids' shape": (
        {"document_ids": IDS[:, 1:]},
        r"document_ids are torch.int64 \(2, 8\) .* expected integers \(2, 9\)",
    ),
    "ids' dtype": ({"document_ids": IDS.float()}, "document_ids are torch.float32"),
    "slopes": (
        {"alibi_slopes": Q[0, 0, 0]},
        r"alibi_slopes are torch.float32 \(8,\), expected .* \(\(4,\), \(2, 4\)\)",
    ),
    "sinks": ({"sinks": torch.ones(2, 4)}, r"sinks are torch.float32 \(2, 4\)"),
    "softcap": ({"softcap": 30.0}, "softcap with implementation='auto': .* no such rule; pass implementation='plain'"),
    "dropout": ({"dropout_p": 0.1, "softcap": 2.0}, "softcap and dropout_p with implementation='auto'"),
    "negative softcap": ({"softcap": -1.0, "implementation": "plain"}, "softcap is -1.0"),
    "all dropped": ({"dropout_p": 1.0, "implementation": "plain"}, "dropout_p is 1.0, expected .* < 1"),
    "seed alone": ({"dropout_seed": 3}, "dropout_seed is given and dropout_p is 0"),
    "two masks": ({"attn_mask": Q[0, 0, :, :1] > 0, "is_causal": "bottom-right"}, r"or pass window=\(-1, 0\)"),
    "blocks": ({"attn_mask": rules.block_mask(0)[1]["attn_mask"]}, r"a BlockMask is of \(21, 34\), expected \(9, 9\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    options, message = WRONG[name]
    for call in (lambda: attention(Q, Q, Q, **options), lambda: attention_dual(Q, Q, Q, Q, **options)):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=message):
        jvp(lambda q: attention(q, Q, Q, **options), (Q,), (Q,))


def test_a_named_kernel_is_not_replaced_without_a_word(monkeypatch, seed):
    monkeypatch.setattr(arguments, "chosen", lambda name, x, fits=True: name)
    (q, k, v), mask = draw(seed, 5, 8), numbers(seed, 5, 8)
    op = lambda q, m: attention(q, k, v, attn_mask=m, implementation="triton")  # noqa: E731
    with pytest.raises(
        ValueError, match="a mask that carries a tangent with implementation='triton'.*'plain' or 'auto'"
    ):
        jvp(op, (q, mask), (q, mask))


def test_an_unknown_argument_is_refused():
    unknown: Any = {"sink": torch.ones(4)}
    with pytest.raises(TypeError, match=re.escape("unexpected keyword argument 'sink'")):
        attention(Q, Q, Q, **unknown)
