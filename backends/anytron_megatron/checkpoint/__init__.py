"""Checkpoints of the training engine: what is saved, how it is split into files, and how it comes back.

Tensors travel through ``megatron.core.dist_checkpointing`` in the format ``torch_dist``, which knows each tensor's
place in the whole model, so that any parallel layout can read what another one wrote. Everything else is JSON and
safetensors. A checkpoint holds what training changes; frozen weights come from the model directory again.
"""
