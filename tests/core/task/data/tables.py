"""Tables of prompts for tests."""

from anytron.task.data.columns import in_memory
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.data.table import PromptTable


def table_of(*data, name="p"):
    """Make a table of one prompt for each of some data, all with the same id."""
    return PromptTable("s", in_memory(TokenizedPrompt(name, "x", (1,), one) for one in data))
