"""The rollout ``transformers``: generation for verl's trainers where none of its servers runs, as on a processor.

It is there so that ``main_ppo`` runs as a whole, in a debugger or in CI. It is not fast: a batch is generated to its
end before the next one begins, and a replica is one process.
"""
