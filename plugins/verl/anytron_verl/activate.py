"""What ``import verl`` loads. It acts as it is imported, and is the only module here that does.

verl imports the entry points of its group ``verl.plugins`` and calls nothing in them (``verl/__init__.py``).
"""

from anytron_verl.plugin import load

load()
