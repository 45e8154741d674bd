"""The training engine ``megatron``: Hugging Face models trained with Megatron-Core and mcore-bridge.

``plugin`` and ``checks`` import no Megatron and run in the driver; ``engine`` runs in training ranks, after the
patches.
"""
