"""verl on the platforms of Anytron, without a change of verl and without an import in the user's script.

When verl is imported, it loads the entry points of the group ``verl.plugins``, one of which is
:mod:`anytron_verl.activate`. This opens Anytron's device stack in the process and makes its platform verl's platform.
When verl chooses an engine, it gets its own Megatron engines with the device stack's phases around them, and with
Anytron's layouts and masks.
"""

PLATFORM = "anytron"
"""verl's name of the platform, and of the vendor of its engines."""
CHOICE = "VERL_PLATFORM"
"""Environment variable with which verl's users choose a platform."""
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
"""Environment variable with which verl's users choose plugins: ``auto``, ``none``, or names."""
ROLLOUT = "transformers"
"""The value of ``actor_rollout_ref.rollout.name`` that selects :mod:`anytron_verl.rollout`."""
GROUP = "verl.plugins"
"""The entry-point group of verl's plugins."""
SUPPORTED = ">=0.9.1,<0.10"
"""Releases of verl that the plugin was tested with."""
REPORT = "ANYTRON_VERL_REPORT"
"""Environment variable that names a directory, in which each process with an engine writes what Anytron has patched."""
