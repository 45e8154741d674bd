"""The name under which the engine, its plugin and its patches are known."""

ENGINE = "megatron"
