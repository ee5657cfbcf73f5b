"""KV cache as an engine holds it: views of tensors, wrapped by their bound methods."""

from __future__ import annotations

import ctypes

import pytest

from ems_native._copy import KvBufferWrapper, Spans, copy_in, copy_out

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, TOKENS, HEADS, HEAD_SIZE = 3, 5, 16, 2, 64


def block_of(cache: object, block: int) -> list[KvBufferWrapper]:
    """Layer by layer K and V of one block: views into tensors that hold all blocks."""
    views = [layer[half, block] for layer in cache for half in (0, 1)]  # type: ignore[attr-defined]
    return [KvBufferWrapper(view.data_ptr, view.nbytes) for view in views]


def test_blocks_of_a_cache_come_back_at_other_places() -> None:
    shape = (2, BLOCKS, TOKENS, HEADS, HEAD_SIZE)
    cache = [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS)]
    other = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    nbytes = LAYERS * 2 * TOKENS * HEADS * HEAD_SIZE * 2
    pool = ctypes.create_string_buffer(2 * nbytes + 4096)
    base = ctypes.addressof(pool) + -ctypes.addressof(pool) % 4096
    places = bytearray()
    for offset in (0, nbytes):
        places += b"".join(n.to_bytes(8, "little") for n in (0, 0, offset, nbytes, 0))

    saved = Spans.from_buffers([block_of(cache, 1), block_of(cache, 4)])
    assert saved.nbytes == 2 * nbytes
    assert copy_in(saved, 0, 2, base, places, None, 0) == (2, 0)
    loaded = Spans.from_buffers([block_of(other, 0), block_of(other, 2)])
    assert copy_out(loaded, 0, 2, base, places, None, 0, True) == (2, 0)

    for layer, expected in zip(other, cache):
        assert torch.equal(layer[:, 0], expected[:, 1])
        assert torch.equal(layer[:, 2], expected[:, 4])
        assert not layer[:, [1, 3, 4]].any()
