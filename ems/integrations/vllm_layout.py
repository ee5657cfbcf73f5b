"""What a block of vLLM's KV cache is made of, and everything that changes what its bytes mean.

A cache is described by its strides, not its shape: vLLM has six orders of layers, blocks, heads,
tokens and content, and a CPU kernel packs K and V in an order of its own inside a page.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ems import KvPages

__all__ = ["layout_text", "model_identity", "pages_of"]

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def pages_of(name: str, tensor: Any, num_blocks: int) -> tuple[list[KvPages], list[int]]:
    """Return where the parts of a block of one layer lie, in the order of their addresses.

    Args:
        name: of the layer, for error texts.
        tensor: its KV cache.
        num_blocks: of the cache; one dimension of the tensor has this size.

    Returns:
        The pages, and the shape of what one block is (for the layout): sizes by falling stride, the
        block left out.

    Raises:
        ValueError: no dimension of the tensor can be the block.
    """
    item = int(tensor.element_size())
    dims = [(int(s) * item, int(n)) for n, s in zip(tensor.shape, tensor.stride())]
    blocks = [at for at, (_, size) in enumerate(dims) if size == num_blocks]
    if not blocks:
        raise ValueError(
            f"the KV cache of {name} has shape {list(tensor.shape)}; none of its dimensions has "
            f"{num_blocks}, the number of blocks"
        )
    stride, _ = dims.pop(blocks[0])
    inner = sorted((s, n) for s, n in dims if n > 1)
    run = item
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    device = str(tensor.device)
    pages = [
        KvPages(int(tensor.data_ptr()) + offset, num_blocks, stride, run, device, tensor)
        for offset in sorted(_offsets(inner))
    ]
    return pages, [n for _, n in sorted(dims, reverse=True)] + [run]


def _offsets(dims: list[tuple[int, int]]) -> Iterator[int]:
    if not dims:
        yield 0
        return
    stride, size = dims[0]
    for rest in _offsets(dims[1:]):
        for at in range(size):
            yield rest + at * stride


def layout_text(facts: Mapping[str, object]) -> str:
    """Return facts as one text, the same for equal facts in any process."""
    return json.dumps(facts, sort_keys=True, default=str)


def model_identity(model: str, revision: str | None) -> str:
    """Return what tells one set of weights from another.

    A folder of this machine is told by its files: names, sizes, configuration and samples of the
    weights, a few milliseconds; a name of a hub by itself and its revision.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'default'}"
    seen = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        weights = path.suffix in _WEIGHTS
        if not path.is_file() or not (weights or path.name == "config.json"):
            continue
        size = path.stat().st_size
        seen.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            last = max(0, size - _SAMPLE_BYTES)
            for sample in range(_SAMPLES if weights else 1):
                file.seek(last * sample // max(1, _SAMPLES - 1))
                seen.update(file.read(_SAMPLE_BYTES if weights else size))
    return f"{os.path.basename(os.path.abspath(folder))}#{seen.hexdigest()}"
