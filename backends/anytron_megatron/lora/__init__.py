"""Low-rank adapters of Megatron's layers, in PEFT's format on disk."""
