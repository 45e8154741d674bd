"""Run micro-batches through a Megatron model: score, update."""
