"""Whatever comes in on the control plane: a reply or a status, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from fix_serve import ServeProcess, status_of
from fuzz import bounded
from grpclib.client import Channel
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from hypothesis import given
from hypothesis import strategies as st

from ems.rpc._pb.ems.v1 import (
    AttachRequest,
    ChallengeRequest,
    DetachRequest,
    ProbeRequest,
    StatusRequest,
)
from ems.shm import layout
from ems_native._index import ABI_VERSION, LAYOUT

METHODS = {
    "Challenge": ChallengeRequest,
    "Attach": AttachRequest,
    "Detach": DetachRequest,
    "Status": StatusRequest,
    "Probe": ProbeRequest,
}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes(3) + b"\x04" + bytes(5)
CALL_S = 5.0

numbers = st.one_of(
    st.sampled_from([0, 1, int(ABI_VERSION), int(LAYOUT["LAYOUT_VERSION"]), 1023, 1024]),
    st.sampled_from([-1, -(1 << 31), -(1 << 63), (1 << 32) - 1, 1 << 32, (1 << 64) - 1]),
)
texts = st.one_of(st.text(max_size=8), st.just("x" * 100_000))
blobs = st.one_of(st.binary(max_size=33), st.just(bytes(16)), st.just(bytes(100_000)))
VALUES: dict[Any, st.SearchStrategy[Any]] = {int: numbers, str: texts, bytes: blobs}


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, bytes]:
    """A method and the bytes of a request whose fields hold anything."""
    method = draw(st.sampled_from(sorted(METHODS)))
    request = METHODS[method]()
    if method == "Attach" and draw(st.booleans()):
        # So that what comes behind the check of the versions is seen too.
        request.abi_version, request.layout_version = ABI_VERSION, LAYOUT["LAYOUT_VERSION"]
    for field in dataclasses.fields(request):
        if draw(st.booleans()) and not field.name.endswith("_version"):
            setattr(request, field.name, draw(VALUES[field.type]))
    return method, bytes(request)


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, bytes]:
    """The same, with bytes that belong to no message; or bytes alone."""
    method, good = draw(messages())
    if draw(st.booleans()):
        return method, draw(st.binary(max_size=60))
    data = bytearray(good[:200] or b"\0")
    for _ in range(draw(st.integers(1, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return method, bytes(data)


@st.composite
def connections(draw: st.DrawFn) -> bytes:
    """Bytes of a connection: none that HTTP/2 knows, or frames of any type, flags and stream."""
    if draw(st.booleans()):
        return draw(st.sampled_from([b"", PREFACE, PREFACE + SETTINGS])) + draw(
            st.binary(max_size=200)
        )
    said = PREFACE + SETTINGS
    for _ in range(draw(st.integers(1, 5))):
        payload = draw(st.binary(max_size=40))
        length = draw(st.sampled_from([len(payload), len(payload), 0, 1 << 14, (1 << 24) - 1]))
        said += (
            length.to_bytes(3, "big")
            + bytes([draw(st.integers(0, 10)), draw(st.integers(0, 255))])
            + draw(st.sampled_from([0, 1, 2, 3, (1 << 31) - 1])).to_bytes(4, "big")
            + payload
        )
    return said


class _Raw:
    """Requests go out as the bytes they are; replies are not looked into."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type) -> bytes:
        return message

    def decode(self, data: bytes, message_type: type) -> bytes:
        return data


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    folder = tempfile.mkdtemp(prefix="ems-test-", dir="/dev/shm")
    process = ServeProcess(os.path.join(folder, "root"), "--capacity", "16MiB")
    try:
        yield process.wait_until_serving()
    finally:
        process.close()
        shutil.rmtree(folder)


def ask(root: str, method: str, data: bytes) -> Status:
    async def call() -> Status:
        channel = Channel(path=os.path.join(root, layout.SOCKET), codec=_Raw())
        try:
            async with channel.request(
                f"/ems.v1.Pool/{method}", Cardinality.UNARY_UNARY, bytes, bytes
            ) as stream:
                await stream.send_message(data, end=True)
                await stream.recv_message()
        except GRPCError as error:
            return error.status
        finally:
            channel.close()
        return Status.OK

    return asyncio.run(asyncio.wait_for(call(), CALL_S))


@bounded(80)
@given(messages())
def test_fields_that_hold_anything(server: ServeProcess, message: tuple[str, bytes]) -> None:
    # A status of ours, never one that stands for an error nobody expected.
    assert ask(server.root, *message) not in (Status.UNKNOWN, Status.INTERNAL)
    assert server.process.poll() is None


@bounded(60)
@given(spoiled())
def test_messages_that_are_none(server: ServeProcess, message: tuple[str, bytes]) -> None:
    with contextlib.suppress(StreamTerminatedError, ProtocolError, ConnectionError):
        ask(server.root, *message)
    assert status_of(server.root).state == "serving"


@bounded(80)
@given(connections())
def test_connections_that_are_none(server: ServeProcess, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CALL_S)
        sock.connect(os.path.join(server.root, layout.SOCKET))
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    assert status_of(server.root).state == "serving"


def test_nothing_was_left_of_it(server: ServeProcess) -> None:
    status = status_of(server.root)
    assert status.reserved == 0
    assert status.used == 0
    assert len(os.listdir(f"/proc/{server.pid}/fd")) < 60
