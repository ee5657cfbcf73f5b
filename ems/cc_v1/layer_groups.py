"""Which layers belong together: the second argument of `register_kvcache`.

The published table of its fields is cut off, so this takes every shape that can mean only one
thing. All knowledge about that shape is in this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ems.common.argument import check_int, shown
from ems.common.exception import EmsException, invalid_argument

__all__ = ["parse_layer_groups"]

_NAMES = ("layers", "layer_ids", "layer_indices", "layer_idxs", "layer_list")
_WANTED = "a list with a list of layer indices for each group"


def parse_layer_groups(description: object, layers: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each group, in the order given.

    Args:
        description: None for one group of all layers; else a sequence with one element a group: a
            sequence of layer indices, or a mapping or an object with such a sequence as `layers`
            (`layer_ids`, `layer_indices`, `layer_idxs`, `layer_list`).
        layers: how many were registered.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` when it is anything else, or a layer is not in exactly
            one group.
    """
    if description is None:
        return (tuple(range(layers)),)
    name = "store_layer_group_desc"
    groups = tuple(
        _layers_of(f"{name}[{index}]", group, layers)
        for index, group in enumerate(_sequence(name, description, _WANTED))
    )
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        for layer in group:
            if layer in owner:
                raise invalid_argument(
                    f"{name}[{index}] has layer {layer}, which is in group {owner[layer]} already; "
                    "put every layer into exactly one group"
                )
            owner[layer] = index
    missing = next((layer for layer in range(layers) if layer not in owner), None)
    if missing is not None:
        raise invalid_argument(
            f"{name} has layer {missing} in no group; put each of the {layers} layers into one"
        )
    return groups


def _layers_of(name: str, group: object, layers: int) -> tuple[int, ...]:
    inner: object = None
    for field in _NAMES:
        try:
            inner = group[field] if isinstance(group, Mapping) else getattr(group, field)
        except Exception:
            continue
        name = f"{name}.{field}"
        break
    else:
        inner = group
    wanted = f"a list of layer indices, or an object that has one as {_NAMES[0]}"
    return tuple(
        check_int(f"{name}[{index}]", layer, 0, layers - 1)
        for index, layer in enumerate(_sequence(name, inner, wanted))
    )


def _sequence(name: str, value: object, wanted: str) -> Sequence[object]:
    found: Sequence[object] | None = None
    if isinstance(value, (list, tuple, range)):
        found = value
    elif not isinstance(value, (str, bytes, Mapping)):
        try:
            found = list(value.tolist())  # type: ignore[attr-defined]  # arrays and tensors
        except Exception:
            found = None
    if found is None:
        raise _bad(name, f"is {shown(value)} of type {type(value).__name__}", wanted)
    if not found:
        raise _bad(name, "is empty", wanted)
    return found


def _bad(name: str, what: str, wanted: str) -> EmsException:
    return invalid_argument(f"{name} {what}; give {wanted}")
