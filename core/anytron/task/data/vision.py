"""Read the pictures of prompts, check them against the model, and let the image processor cut them into patches.

This is for models that read an image as patches with a grid (Qwen2-VL and its successors). Their processor classes need
torchvision for videos; the image processors alone need only Pillow. What a processor class adds, one image token for
each merged patch, is done here.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from anytron.base.errors import ConfigError, DataError
from anytron.base.files import exhausted
from anytron.task.data.images import ImagePatches
from anytron.task.data.model_files import composite
from anytron.task.data.pretrained import load_image_processor, logits_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.Image import Image

    from anytron.config.schema import ModelSection

MOST_PIXELS = 2**26
"""Pixels of a picture, 8192 x 8192: decoding and resizing take 20 bytes for each of them, however small the file is."""

LARGEST_FILE = 2**28
"""Most bytes of a picture's file: :data:`MOST_PIXELS` without compression, 4 bytes for each."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's decoders that are used; its other decoders start programs (EPS) or are hardly ever used."""

_GRID = ("patch_size", "temporal_patch_size", "spatial_merge_size")
"""Fields of a ``vision_config`` that say how images are cut into patches with a grid, and how many make a token."""

Picture = Union["Image", bytes, "os.PathLike[str]", str]
"""A picture in memory, the bytes of a file that Pillow can read, or its path."""


class VisionProcessor:
    """Turns pictures into patches, and repeats their tokens in a prompt as often as the model needs.

    Args:
        image_processor: A Hugging Face image processor; None refuses prompts with images.
        hf_config: The model's config, with ``vision_config`` and ``image_token_id``.
        image_token: The image token as text, for messages.

    Raises:
        ConfigError: The model's image token is out of its vocabulary, or the processor cuts other
            patches than the model reads.
    """

    def __init__(self, image_processor: Any, hf_config: Any, image_token: str) -> None:
        self._processor = image_processor
        self._image_token_id = int(hf_config.image_token_id)
        self._video_token_id = getattr(hf_config, "video_token_id", None)
        self._image_token = image_token
        self._merge = int(hf_config.vision_config.spatial_merge_size)
        _check_token(self._image_token_id, hf_config)
        if image_processor is not None:
            _check_processor(image_processor, hf_config.vision_config)

    def check_padding(self, pad_token_id: int) -> None:
        """Refuse a padding token that the model would take for an image.

        Raises:
            ConfigError: The padding token is the image or the video token.
        """
        if pad_token_id in (self._image_token_id, self._video_token_id):
            raise ConfigError(
                "The tokenizer pads with the token of an image or a video.",
                where="model.tokenizer",
                why=f"pad_token_id is {pad_token_id}, so the model would take padding for an image or a video",
                fix="set a different pad_token in the tokenizer_config.json of the tokenizer's directory",
            )

    def stands_for_pictures(self, tokens: Sequence[int]) -> bool:
        """Return whether any of the tokens stands for an image or a video."""
        return self._image_token_id in tokens or self._video_token_id in tokens

    def expand(self, tokens: Sequence[int], images: Sequence[Picture], where: str) -> tuple[int, ...]:
        """Repeat each image token as often as the model makes tokens of its image.

        Args:
            tokens: A prompt with one image token for each image.
            images: Images, in the order of their tokens; each is read and decoded.
            where: Name of the prompt in errors.

        Raises:
            DataError: Images and image tokens are not equally many, a picture cannot be read, or there
                is a video token.
            ConfigError: There are images and no image processor.
        """
        if self._video_token_id in tokens:
            raise DataError(
                "Videos are not supported.",
                where=where,
                why=f"the prompt has the video token {self._video_token_id}",
                fix="remove videos from the data, or replace them with images",
            )
        found = sum(token == self._image_token_id for token in tokens)
        if found != len(images):
            raise DataError(
                "A prompt does not have one image token for each image.",
                where=where,
                why=f"it has {len(images)} image{'' if len(images) == 1 else 's'}, but {found} times the image token "
                f"{self._image_token} ({self._image_token_id})",
                fix=f"write {self._image_token} once where each image belongs; Anytron repeats it for each patch",
            )
        counts = iter([self._count(read_picture(image, where).size, where) for image in images])
        return tuple(
            token
            for place in tokens
            for token in ([place] if place != self._image_token_id else [place] * next(counts))
        )

    def patches(self, images: Sequence[Picture], where: str) -> ImagePatches:
        """Prepare the images of one prompt.

        Args:
            images: The images, at least one.
            where: Name of the prompt in errors.

        Raises:
            DataError: A picture can no longer be read.
        """
        prepared = self._processor(images=[read_picture(image, where) for image in images], return_tensors="pt")
        return ImagePatches(prepared["pixel_values"].float(), prepared["image_grid_thw"])

    def _count(self, size: tuple[int, int], where: str) -> int:
        """Tokens of a picture: they follow from its width and height alone."""
        if self._processor is None:
            raise ConfigError(
                "There is no image processor for a prompt with images.",
                where=where,
                why="neither model.path nor model.processor has one",
                fix="set model.processor to a directory with preprocessor_config.json, or to 'file.py:function'",
            )
        given = self._processor.model_input_names
        if "image_grid_thw" not in given:
            raise ConfigError(
                "This kind of image processor is not supported.",
                where=f"model.processor ({type(self._processor).__name__})",
                why=f"it returns {', '.join(given)}, but not image_grid_thw, which Anytron requires",
                fix="use a model of the Qwen2-VL line (Qwen2.5-VL, Qwen3-VL, Qwen3.5)",
            )
        width, height = size
        try:
            patches = self._processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise DataError(
                "The image processor refuses a picture.",
                where=where,
                why=f"the picture has {width}x{height} pixels: {error}",
                fix="resize the picture, or remove the prompt",
            ) from error
        return int(patches) // self._merge**2


def lacking_sizes(hf_config: Any) -> list[str]:
    """Name the sizes of patches with a grid that a ``transformers.PretrainedConfig`` with a tower does not have.

    Anytron prepares images for a model that has all of them.
    """
    return [name for name in _GRID if not hasattr(hf_config.vision_config, name)]


def load_vision(
    model: ModelSection, hf_config: Any, tokenizer: Any, tell: Callable[[str], object]
) -> VisionProcessor | None:
    """Make the vision processor of a model; None if the model takes no images, or if Anytron cannot prepare them.

    Args:
        model: The configuration's section about the model.
        hf_config: The model's ``transformers.PretrainedConfig``.
        tokenizer: The model's Hugging Face tokenizer.
        tell: Called with a line that says why a model with a vision tower gets no images.

    Raises:
        ConfigError: ``model.processor`` or the model's own processor cannot be loaded or does not fit the model, or
            ``model.processor`` is given to a model that gets no images.
    """
    part = logits_config(hf_config)
    if any(getattr(part, name, None) is None for name in ("vision_config", "image_token_id")):
        partly = composite(Path(model.path)) is not None if model.path else False
        why = f"of {model.path} only the language model is read, a {hf_config.model_type}" if partly else None
        if model.processor is not None:
            raise ConfigError(
                "An image processor is given, but the model takes no images.",
                where="model.processor",
                why=why or f"model_type {hf_config.model_type} has no vision_config",
                fix="remove model.processor, or use a vision-language model",
            )
        if why is not None:
            tell(f"the model gets no images: {why}")
        return None
    lacking = lacking_sizes(part)
    if lacking or part is not hf_config:
        why = f"its vision_config lacks the sizes of image patches: {', '.join(lacking)}"
        if not lacking:
            why = "no test compares what its thinker makes of images, videos and sound with Hugging Face"
        if model.processor is not None:
            raise ConfigError(
                f"Images are not supported for models of model_type {hf_config.model_type}.",
                where="model.processor",
                why=why,
                fix="remove model.processor and train on text, or use a model of the Qwen2-VL line (Qwen2.5-VL, "
                "Qwen3-VL, Qwen3.5)",
            )
        tell(f"the model gets no images: {hf_config.model_type} is not supported with images, because {why}")
        return None
    image_token = tokenizer.convert_ids_to_tokens(int(hf_config.image_token_id))
    return VisionProcessor(load_image_processor(model), hf_config, str(image_token))


def pixels_of(picture: bytes, where: str) -> int:
    """Return the number of pixels of an encoded picture, without decoding them.

    Raises:
        DataError: The picture's format is not in :data:`FORMATS`, or the file is damaged.
    """
    from PIL import Image

    try:
        with _opened(io.BytesIO(picture)) as opened:
            return math.prod(opened.size)
    except Image.DecompressionBombError:  # its limit is above all of ours
        return MOST_PIXELS + 1
    except (OSError, ValueError, SyntaxError, AttributeError, TypeError) as error:
        raise exhausted(error, where) or _unreadable(where, error) from error


def read_picture(picture: Picture, where: str) -> Image:
    """Decode a picture: upright, RGB.

    Args:
        picture: A picture in memory, encoded or decoded, or its file.
        where: Name of the prompt in errors.

    Raises:
        DataError: The picture's format is not in :data:`FORMATS`, it has more than :data:`MOST_PIXELS` pixels, or the
            file is missing, damaged, or has more than :data:`LARGEST_FILE` bytes.
    """
    from PIL import Image

    try:
        if isinstance(picture, Image.Image):
            return _upright(picture)
        if not isinstance(picture, bytes) and not Path(picture).is_file():  # a pipe would be waited for
            raise FileNotFoundError("No such file, or not a regular file")
        size = len(picture) if isinstance(picture, bytes) else Path(picture).stat().st_size
        if size > LARGEST_FILE:
            raise ValueError(f"it has {size} bytes, but the limit is {LARGEST_FILE}")  # noqa: TRY301 - one way to say it
        with _opened(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as opened:
            return _upright(opened)
    except (OSError, ValueError, SyntaxError, AttributeError, TypeError, Image.DecompressionBombError) as error:
        named = picture if isinstance(picture, (str, os.PathLike)) else type(picture).__name__
        raise exhausted(error, where) or _unreadable(f"{where}, {named}", error) from error


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(
        "An image cannot be read.",
        where=where,
        why=f"{type(error).__name__}: {error}",
        fix="give PIL images or paths of picture files; paths in a data file are relative to the option "
        "`image_folder`, or by default to the folder of the data file",
    )


def _opened(file: Any) -> Image:
    """Open a picture, whose pixels are not decoded yet."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its limit is above ours
        return Image.open(file, formats=FORMATS)


