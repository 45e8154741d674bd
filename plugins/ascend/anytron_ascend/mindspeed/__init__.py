"""MindSpeed: Huawei's patches of Megatron for NPUs, restricted to what the process's engine is configured for."""
