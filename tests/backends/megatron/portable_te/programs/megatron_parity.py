"""One rank of Megatron models built of the portable modules, as a training rank builds them, beside Hugging Face's.

Arguments: tensor-parallel size, model directories (with ``expected.pt``: ids int64 [B, S] and logits float32
[B, S, V]). Prints JSON: of each directory, the differences of logits as parts of the largest one, of padded and of
packed sequences, and the parameters that got no gradient.
"""

import json
import sys
from pathlib import Path

from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import open_session
from anytron.device.patches import Ledger, Phase


def main(tensor_parallel, folders):
    session = open_session(platform="cpu")
    context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, session.hooks.patch_model(phase, context))

    import torch
    import transformer_engine
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams

    from anytron_megatron.models.bridge import BridgeSource
    from anytron_megatron.training.parallel import initialize

    assert HAVE_TE
    assert "portable_te" in transformer_engine.__file__
    torch.set_num_threads(1)
    sizes = ParallelSizes(tensor=tensor_parallel, sequence_parallel=tensor_parallel > 1)
    initialize(session.platform.runtime(), sizes, seed=1, timeout_s=60)

    def whole(output):
        if tensor_parallel == 1:
            return output
        parts = [torch.empty_like(output) for _ in range(tensor_parallel)]
        torch.distributed.all_gather(parts, output.contiguous())
        return torch.cat(parts, -1)

    def compare(folder):
        bridge = BridgeSource(
            folder,
            dtype=torch.float32,
            sizes=sizes,
            recompute="none",
            deterministic=False,
            predicts_ahead=False,
            transformer={},
        )
        (model,) = bridge.build(torch.device("cpu"))
        assert any(isinstance(module, TEDotProductAttention) for module in model.modules())
        expected = torch.load(folder / "expected.pt")
        ids, logits = expected["ids"], expected["logits"]
        batch, length = ids.shape
        positions = torch.arange(length).expand(batch, -1)
        cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
        packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, length, length)
        with torch.no_grad():
            padded_output = whole(model(ids, positions, None))
            packed_output = whole(model(ids.view(1, -1), positions.reshape(1, -1), None, packed_seq_params=packed))
        largest = logits.abs().max().clamp(min=1.0)
        outputs = (padded_output, packed_output.view(batch, length, -1))
        differences = [((output[..., : logits.shape[-1]] - logits).abs().max() / largest).item() for output in outputs]

        output = model(ids.view(1, -1), positions.reshape(1, -1), None, packed_seq_params=packed)
        output.float().square().sum().backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        return {"differences": differences, "without gradient": without}

    print(json.dumps({folder.name: compare(folder) for folder in folders}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
