"""Draw prompts epoch by epoch, so that each source's count is always within one prompt of its given share."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from anytron.base.errors import ConfigError
from anytron.base.seeds import derive_seed
from anytron.task.data.beginning import CLOCK, Beginning
from anytron.task.data.examples import tokenize_examples
from anytron.task.data.kept_prompts import cache_folder
from anytron.task.data.loading import load_columns, silent
from anytron.task.data.prompts import tokenize
from anytron.task.data.table import PromptFilter, PromptTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from anytron.config.data import DataSection
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.data.vision import VisionProcessor

Place = tuple[int, int]
"""Position in a source: number of completed epochs, and number of prompts drawn in the current one."""


class Mixture:
    """Prompts of one or several sources, drawn in turn.

    The source of the next prompt depends on how many prompts each source has given (Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32, 1980): with shares ``w_i`` that add up to 1, after n draws source i of k has
    given ``n * w_i`` prompts to within ``1 - 1 / (2k - 2)``. This is deterministic: every step has nearly the
    same mix, and a resume needs only the places in the sources. Each source has its own epochs.

    Args:
        tables: The sources' prompts.
        weights: Weight of each source, in any scale; None = its number of prompts, so that an epoch of the mix has
            every prompt once.
        seed: Seed of the order of every epoch of every source.
        shuffle: False = each source's own order in every epoch.

    Attributes:
        tables: The sources' prompts.
        shares: Share of each source among the drawn prompts; they add up to 1.
    """

    def __init__(
        self, tables: Sequence[PromptTable], weights: Sequence[float] | None, *, seed: int, shuffle: bool
    ) -> None:
        self.tables = tuple(tables)
        # As they are written: 0.1 and 0.3 are as 1 to 3.
        exact = [Fraction(str(weight)) for weight in weights or [len(table) for table in tables]]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        self._samplers = [
            EpochSampler(table, seed=derive_seed(seed, "mix", index) if index else seed, shuffle=shuffle)
            for index, table in enumerate(tables)
        ]

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    @property
    def places(self) -> tuple[Place, ...]:
        """The position in each source; together they are the position in the mix."""
        return tuple(sampler.place for sampler in self._samplers)

    @property
    def epochs(self) -> float:
        """Number of drawn prompts divided by the number of prompts; without weights, 1.0 is one epoch of the mix."""
        return sum(sampler.drawn for sampler in self._samplers) / len(self)

    def seek(self, places: Sequence[Place]) -> None:
        """Go to a position of a mix with the same numbers of prompts, weights and seed.

        Raises:
            ValueError: The number of sources differs, or the position lies beyond the epoch of a source.
        """
        for sampler, (epoch, position) in zip(self._samplers, places, strict=True):
            sampler.seek(epoch, position)

    def draw(self, count: int) -> list[TokenizedPrompt]:
        """Take the next ``count`` prompts."""
        drawn = [sampler.drawn for sampler in self._samplers]
        taken: list[TokenizedPrompt] = []
        for _ in range(count):
            index = next_source(drawn, self.shares)
            drawn[index] += 1
            taken += self._samplers[index].draw(1)
        return taken

    @property
    def remarks(self) -> list[str]:
        """Lines for the user: for each source, which prompts were left out; and the shares of several sources."""
        found = [table.remark for table in self.tables if table.remark]
        if len(self.tables) > 1:
            parts = [
                f"{float(share):.1%} {table.name} ({len(table)})"
                for share, table in zip(self.shares, self.tables, strict=True)
            ]
            found.append(f"mix of prompts: {', '.join(parts)}")
        return found


def next_source(drawn: Sequence[int], shares: Sequence[Fraction]) -> int:
    """Choose the source of the next draw.

    Sources that this draw would put too far ahead of their share are not chosen. Of the others, the one is chosen that
    would be the first to fall behind its share.

    Args:
        drawn: How many prompts each source has given.
        shares: Share of each source, more than 0; they add up to 1.
    """
    if len(shares) == 1:
        return 0
    slack = Fraction(1, 2 * len(shares) - 2)
    number = sum(drawn) + 1
    ready = [index for index, share in enumerate(shares) if number * share - drawn[index] >= slack]
    return min(ready, key=lambda index: (drawn[index] + 1 - slack) / shares[index])


def load_mixture(
    data: DataSection,
    tokenizer: Any,
    vision: VisionProcessor | None = None,
    *,
    beginning: Beginning | None = None,
    seed: int,
    vocab_size: int,
    context_length: int | None,
    max_new_tokens: int | None,
    key: str = "data",
    unusable: Callable[[Mapping[str, Any]], str] | None = None,
    tell: Callable[[str], None] = silent,
) -> Mixture:
    """Read, tokenise and filter the prompts of all sources.

    Args:
        data: Section ``data`` of the configuration.
        tokenizer: A Hugging Face tokenizer.
        vision: Image preprocessing; None for a model without image input.
        beginning: The time that chat templates show; None = now.
        seed: Seed of the order.
        vocab_size: Token ids are below this.
        context_length: Number of tokens that the model can see, prompt and response together; None = unlimited.
        max_new_tokens: Number of tokens to reserve for a response; None = the data contain the responses.
        key: Key of the section in the configuration.
        unusable: Function that returns why rewards cannot read a prompt's data, empty if they can; None = no check. It
            is called only with ``data.on_bad_answer=drop``.
        tell: Function that is called from time to time with a text that says how far a long source has been read.

    Raises:
        ConfigError: A source does not exist or refuses its options, or responses fill the model's context.
        DataError: A source fails, has an unusable prompt, or has no prompt left.
    """
    room = None if context_length is None else context_length - (max_new_tokens or 0)
    if room is not None and room < 1:
        raise ConfigError(
            "Responses may fill the model's whole context and leave no room for a prompt.",
            where="rollout.max_new_tokens",
            why=f"it is {max_new_tokens}, and the context has {context_length} tokens",
            fix="lower rollout.max_new_tokens, or use a model with a longer context",
        )
    limits = [limit for limit in (room, data.max_prompt_tokens) if limit is not None]
    dropped = unusable if data.on_bad_answer == "drop" else None
    wanted = PromptFilter(min(limits, default=None), set() if data.deduplicate else None, vision is not None, dropped)
    sources = data.keyed_sources(key)
    tables = []
    for place, source in sources.items():
        read: Callable[..., Iterator[TokenizedPrompt]] = tokenize_examples
        if max_new_tokens is not None:
            read = partial(tokenize, continue_final_message=data.continue_final_message)
        template = (beginning or Beginning.of(tokenizer)).arguments(data.chat_template_kwargs)
        read = partial(read, vocab_size=vocab_size, chat_template_kwargs=template)
        folder = None if CLOCK in str(template) else cache_folder(data.cache_dir)  # other prompts at each start
        columns = load_columns(source, place, read, tokenizer, vision, folder, tell)
        prefix = f"{source.title}/" if len(sources) > 1 else ""
        tables.append(PromptTable(source.title, columns, wanted, prefix))
    weights = [source.weight for source in sources.values() if source.weight is not None]
    return Mixture(tables, weights or None, seed=seed, shuffle=data.shuffle)


Item = TypeVar("Item")


class EpochSampler(Generic[Item]):
    """Draw every item once per epoch, in a different order in each epoch.

    A draw that reaches the end of an epoch continues in the next one.

    Args:
        items: Items to draw from, at least one.
        seed: Seed of the order of every epoch.
        shuffle: False = the items' own order in every epoch.
    """

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool) -> None:
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def place(self) -> tuple[int, int]:
        """Number of completed epochs, and of items drawn in the current one."""
        return self._epoch, self._position

    @property
    def drawn(self) -> int:
        """Items drawn in all epochs together."""
        return self._epoch * len(self._items) + self._position

    def seek(self, epoch: int, position: int) -> None:
        """Go to a position of a sampler with the same number of items and the same seed.

        Raises:
            ValueError: The position lies beyond the epoch.
        """
        if not 0 <= position <= len(self._items):
            raise ValueError(f"an epoch has {len(self._items)} items, so there is no position {position}")
        self._epoch, self._position, self._order = epoch, position, self._order_of(epoch)

    def draw(self, count: int) -> list[Item]:
        """Take the next ``count`` items."""
        drawn: list[Item] = []
        while len(drawn) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            taken = self._order[self._position : self._position + count - len(drawn)]
            self._position += len(taken)
            drawn.extend(self._items[index] for index in taken.tolist())
        return drawn

    def _order_of(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(len(self._items))
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "data", epoch))
        return torch.randperm(len(self._items), generator=generator)
