"""Arguments that nobody would pass, for tests of what then leaves a public call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from ems import KvBufferWrapper


class Strange:
    """An object whose every protocol fails."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __len__(self) -> int:
        raise OSError("no length")

    def __iter__(self) -> Iterator[int]:
        raise KeyError("no elements")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    def __hash__(self) -> int:
        raise TypeError("no hash")

    def __index__(self) -> int:
        raise ArithmeticError("no number")

    def __bool__(self) -> bool:
        raise LookupError("neither true nor false")


class Keys(list):  # type: ignore[type-arg]
    """A list that changes while it is read."""

    def __getitem__(self, index: Any) -> Any:
        self.clear()
        raise IndexError


LIVE = [KvBufferWrapper.from_buffer(bytearray(n)) for n in (1, 64, 4096, 70_000)]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=200),
    st.binary(max_size=20),
    st.builds(object),
    st.builds(Strange),
    st.sampled_from([len, print, int, Strange, float("nan")]),
    st.builds(lambda: 10**5000),
)
WRAPPERS = st.sampled_from(LIVE)
ANYTHING = st.recursive(
    st.one_of(SCALARS, WRAPPERS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=3).map(Keys),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=12,
)
