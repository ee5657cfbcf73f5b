"""The configuration of the V1 call shape."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, TypeVar

from ems.common.argument import check_int, shown
from ems.common.boundary import public_class
from ems.common.config import InstanceConfig, check_name
from ems.common.exception import invalid_argument

__all__ = ["CcConfig_v1", "KVCacheType"]

_INT_MAX = 2**31 - 1
_MAX_ENGINE_CHARACTERS = 512
_Self = TypeVar("_Self", bound="CcConfig_v1")


class KVCacheType(str, enum.Enum):
    """How a model attends (with MLA every TP rank holds the same bytes); equals its own string."""

    GQA = "GQA"
    MHA = "MHA"
    MLA = "MLA"
    MQA = "MQA"

    def __str__(self) -> str:
        return str.__str__(self)


class _LeftOut(int):
    """The documented default of a rank, 0, that can be told from a 0 that somebody gave."""


@public_class
@dataclasses.dataclass
class CcConfig_v1(InstanceConfig):
    """Context caching by registered tensors and block hashes, "V1" (pages 0007b, 0007c).

    Args:
        rank_id: global rank of this process's device, >= 0.
        device_id: rank of the device on its node, >= 0; an identity and a hint, the device of a
            tensor is the tensor's.
        model_id: names the model, 1 to 512 printable characters; blocks of different models never
            meet.
        tp_world_size: ranks of tensor parallelism, >= 1.
        pp_world_size: ranks of pipeline parallelism, >= 1.
        rank_in_tp_group: this rank in its tensor-parallel group, >= 0. Left out (or None) it is
            `rank_id % tp_world_size`, because 0 on every rank would be one name for different
            bytes.
        rank_in_pp_group: this rank in its pipeline-parallel group, >= 0. Left out (or None) it is
            `rank_id // tp_world_size % pp_world_size`: engines number the ranks of a stage first.
        llm_engine: names the engine whose memory layout the blocks have, 1 to 512 printable
            characters.
        kvcache_type: `KVCacheType` or its name as a string.

    Checked by `Ems.init`, not here: real clients assign `kvcache_type` later.
    """

    rank_in_tp_group: int | None = _LeftOut()
    rank_in_pp_group: int | None = _LeftOut()
    llm_engine: str = "vllm"
    kvcache_type: KVCacheType | str = KVCacheType.MHA

    generation: ClassVar[int] = 1

    def checked(self: _Self, name: str) -> _Self:
        """Return a private copy with every field checked; error texts call the object `name`."""
        base = super().checked(name)
        tp, pp = base.tp_world_size, base.pp_world_size
        return dataclasses.replace(
            base,
            rank_in_tp_group=_check_rank(
                f"{name}.rank_in_tp_group", self.rank_in_tp_group, base.rank_id % tp
            ),
            rank_in_pp_group=_check_rank(
                f"{name}.rank_in_pp_group", self.rank_in_pp_group, base.rank_id // tp % pp
            ),
            llm_engine=check_name(f"{name}.llm_engine", self.llm_engine, _MAX_ENGINE_CHARACTERS),
            kvcache_type=_check_type(f"{name}.kvcache_type", self.kvcache_type),
        )


def _check_rank(name: str, value: object, default: int) -> int:
    if value is None or isinstance(value, _LeftOut):
        return default
    return check_int(name, value, 0, _INT_MAX)


def _check_type(name: str, value: object) -> KVCacheType:
    if isinstance(value, str):
        try:
            return KVCacheType(value)
        except ValueError:
            pass
    known = ", ".join(repr(member.value) for member in KVCacheType)
    raise invalid_argument(f"{name} is {shown(value)}; give one of {known}")
