"""A running server, and a client of it in this process that is closed in the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ems import ContextCaching, Ems
from ems.testing import LocalPool


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
