"""Checkpoints of the training engine: the saved state, its division into files, and how it is loaded.

Tensors are saved with ``megatron.core.dist_checkpointing`` in the format ``torch_dist``, which records each tensor's
place in the whole model, so that a run can load a checkpoint that was saved with other parallel sizes. Everything else
is JSON and safetensors. A checkpoint holds the state that training changes; frozen weights are read from the model
directory.
"""
