"""Imported before Megatron where no layer is open, or given to pytest with ``-p``: Megatron can be imported.

megatron-core 0.19 imports Triton without need; the layer's patch ``megatron.triton-imports`` lets it.
"""

from anytron_megatron.patches.triton_stand_in import CONCERNED, stand_in_during_imports

stand_in_during_imports(CONCERNED)
