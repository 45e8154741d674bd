"""The section ``data``: where prompts come from, how sources are mixed, and the options of registered sources."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from anytron.config.section import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

_TEMPLATE_ARGUMENTS = (
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "messages",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
    "truncation",
)
"""Arguments of ``apply_chat_template`` that Anytron sets itself: they select the result or come from the prompt."""


class ReadingOptions(Section):
    """How a row becomes a prompt."""

    path: str = Field(min_length=1)
    """A file, or a pattern for several files (``train-*.parquet``), which are read in the order of their names; for
    ``dataset``, a folder written by ``Dataset.save_to_disk`` or an ``.arrow`` file. Relative to the YAML file."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns by their use: ``{prompt: question, answer: solution}``. ``prompt`` is a text, a list of messages (with
    ``role`` and ``content``) or of token ids; ``id`` names the prompt; ``images`` are paths or pictures; ``tools`` are
    shown by the chat template. Any other name becomes an entry of the prompt's data, which rewards read. A dot reaches
    into a column, ``reward_model.ground_truth``. Columns that are named here must be in every row, and so
    must ``prompt``. With ``algorithm.name=sft``, ``response`` is the text to learn: a text or a list of token ids;
    without this column, the assistant's messages in a ``prompt`` that is a conversation are learnt."""
    chat: bool = False
    """Turn a prompt that is text into a user's message, with images before the text, so that the chat template is
    applied."""
    system: str | None = None
    """With ``chat``: a system message at the beginning of conversations that have none."""
    image_folder: str | None = None
    """Paths of images are relative to this folder, and must not leave it; default: the data file's folder. Relative
    to the YAML file."""

    @model_validator(mode="after")
    def _system_of_a_chat(self) -> ReadingOptions:
        if self.system is not None and not self.chat:
            raise ValueError("system is a message of a conversation, so it needs chat=true: set chat, or remove system")
        return self


class DatasetOptions(ReadingOptions):
    """How a row of a Hugging Face dataset becomes a prompt."""

    split: str | None = None
    """The split to read, if the dataset has several."""


class ImagesOptions(Section):
    """How a picture becomes a prompt."""

    path: str = Field(min_length=1)
    """The folder of the pictures, subfolders included. Relative to the YAML file. Rewards find the name of a picture's
    subfolder as ``label``, and its path as ``file``."""
    prompt: str = Field(min_length=1)
    """The question about every picture."""
    chat: bool = True
    """Put picture and question into a user's message, for the chat template; otherwise ``prompt`` must contain
    the image token."""
    system: str | None = None
    """With ``chat``: a system message before the user's message."""


SOURCE_OPTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {
        "jsonl": ReadingOptions,
        "csv": ReadingOptions,
        "parquet": ReadingOptions,
        "dataset": DatasetOptions,
        "images": ImagesOptions,
    }
)
"""Options of the registered sources by their names."""
OPTION_PATHS = ("path", "image_folder")
"""Options of registered sources that are paths."""


class MixedSource(Section):
    """One of several sources whose prompts are mixed."""

    source: str
    """As ``data.source``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """As ``data.options``."""
    weight: float | None = Field(None, gt=0.0)
    """Share of the source in the prompts drawn, relative to the weights of the other sources; null for all sources =
    shares by size, so that an epoch of the mix has every prompt once."""
    name: str | None = Field(None, min_length=1)
    """Prefix of the ids of the source's prompts; default: the name of the source's file or function."""

    @property
    def title(self) -> str:
        """The source's name in messages and ids: ``name``, or by default the name of its file or function."""
        path = self.options.get("path")
        return self.name or Path(path if isinstance(path, str) and ":" not in self.source else self.source).name


class DataSection(Section):
    """The sources of prompts."""

    source: str | None = None
    """``jsonl``, ``csv``, ``parquet``, ``dataset`` (Hugging Face's, from disk), ``images`` (a folder of pictures),
    ``reasoning_gym`` (procedural tasks), or ``module:function`` / ``file.py:function`` that returns prompts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source; the options of registered sources are listed below."""
    mix: list[MixedSource] = Field(default_factory=list)
    """Instead of ``source``: several sources. After any number of draws, each has supplied its share to
    within one prompt."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts sampled for each training step, over all ranks; with ``algorithm.name=sft`` the examples of an update."""
    shuffle: bool = True
    """Draw the prompts of a source in a random order, new in each epoch; the order follows from ``trainer.seed``."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are left out and counted. Whatever this limit, prompts that leave no room for
    ``rollout.max_new_tokens`` in the model's context are left out and counted too. Image tokens count. With
    ``algorithm.name=sft`` the limit and the context apply to prompt and response together."""
    deduplicate: bool = False
    """Leave out prompts with the same tokens and images as an earlier prompt of any source, and count them."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, for example ``{enable_thinking: false}`` for Qwen3."""

    continue_final_message: bool = False
    """Let the response continue the last message of a conversation if it is the assistant's. Otherwise a prompt that
    ends with such a message is an error, because the template would begin a second answer after it."""
    on_bad_answer: Literal["error", "drop"] = "error"
    """What happens to prompts whose right answer a reward cannot read (null, missing, empty or not a text). ``error``
    names and counts them before an engine is built, since the usual cause is a wrong column; ``drop`` leaves them out
    and counts them."""

    cache_dir: str | None = Field("auto", min_length=1)
    """Folder in which the tokenised prompts of large files are kept (in ``anytron-prompts``), so that later starts need
    not tokenise them again, and memory need not hold them: from 20,000 text prompts of a source. ``auto`` =
    ``$XDG_CACHE_HOME``, which is ``~/.cache`` by default. A file, tokenizer, template or option that has changed is
    noticed. Prompts that no run has started with for 30 days are deleted. null = they are tokenised at each start."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(set(given) & set(_TEMPLATE_ARGUMENTS)):
            raise ValueError(f"Anytron itself sets {', '.join(taken)}: remove {'it' if len(taken) == 1 else 'them'}")
        return given

    @model_validator(mode="after")
    def _one_kind_of_source(self) -> DataSection:
        if (self.source is None) == (not self.mix):
            raise ValueError("give exactly one of data.source and data.mix")
        if self.mix and self.options:
            raise ValueError("data.options are the options of data.source: in a mix, give each source its own options")
        if len({one.weight is None for one in self.mix}) > 1:
            raise ValueError("give a weight to every source of data.mix, or to no source")
        titles = [one.title for one in self.mix]
        if twice := sorted({title for title in titles if titles.count(title) > 1}):
            raise ValueError(
                f"sources of data.mix have the same name, {', '.join(twice)}: set a different name for each"
            )
        return self

    def keyed_sources(self, key: str = "data") -> dict[str, MixedSource]:
        """The sources by their keys in the configuration, such as ``data.mix.0``; ``key`` is this section's key."""
        if self.source is not None:
            return {key: MixedSource(source=self.source, options=self.options)}
        return {f"{key}.mix.{index}": one for index, one in enumerate(self.mix)}
