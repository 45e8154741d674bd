"""The module that ``import verl`` loads. Importing it activates the plugin; no other module here acts on import.

verl imports the entry points of its group ``verl.plugins`` and calls nothing in them (``verl/__init__.py``).
"""

from anytron_verl.plugin import load

load()
