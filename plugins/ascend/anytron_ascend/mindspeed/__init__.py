"""MindSpeed: Huawei's patches of Megatron for NPUs, kept to what this process's engine was configured for."""