def _upright(picture: Image) -> Image:
    from PIL import ImageOps

    if 0 in picture.size:
        raise ValueError("it has no pixels")
    if (pixels := math.prod(picture.size)) > MOST_PIXELS:
        raise ValueError(f"it has {pixels} pixels, but the limit is {MOST_PIXELS}; make it smaller")
    return ImageOps.exif_transpose(picture).convert("RGB")


def _check_token(image_token_id: int, hf_config: Any) -> None:
    vocab_size = hf_config.get_text_config().vocab_size
    if not 0 <= image_token_id < vocab_size:
        raise ConfigError(
            "The model's image token is outside of its vocabulary.",
            where="image_token_id of the model's config",
            why=f"it is {image_token_id}, but the vocabulary has {vocab_size} tokens",
            fix="correct image_token_id, or vocab_size in text_config, in the model's config.json",
        )


def _check_processor(processor: Any, vision_config: Any) -> None:
    """Refuse a processor whose patches the vision tower would misread."""
    for name, needed in _patch_sizes(vision_config):
        found = getattr(processor, name, None)
        if found is not None and found != needed:
            raise ConfigError(
                "The image processor does not match the model.",
                where="model.processor",
                why=f"its {name} is {found}, but the model's vision_config has {needed}",
                fix=f"set {name} to {needed} in the processor's preprocessor_config.json, or set model.processor to "
                "the processor that belongs to the model",
            )


def _patch_sizes(vision_config: Any) -> Iterator[tuple[str, int]]:
    yield "patch_size", vision_config.patch_size
    yield "temporal_patch_size", vision_config.temporal_patch_size
    yield "merge_size", vision_config.spatial_merge_size
