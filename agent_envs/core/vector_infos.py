"""Batch the infos of the members of a vector environment.

As Gymnasium does (`VectorEnv._add_info`): under each key an array with a place for each member, and
under ``_key`` a mask that says who has one; dictionaries recursively. But what does not go into one
array becomes an array of objects, where Gymnasium raises, or cuts 0.5 to 0 without a word. That is
an everyday case here: models write the arguments of tool calls, under one name a number in one
member, a text or a dictionary in another.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def add_info(
    infos: dict[str, Any], info: Mapping[str, Any], number: int, size: int
) -> dict[str, Any]:
    """Put the info of member `number` of `size` into the batched `infos`, and return them."""
    for key, value in info.items():
        column = infos.get(key)
        mask = infos.get(f"_{key}", np.zeros(size, np.bool_))
        if key != "final_obs" and _has_columns(value) and isinstance(column, dict | None):
            column = add_info({} if column is None else column, value, number, size)
        else:
            if column is None:
                column = _objects(size) if key == "final_obs" else _column_for(value, size)
            elif not _can_hold(column, value):
                column = _as_objects(column, mask)
            column[number] = value
        mask[number] = True
        infos[key], infos[f"_{key}"] = column, mask
    return infos


def _has_columns(value: Any) -> bool:
    """Return whether a value is a dictionary whose keys cannot be taken for masks."""
    return isinstance(value, dict) and all(
        isinstance(key, str) and not key.startswith("_") for key in value
    )


def _column_for(value: Any, size: int) -> npt.NDArray[Any]:
    if type(value) is int and not -(2**63) <= value < 2**63:
        return _objects(size)
    if type(value) in (int, float, bool) or isinstance(value, np.number):
        return np.zeros(size, type(value))
    if isinstance(value, np.ndarray):
        return np.zeros((size, *value.shape), value.dtype)
    return _objects(size)


def _objects(size: int) -> npt.NDArray[Any]:
    return np.full(size, None, object)


def _can_hold(column: Any, value: Any) -> bool:
    if isinstance(column, dict):
        return False
    like = _column_for(value, 0)
    if column.dtype == object and column.ndim == 1:
        return True
    return bool(column.dtype == like.dtype and column.shape[1:] == like.shape[1:])


def _as_objects(column: Any, mask: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    objects = _objects(len(mask))
    for number in np.flatnonzero(mask).tolist():
        objects[number] = _value_of(column, number)
    return objects


def _value_of(column: Any, number: int) -> Any:
    """Return what was put into a column for a member."""
    if isinstance(column, dict):
        names = [name for name in column if f"_{name}" in column and column[f"_{name}"][number]]
        return {name: _value_of(column[name], number) for name in names}
    value = column[number]
    return value.item() if isinstance(value, np.generic) else value
