"""Train Megatron's own multi-latent attention for one step, packed and padded, patched and not; print what differs.

Run as: python mla.py RANK WORLD_SIZE STORE local|portable. World size = tensor-parallel size. Rank 0 prints JSON.
"""

import json
import sys
from contextlib import contextmanager

import torch

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Outcome, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

torch.set_num_threads(1)
rank, world, store, modules = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]


class Host(CpuPlatform):
    """The processor; Megatron sees no Transformer Engine, or the portable one."""

    portable_modules = modules == "portable"


context = PatchContext(Host(), "trainer", hooks_of(), "megatron")
ledger = Ledger(context=context)
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, trainer_patches(phase, context))

torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig  # noqa: E402

parallel_state.initialize_model_parallel(world)
model_parallel_cuda_manual_seed(1)

LENGTHS, PADDED = (5, 1, 7), (6, 2, 8)
WIDTH, VALUE = 12, 6  # of a query head (8 + 4 of rotary embedding), and of a value head


class NaiveAttention(torch.nn.Module):
    """Causal attention by its formula, in the dtype of its inputs, one sequence at a time."""

    strict = flat = variant = False

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, v_channels=None, **_):
        super().__init__()
        self.scale = softmax_scale
        self.hidden_size_per_attention_head_v = v_channels

    def forward(self, query, key, value, mask, x=None, qr=None, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None):  # fmt: skip
        if packed_seq_params is None:
            output = self.attend(query, key, value).flatten(2)  # [S, B, N * D]
        else:
            if self.strict and not query.shape[-1] == value.shape[-1] == self.hidden_size_per_attention_head_v:
                raise ValueError("values must be as wide as queries")
            output = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
            for start, length in zip(packed_seq_params.cu_seqlens_q_padded.tolist(), LENGTHS, strict=False):
                one = slice(start, start + length)
                part = self.attend(query[one, None], key[one, None], value[one, None])
                output = torch.cat([output[:start], part.squeeze(1), output[start + length :]])
            output = output.flatten(1) if self.flat else output
        if self.variant:
            output = output * (1 + x.sum() + qr.sum())
        return output

    def attend(self, query, key, value):
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.einsum("bnqk,kbnd->qbnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def build(recompute=(), **options):
    config = MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, normalization="RMSNorm",
        q_lora_rank=16, kv_lora_rank=16, qk_head_dim=WIDTH - 4, qk_pos_emb_head_dim=4, v_head_dim=VALUE,
        rope_type="rope", add_bias_linear=False, params_dtype=torch.float64, tensor_model_parallel_size=world,
        sequence_parallel=world > 1 and modules == "portable", hidden_dropout=0.0, attention_dropout=0.0,
        bias_dropout_fusion=False,
        recompute_granularity="selective" if recompute else None, recompute_modules=list(recompute) or None,
    )  # fmt: skip
    for name, value in options.items():
        setattr(config, name, value)
    if modules == "portable":
        spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)
    else:
        spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = NaiveAttention
    torch.manual_seed(3)
    model = GPTModel(config, spec, vocab_size=24, max_sequence_length=32, position_embedding_type="rope").double()
    return model.train()


def weights_of(model):
    """The same weights in every model: random, but of one seed for each parameter's name and rank."""
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            split = getattr(parameter, "tensor_model_parallel", False)
            generator = torch.Generator().manual_seed(1000 * number + (rank if split else 0))
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


torch.manual_seed(0)
TOKENS = [torch.randint(0, 24, (length,)) for length in LENGTHS]
COTANGENT = [torch.randn(length, dtype=torch.float64) for length in LENGTHS]


def log_probs(model, ids, positions, packed=None):
    logits = gather_from_tensor_model_parallel_region(model(ids, positions, None, packed_seq_params=packed))
    return logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)


