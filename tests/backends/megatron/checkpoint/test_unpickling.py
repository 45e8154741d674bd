"""A table of contents that another release of Python wrote."""

from __future__ import annotations

import pickle
from enum import Enum

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from anytron.base.errors import EngineError
from anytron_megatron.checkpoint.unpickling import read_table_of_contents


class ByAttribute(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, one):
        return (getattr, (type(one), one.name)) if isinstance(one, Enum) else NotImplemented


class Named:
    """Pickled as an attribute of something."""

    def __init__(self, owner, name):
        self.asked = (owner, name)

    def __reduce__(self):
        return getattr, self.asked


def read(path, table):
    file = path / ".metadata"
    with file.open("wb") as stream:
        ByAttribute(stream, protocol=4).dump(table)
    assert b"getattr" in file.read_bytes()
    return read_table_of_contents(file)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.preserve_format])
def test_the_entry_of_a_tensor_is_read(tmp_path, form):
    entry = TensorStorageMetadata(TensorProperties(memory_format=form), torch.Size([2]), [])

    assert read(tmp_path, Metadata({"weight": entry}, storage_data={})).state_dict_metadata == {"weight": entry}


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_other_attributes_are_refused(tmp_path, owner, name):
    with pytest.raises(EngineError, match=f"it reads the attribute '{name}'"):
        read(tmp_path, Metadata({"weight": Named(owner, name)}))
