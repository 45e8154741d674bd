"""Triton kernels that make a block of logits, use it and drop it; the formulas are in :mod:`anytron.kernels.log_prob`.

Tensors, all contiguous: ``hidden [tokens, hidden_size]``, ``weight [entries, hidden_size]``, ``labels``: int64
``[tokens]``, -1 = none, ``statistics``: float32 ``[parts, 4, tokens]``, ``grads [tokens, entries]``; the others are
float32 ``[tokens]``. The vocabulary is summed up in ``parts`` pieces, with four numbers for each token: the peak of the
logits, the sum of exp(logit - peak), the sum of exp(logit - peak) * (logit - peak), and the label's logit (0 in a part
without it). ``factor`` is one divided by the temperature. Micro-batches differ in length, so no
kernel is compiled for one number of tokens.
"""
# ruff: noqa: ANN001, ANN201, ANN202 -- Triton knows types when it compiles.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _logits(
    hidden,
    weight,
    first_token,
    first_entry,
    tokens,
    entries,
    hidden_size,
    factor,
    block_n: tl.constexpr,
    block_v: tl.constexpr,
    block_h: tl.constexpr,
):
    """A block of logits times ``factor``, float32; 0 beyond the entries."""
    rows = first_token + tl.arange(0, block_n)
    columns = first_entry + tl.arange(0, block_v)
    inner = tl.arange(0, block_h)
    # 64 bits: a weight of 150 000 x 16 384 has more elements than 32 count.
    left = hidden + rows.to(tl.int64)[:, None] * hidden_size + inner[None, :]
    right = weight + columns.to(tl.int64)[:, None] * hidden_size + inner[None, :]
    logits = tl.zeros((block_n, block_v), dtype=tl.float32)
    for begin in range(0, hidden_size, block_h):
        exists = (begin + inner < hidden_size)[None, :]
        a = tl.load(left + begin, mask=(rows < tokens)[:, None] & exists, other=0.0)
        b = tl.load(right + begin, mask=(columns < entries)[:, None] & exists, other=0.0)
        logits = tl.dot(a, tl.trans(b), logits, input_precision="ieee")
    return logits * factor


@triton.jit(do_not_specialize=["tokens"])
def sum_up(
    hidden,
    weight,
    labels,
    statistics,
    tokens,
    entries,
    hidden_size,
    factor,
    blocks_per_part,
    block_n: tl.constexpr,
    block_v: tl.constexpr,
    block_h: tl.constexpr,
):
    """Program (i, j) writes the statistics of block i of the tokens for part j of the entries, in one pass."""
    first_token = tl.program_id(0) * block_n
    part = tl.program_id(1)
    rows = first_token + tl.arange(0, block_n)
    label = tl.load(labels + rows, mask=rows < tokens, other=-1)
    peak = tl.full((block_n,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((block_n,), dtype=tl.float32)
    moment = tl.zeros((block_n,), dtype=tl.float32)
    label_logit = tl.zeros((block_n,), dtype=tl.float32)
    begin = part * blocks_per_part * block_v
    end = tl.minimum(begin + blocks_per_part * block_v, entries)
    for first_entry in range(begin, end, block_v):
        logits = _logits(
            hidden, weight, first_token, first_entry, tokens, entries, hidden_size, factor, block_n, block_v, block_h
        )
        columns = (first_entry + tl.arange(0, block_v))[None, :]
        exists = columns < entries
        higher = tl.maximum(peak, tl.max(tl.where(exists, logits, float("-inf")), axis=1))
        gap = tl.maximum(peak - higher, -200.0)  # of the first block it is -inf, which times 0 would be no number
        shrink = tl.exp(gap)
        shifted = logits - higher[:, None]
        weights = tl.where(exists, tl.exp(shifted), 0.0)
        moment = (moment + gap * total) * shrink + tl.sum(weights * shifted, axis=1)
        total = total * shrink + tl.sum(weights, axis=1)
        label_logit += tl.sum(tl.where(columns == label[:, None], logits, 0.0), axis=1)
        peak = higher
    to = statistics + part.to(tl.int64) * 4 * tokens + rows
    tl.store(to, peak, mask=rows < tokens)
    tl.store(to + tokens, total, mask=rows < tokens)
    tl.store(to + 2 * tokens, moment, mask=rows < tokens)
    tl.store(to + 3 * tokens, label_logit, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens"])
def differentiate(
    hidden,
    weight,
    labels,
    peaks,
    log_totals,
    means,
    grad_log_probs,
    grad_entropies,
    grads,
    tokens,
    entries,
    hidden_size,
    factor,
    first_label,
    block_n: tl.constexpr,
    block_v: tl.constexpr,
    block_h: tl.constexpr,
):
    """Program (i, j) writes the gradient of block (i, j) of a tile's logits before the division by the temperature."""
    first_token, first_entry = tl.program_id(0) * block_n, tl.program_id(1) * block_v
    logits = _logits(
        hidden, weight, first_token, first_entry, tokens, entries, hidden_size, factor, block_n, block_v, block_h
    )
    rows = first_token + tl.arange(0, block_n)
    columns = (first_entry + tl.arange(0, block_v))[None, :]
    exists = rows < tokens
    label = tl.load(labels + rows, mask=exists, other=-1)[:, None]
    peak = tl.load(peaks + rows, mask=exists, other=0.0)[:, None]
    log_total = tl.load(log_totals + rows, mask=exists, other=0.0)[:, None]
    mean = tl.load(means + rows, mask=exists, other=0.0)[:, None]
    of_log_prob = tl.load(grad_log_probs + rows, mask=exists, other=0.0)[:, None]
    of_entropy = tl.load(grad_entropies + rows, mask=exists, other=0.0)[:, None]
    shifted = logits - peak
    probs = tl.exp(shifted - log_total)
    grad = tl.where(columns + first_label == label, of_log_prob, 0.0)
    grad -= probs * (of_log_prob + of_entropy * (shifted - mean))
    to = grads + rows.to(tl.int64)[:, None] * entries + columns
    tl.store(to, (grad * factor).to(grads.dtype.element_ty), mask=exists[:, None] & (columns < entries))
