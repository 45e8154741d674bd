"""The rollout ``transformers``: generation for verl's trainers on devices without a server of verl, such as the CPU.

It lets ``main_ppo`` run as a whole, in a debugger or in CI. It is not fast: a batch is generated to its
end before the next one begins, and a replica is one process.
"""
