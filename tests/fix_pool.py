"""A running server, and a client of it in this process that is closed in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from ems import ContextCaching, Ems
from ems.common.deadline import Deadline
from ems.rpc._pb.ems.v1 import StatusReply
from ems.rpc.channel import PoolChannel
from ems.testing import LocalPool


def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def status_of(pool: LocalPool) -> StatusReply:
    """What the server says of its pool."""

    async def ask() -> StatusReply:
        async with PoolChannel(pool.root) as channel:
            return await channel.status(Deadline.after_ms(2000))

    return asyncio.run(ask())


@pytest.fixture
def local_pool() -> Iterator[LocalPool]:
    with LocalPool(capacity="64MiB") as pool:
        yield pool


@pytest.fixture
def cc(local_pool: LocalPool) -> Iterator[ContextCaching]:
    Ems.init(local_pool.config)
    found = Ems.get_cc()
    assert found is not None
    yield found
    Ems.close()
