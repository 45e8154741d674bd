"""Processes that run a user's rewards and environments; their failures end neither the driver nor engines."""
