"""One update: tokens per second, MFU and peak memory; ours against a bare Megatron loop.

Both train the same model: a random one of Qwen3's shape, built once by the engine, in its data-parallel wrapper and
with its optimizer. ``ours`` is the engine's ``update``: hooks, layout, pipeline schedule, log-probs and entropies
without whole logits, policy loss, optimizer step. ``bare`` is what stands in Megatron's own examples: the model's
forward with labels, cross entropy over whole logits, backward, ``finalize_model_grads``, ``optimizer.step()``. The two
take turns. Both get the same packed sequences, up to 4096 tokens long, in one micro-batch.

MFU is the floating-point operations that the model needs (PaLM, arXiv:2204.02311, appendix B: 6 for each parameter and
token, and 12 L H D for each pair of tokens of attention, half of which causal attention leaves out), by the time, by
what the device does in a product of two large square matrices of the same element type, measured in the same run
(``matmul_flop_per_s``). Recomputed operations do not count.

The device is the platform's (``ANYTRON_PLATFORM``). ``--size tiny``, the default on a processor, ends in a minute.
A size that does not fit in memory has no figures; those without a table are of the most tokens that fit.

    python benchmarks/train_step.py [--json] [--size tiny|0.6b|1.7b] [--tokens 4096 8192 16384 32768] [--turns 5]
"""

import contextlib
import itertools
import os
import statistics
import tempfile
from pathlib import Path

from harness import argument_parser, in_turn, progress, report, timed

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.7b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""The published configurations of Qwen3-0.6B and Qwen3-1.7B, and a toy."""
LONGEST = 4096
"""Tokens of a sequence."""


def lengths_of(total):
    """Sequences of very different lengths that together have ``total`` tokens."""
    lengths, pattern = [], itertools.cycle((LONGEST, LONGEST // 4, LONGEST // 2, LONGEST // 8))
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(next(pattern), left))
    return lengths


def model_flop(shape, parameters, lengths):
    """Floating-point operations that one update needs; an embedding tied to the output layer counts once."""
    heads = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return 6 * parameters * sum(lengths) + 12 * heads * sum(length**2 for length in lengths) / 2


def write_model(directory, shape, dtype, device):
    """Write a random model; return its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**shape, max_position_embeddings=LONGEST, tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def matmul_flop_per_s(runtime, dtype, size, repeats=10):
    """What the device does in products of square matrices of random numbers."""
    import torch

    one, other = torch.randn(2, size, size, device=runtime.current_device()).to(dtype)
    out = torch.empty_like(one)

    def products():
        for _ in range(repeats):
            torch.mm(one, other, out=out)

    products()
    return 2 * size**3 * repeats / timed(products, runtime)[0]


class Ours:
    """The engine of this process: one rank."""

    def __init__(self, layer, folder, dtype, recompute):
        from anytron.config.schema import RunConfig
        from anytron.engines.context import EngineContext
        from anytron.hooks.types import ProcessInfo
        from anytron_megatron.engine import MegatronEngine

        config = RunConfig.model_validate(
            {
                "data": {"source": "unused"},
                "rewards": [{"function": "unused"}],
                "model": {"path": str(folder / "model"), "dtype": dtype},
                "optimizer": {"name": "adam", "lr": 1e-6},
                "engine": {"recompute": recompute},
                "trainer": {"output_dir": str(folder / "run")},
            }
        )
        process = ProcessInfo("trainer", 0, 0, world_size=1)
        init_method = f"file://{folder / 'store'}"
        self.engine = MegatronEngine(
            EngineContext(config, layer.hooks, layer.platform, layer.ledger, process, init_method)
        )

    def batch(self, lengths, vocabulary):
        """Recorded trajectories of these lengths; every token but each first one is of a response."""
        import torch

        from anytron.batch import RaggedBatch

        total = sum(lengths)
        response = torch.cat([torch.arange(length) for length in lengths]) > 0
        recorded = torch.full((total,), -5.0) * response
        return RaggedBatch(
            lengths=torch.tensor(lengths),
            tokens=torch.randint(vocabulary, (total,), generator=torch.Generator().manual_seed(0)),
            response_mask=response,
            rollout_log_probs=recorded,
            old_log_probs=recorded,
            advantages=torch.ones(total),
            loss_weights=response / response.sum(),
            token_shares=response / response.sum(),
        )

    def update(self, batch):
        from anytron.algorithms.policy_loss import PolicyLoss

        return self.engine.update([batch], PolicyLoss())["grad_norm"]


