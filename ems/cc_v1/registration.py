"""What `register_kvcache` leaves behind: where the engine's KV memory is and what it means.

Immutable: registering again makes a new one, and calls under way keep theirs. Moves no data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.cc_v1.layer_groups import parse_layer_groups
from ems.client.stripes import Share
from ems.common.argument import wrong_type
from ems.common.config import InstanceConfig
from ems.common.exception import invalid_argument
from ems.common.key import BlockIdentity, BlockSpace, ComponentShape
from ems.devices.tensor import TensorMemory, describe_tensor
from ems_native._plan import Pages

__all__ = ["Instance", "LayerGroup", "Registration", "instance_of", "register"]


@dataclasses.dataclass(frozen=True)
class Instance:
    """Who the process is among the ranks of its instance."""

    tenant: str | None
    model_id: str
    llm_engine: str
    kvcache_type: KVCacheType
    tp_world_size: int
    pp_world_size: int
    rank_in_tp_group: int
    rank_in_pp_group: int

    @property
    def share(self) -> Share | None:
        """With whom saves are shared; None when this rank's bytes are its own."""
        if self.kvcache_type is not KVCacheType.MLA or self.tp_world_size == 1:
            return None
        return Share(self.rank_in_tp_group % self.tp_world_size, self.tp_world_size)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers whose bytes are one entry of the pool per chunk."""

    pages: Pages
    hashed: BlockSpace  # blocks that the engine hashed
    tokened: BlockSpace  # blocks that this library hashed


@dataclasses.dataclass(frozen=True)
class Registration:
    """Registered tensors, kept alive, and the groups of their layers."""

    tensors: object
    device: str
    groups: tuple[LayerGroup, ...]
    share: Share | None


def instance_of(tenant: str | None, config: InstanceConfig) -> Instance:
    """Return who the process is, from a checked configuration of either generation."""
    if isinstance(config, CcConfig_v1):
        v1 = config
    else:
        # A V0 configuration, with what V1 would take as defaults.
        v1 = CcConfig_v1(
            rank_id=config.rank_id,
            device_id=config.device_id,
            model_id=config.model_id,
            tp_world_size=config.tp_world_size,
            pp_world_size=config.pp_world_size,
        ).checked("config")
    assert v1.rank_in_tp_group is not None and v1.rank_in_pp_group is not None
    return Instance(
        tenant=tenant,
        model_id=v1.model_id,
        llm_engine=v1.llm_engine,
        kvcache_type=KVCacheType(v1.kvcache_type),
        tp_world_size=v1.tp_world_size,
        pp_world_size=v1.pp_world_size,
        rank_in_tp_group=v1.rank_in_tp_group,
        rank_in_pp_group=v1.rank_in_pp_group,
    )


def register(instance: Instance, kvcache: object, description: object) -> Registration:
    """Describe registered tensors.

    Args:
        instance: whose they are.
        kvcache: `[layer][component]` tensors.
        description: of the layer groups, or None.

    Raises:
        EmsException: `EMS_INVALID_ARGUMENT` naming layer and component.
    """
    layers = _describe(kvcache)
    first = layers[0][0]
    shapes = tuple(
        tuple(ComponentShape(t.block_size, t.heads, t.head_size, t.dtype) for t in layer)
        for layer in layers
    )
    groups = tuple(
        _group(instance, layers, shapes, members)
        for members in parse_layer_groups(description, len(layers))
    )
    return Registration(
        tensors=tuple(tuple(layer) for layer in kvcache),  # type: ignore[attr-defined]
        device=first.device,
        groups=groups,
        share=instance.share,
    )


def _describe(kvcache: Any) -> list[list[TensorMemory]]:
    wanted = "a list with a list of tensors for each layer"
    if not isinstance(kvcache, (list, tuple)):
        raise wrong_type("kvcache", kvcache, wanted)
    if not kvcache:
        raise invalid_argument(f"kvcache is empty; give {wanted}")
    layers: list[list[TensorMemory]] = []
    for index, layer in enumerate(kvcache):
        name = f"kvcache[{index}]"
        if not isinstance(layer, (list, tuple)):
            raise invalid_argument(
                f"{name} is of type {type(layer).__name__}; give the list of its component tensors"
            )
        if not layer:
            raise invalid_argument(f"{name} is empty; give at least one component tensor")
        layers.append([describe_tensor(f"{name}[{at}]", one) for at, one in enumerate(layer)])
        for at, one in enumerate(layers[-1]):
            if one.device != layers[0][0].device:
                raise invalid_argument(
                    f"{name}[{at}] is on device {one.device}, kvcache[0][0] on "
                    f"{layers[0][0].device}; all tensors must be on one device"
                )
    return layers


def _group(
    instance: Instance,
    layers: list[list[TensorMemory]],
    shapes: tuple[tuple[ComponentShape, ...], ...],
    members: tuple[int, ...],
) -> LayerGroup:
    first = layers[members[0]][0]
    components: list[tuple[int, int, int]] = []
    for layer in members:
        for at, one in enumerate(layers[layer]):
            for field in ("num_blocks", "block_size"):
                have, wanted = getattr(one, field), getattr(first, field)
                if have != wanted:
                    raise invalid_argument(
                        f"kvcache[{layer}][{at}] has {field} {have}, kvcache[{members[0]}][0] "
                        f"{wanted}; both must agree in a layer group, so put the layers into "
                        "different groups (store_layer_group_desc)"
                    )
            components.append((one.address, one.block_stride, one.token_bytes))
    identity = BlockIdentity(
        tenant=instance.tenant,
        model_id=instance.model_id,
        llm_engine=instance.llm_engine,
        kvcache_type=instance.kvcache_type.value,
        tp_world_size=instance.tp_world_size,
        pp_world_size=instance.pp_world_size,
        # With MLA all ranks of a tensor-parallel group hold the same bytes, and share them.
        rank_in_tp_group=(
            None if instance.kvcache_type is KVCacheType.MLA else instance.rank_in_tp_group
        ),
        rank_in_pp_group=instance.rank_in_pp_group,
        layers=shapes,
        group=members,
    )
    return LayerGroup(
        pages=Pages(first.num_blocks, first.block_size, components),
        hashed=BlockSpace(identity),
        tokened=BlockSpace(dataclasses.replace(identity, naming="token")),
    )
