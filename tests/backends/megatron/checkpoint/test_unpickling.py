"""A table of contents that another release of Python wrote."""

from __future__ import annotations

import pickle
from enum import Enum

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from anytron.errors import EngineError
from anytron_megatron.checkpoint.unpickling import read_table_of_contents


class ByAttribute(pickle._Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, one):
        return (getattr, (type(one), one.name)) if isinstance(one, Enum) else NotImplemented


class Named:
    """Pickled as an attribute of something."""

    def __init__(self, owner, name):
        self.asked = (owner, name)

    def __reduce__(self):
        return getattr, self.asked


def read(path, content):
    file = path / ".metadata"
    with file.open("wb") as stream:
        ByAttribute(stream, protocol=4).dump(Metadata({}, None, {"format": content}))
    return read_table_of_contents(file)


def test_members_of_the_enumeration_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("anytron_megatron.checkpoint.unpickling._check_place", lambda *checked: None)
    for member in _MEM_FORMAT_ENCODING:
        assert read(tmp_path, member).storage_data["format"] is member


@pytest.mark.parametrize(("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")])
def test_other_attributes_are_not(tmp_path, owner, name):
    with pytest.raises(EngineError, match=f"it takes '{name}'"):
        read(tmp_path, Named(owner, name))