def packed_step(model):
    """One forward and backward over all sequences in one row; log-probs and gradients."""
    row = torch.zeros(1, sum(PADDED), dtype=torch.int64)
    positions, starts = torch.zeros_like(row), [0, 6, 8]
    for tokens, start, padded in zip(TOKENS, starts, PADDED, strict=True):
        row[0, start : start + len(tokens)] = tokens
        positions[0, start : start + padded] = torch.arange(padded)
    lengths = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    padded = torch.tensor([0, 6, 8, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", lengths, lengths, padded, padded, max_seqlen_q=8, max_seqlen_kv=8)
    values = log_probs(model, row, positions, packed)
    # The last token of a sequence predicts what stands after it in the buffer: no matter to anybody.
    parts = [values[0, start : start + length - 1] for start, length in zip(starts, LENGTHS, strict=True)]
    return finish(model, parts)


def padded_step(model):
    """The same with one padded row for each sequence."""
    row = torch.zeros(3, 8, dtype=torch.int64)
    for number, tokens in enumerate(TOKENS):
        row[number, : len(tokens)] = tokens
    values = log_probs(model, row, torch.arange(8).expand(3, 8))
    return finish(model, [values[number, : length - 1] for number, length in enumerate(LENGTHS)])


def finish(model, parts):
    sum((part * weight[:-1]).sum() for part, weight in zip(parts, COTANGENT, strict=True)).backward()
    for parameter in model.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            # With sequence parallelism each rank has the part of its own tokens.
            torch.distributed.all_reduce(parameter.grad)
    return torch.cat(parts).detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def difference(one, other):
    """Largest difference of log-probs, and of gradients relative to the largest gradient, over all ranks."""
    (values, gradients), (expected, wanted) = one, other
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    found = torch.tensor([
        float((values - expected).abs().max()),
        max(float((gradients[name] - wanted[name]).abs().max()) for name in wanted) / scale,
    ])  # fmt: skip
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return found.tolist()


def attempt(function):
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - any failure is the observation
        return f"{type(error).__name__}: {error}"


@contextmanager
def kernel(**settings):
    for name, value in settings.items():
        setattr(NaiveAttention, name, value)
    try:
        yield
    finally:
        for name in settings:
            setattr(NaiveAttention, name, False)


def step(recompute=(), **options):
    return packed_step(weights_of(build(recompute, **options)))


RECOMPUTED = {"none": (), "core": ("core_attn",), "up": ("mla_up_proj",)}
expected = padded_step(weights_of(build()))


def compared(recompute):
    answer = attempt(lambda: step(recompute))
    return answer if isinstance(answer, str) else difference(answer, expected)


def variant(recompute):
    """Attention that needs two more inputs: Megatron's DSA, as far as its caller is concerned."""
    with kernel(variant=True):
        model = weights_of(build(recompute, experimental_attention_variant="dsa"))
        return padded_step(model)


def observe():
    """Packed against padded: with a kernel that takes all values, and with one that is strict."""
    facts = {"tolerant": compared(())}
    for name, recompute in RECOMPUTED.items():
        with kernel(strict=True):
            facts[f"strict, recompute {name}"] = compared(recompute)
        with kernel(strict=True, flat=True):
            facts[f"strict and flat, recompute {name}"] = compared(recompute)
    return facts


def patches(phase, *, but=""):
    return [patch for patch in trainer_patches(phase, context) if patch.id != but]


facts = {"unpatched": observe(), "without": {}}
has_variants = hasattr(build().config, "experimental_attention_variant")
if has_variants:
    facts["unpatched"]["variant"] = attempt(lambda: variant(("core_attn",)) and "ran")

ledger.apply(Phase.BEFORE_BUILD, patches(Phase.BEFORE_BUILD))
facts["report"] = ledger.report()
facts["patched"] = observe()
if has_variants:
    facts["patched"]["variant"] = attempt(lambda: difference(variant(("core_attn",)), variant(())))

for record in ledger.records:
    if record.patch.id.startswith("megatron.mla-") and record.outcome is Outcome.APPLIED:
        ledger.undo(Phase.BEFORE_BUILD)
        others = Ledger(context=context)
        others.apply(Phase.BEFORE_BUILD, patches(Phase.BEFORE_BUILD, but=record.patch.id))
        with kernel(strict=True):
            facts["without"][record.patch.id] = compared(())
        others.undo()
        ledger.apply(Phase.BEFORE_BUILD)

model = build()
with kernel(strict=True):
    weights_of(model)
    packed_step(model)
attention = model.decoder.layers[0].self_attention
facts["touched"] = [
    name
    for module in (attention, attention.core_attention)
    for name in ("forward", "_checkpointed_attention_forward", "get_query_key_value_tensors")
    if name in vars(module)
]
facts["width"] = attention.core_attention.hidden_size_per_attention_head_v
ledger.undo()
if rank == 0:
    print(json.dumps(facts))
torch.distributed.destroy_process_group()
