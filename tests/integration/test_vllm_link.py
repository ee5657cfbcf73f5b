"""The client behind the vLLM connector over the life of a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ems import Ems, EmsErrorCode, EmsException
from ems.integrations.vllm_link import Link
from ems.integrations.vllm_settings import Settings
from ems.testing import LocalPool


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    with LocalPool("32MiB") as pool:
        yield pool
        Ems.close()


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def settings(pool: LocalPool) -> Settings:
    return Settings(root=pool.root, probe_interval_s=0.05)


def test_a_server_that_comes_later_is_found(pool: LocalPool) -> None:
    pool.kill()
    link = Link(settings(pool))
    assert link.caching is None
    pool.start()
    until(lambda: link.caching is not None)
    until(lambda: "ems-vllm" not in [thread.name for thread in threading.enumerate()])
    link.close()


def test_a_failure_turns_one_direction_off_until_the_server_is_well(pool: LocalPool) -> None:
    link = Link(settings(pool))
    assert link.caching is not None
    pool.kill()
    until(lambda: not Ems.check_health())
    link.failed(link.saves, EmsException(EmsErrorCode.EMS_IO_ERROR, "no server"))
    assert link.saves.is_open and not link.loads.is_open
    time.sleep(0.3)
    assert link.saves.is_open
    pool.start()
    until(lambda: not link.saves.is_open)
    link.close()


def test_two_halves_in_one_process_share_the_client(pool: LocalPool) -> None:
    one, two = Link(settings(pool)), Link(settings(pool))
    assert one.caching is two.caching is not None
    one.close()
    two.close()