class Bare:
    """The engine's model and optimizer, without the engine."""

    def __init__(self, engine):
        (chunk,) = engine._trained.chunks
        self.model, self.optimizer = chunk.module, engine._trained.optimizer
        self.output_layer = self.model.module.output_layer

    def inputs(self, batch, device):
        """What Megatron's forward takes, on the device: packed sequences, and the next tokens as labels."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        tokens = batch.tokens.to(device)[None]
        ends = torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
        longest = int(batch.lengths.max())
        positions = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
        return {
            "input_ids": tokens,
            "position_ids": positions.to(device)[None],
            "attention_mask": None,
            "labels": tokens.roll(-1, dims=1),
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                cu_seqlens_q_padded=ends,
                cu_seqlens_kv_padded=ends,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        }

    def update(self, inputs):
        from megatron.core.distributed import finalize_model_grads

        ours = self.output_layer.__dict__.pop("forward")  # the class's, which makes logits
        try:
            self.model.train()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(**inputs).float().mean().backward()
            finalize_model_grads([self.model])
            return self.optimizer.step()[1]
        finally:
            self.output_layer.forward = ours


def measure(ours, bare, batch, runtime, turns):
    """Seconds and peak bytes of an update of both; None for one that does not fit."""
    import torch

    inputs = bare.inputs(batch, runtime.current_device())

    def once(update, argument):
        runtime.reset_peak_memory_stats()
        seconds = None
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds, norm = timed(lambda: update(argument), runtime)
        if seconds is None:
            runtime.empty_cache()
            return None
        assert 0 < norm < float("inf")
        return seconds, runtime.memory_stats().peak_allocated

    ways = {"ours": lambda: once(ours.update, batch), "bare": lambda: once(bare.update, inputs)}
    found = in_turn(ways, turns)
    return {name: None if None in results else list(zip(*results, strict=True)) for name, results in found.items()}


def row(found, tokens, flop, peak, *, has_peak_bytes):
    columns = {}
    for name, results in found.items():
        if results is None:
            continue
        seconds = statistics.median(results[0])
        columns[f"{name}_tokens_per_s"] = tokens / seconds
        columns[f"{name}_mfu"] = flop / seconds / peak
        if has_peak_bytes:
            columns[f"{name}_peak_bytes"] = max(results[1])
    if None not in found.values():
        columns["ours_by_bare"] = columns["ours_tokens_per_s"] / columns["bare_tokens_per_s"]
    return columns


def main():
    from anytron.hooks.types import ProcessInfo
    from anytron.layer import open_layer

    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SHAPES, help="default: tiny on a processor, else 0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", help="packed tokens of an update, from few to many")
    parser.add_argument("--turns", type=int, default=5, help="updates of each that count")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    arguments = parser.parse_args()
    with open_layer(engine="megatron") as layer, tempfile.TemporaryDirectory() as name:
        # What the executor gives a training rank, before torch is imported.
        os.environ |= layer.hooks.runtime_env(ProcessInfo("trainer", 0, 0, world_size=1))
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        import torch

        folder, runtime = Path(name), layer.platform.runtime()
        runtime.set_device(0)
        accelerated = layer.platform.accelerator
        size = arguments.size or ("0.6b" if accelerated else "tiny")
        tokens = arguments.tokens or ([512, 1024] if size == "tiny" else [4096, 8192, 16384, 32768])
        dtype = "bfloat16" if accelerated else "float32"
        shape = SHAPES[size]
        progress(f"a model of size {size} in {dtype} on {runtime.device_name()}")
        peak = matmul_flop_per_s(runtime, getattr(torch, dtype), 8192 if accelerated else 1024)
        parameters = write_model(folder / "model", shape, getattr(torch, dtype), runtime.current_device())
        runtime.empty_cache()
        ours = Ours(layer, folder, dtype, arguments.recompute)
        bare = Bare(ours.engine)
        rows = {}
        for total in tokens:
            progress(f"{total} tokens")
            lengths = lengths_of(total)
            found = measure(ours, bare, ours.batch(lengths, shape["vocab_size"]), runtime, arguments.turns)
            flop = model_flop(shape, parameters, lengths)
            rows[str(total)] = row(found, total, flop, peak, has_peak_bytes=accelerated)
        largest = {column: value for columns in rows.values() for column, value in columns.items()}
        ours.engine.close()
        figures = {"parameters": parameters, "matmul_flop_per_s": peak, **largest, "tokens": rows}
        report(figures, as_json=arguments.json, runtime=runtime)


if __name__ == "__main__":
    main()
