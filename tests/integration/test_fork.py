"""In a forked child every call says so, and the child owns nothing of its parent's."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from client_bench import Buffers, pattern
from fix_pool import status_of, wait_until

from ems import CcResult, ContextCaching, Ems, EmsConfig, EmsErrorCode, EmsException
from ems.testing import LocalPool

NBYTES = 100_000


def in_child(program: Callable[[], object]) -> None:
    """Run in a fork; what it prints or raises there fails the test here."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            program()
            text = "fine"
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[-8000:])
        os._exit(0)
    os.close(writer)
    answer = b""
    while more := os.read(reader, 8192):
        answer += more
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert (answer.decode(), status) == ("fine", 0)


def one(key: object) -> Buffers:
    return Buffers([pattern(key, NBYTES)])


def test_every_call_says_fork(cc: ContextCaching, local_pool: LocalPool) -> None:
    source, target = one("k"), Buffers.empty([NBYTES])
    cc.save(None, ["k"], source.value_list)
    done = cc.async_load(None, ["k"], target.value_list)
    done.result()

    def child() -> None:
        for call in (
            lambda: cc.save(None, ["k"], source.value_list),
            lambda: cc.load(None, ["k"], target.value_list),
            lambda: cc.async_save(None, ["k"], source.value_list),
            lambda: cc.async_load(None, ["k"], target.value_list),
            Ems.get_cc,
            Ems.stats,
        ):
            try:
                call()
            except EmsException as error:
                assert error.status_code() is EmsErrorCode.EMS_INTERNAL_ERROR, error
                assert "fork" in str(error)
            else:
                raise AssertionError(f"{call} went through")
        # Clients take any error of these two for a fault of their own.
        assert Ems.check_health() is False
        assert cc.is_ready(done) is True
        Ems.close()

    in_child(child)
    # The parent has not noticed.
    assert cc.load(None, ["k"], target.value_list) == CcResult(1, 1)
    assert cc.save(None, ["k"], source.value_list) == CcResult(1, 1)
    assert Ems.check_health() is True


def test_a_future_of_the_parent_never_blocks_the_child(cc: ContextCaching) -> None:
    import threading

    from ems.future import CcFuture

    pending = CcFuture(cc._client._home, lambda: None)

    def child() -> None:
        for call in (pending.result, pending.cancel, lambda: cc.get_result(pending)):
            try:
                call()
            except EmsException as error:
                assert "fork" in str(error)
            else:
                raise AssertionError("it went through")
        assert cc.is_ready(pending) is False

    in_child(child)
    assert threading.active_count() > 1


def test_the_child_may_have_its_own(cc: ContextCaching, local_pool: LocalPool) -> None:
    config: EmsConfig = local_pool.config
    source = one("k")
    cc.save(None, ["k"], source.value_list)

    def child() -> None:
        Ems.init(config)
        mine = Ems.get_cc()
        assert mine is not None and mine is not cc
        target = Buffers.empty([NBYTES])
        assert mine.load(None, ["k"], target.value_list) == CcResult(1, 1)
        assert target.value(0) == pattern("k", NBYTES)
        assert mine.save(None, ["c"], one("c").value_list) == CcResult(1, 1)
        assert mine.async_load(None, ["c"], target.value_list).result() == CcResult(1, 1)
        assert Ems.check_health() is True
        try:
            cc.load(None, ["k"], target.value_list)  # still the parent's
        except EmsException as error:
            assert "fork" in str(error)
        else:
            raise AssertionError("the parent's object works in the child")
        # And so may a grandchild.
        in_child(lambda: grandchild(mine))
        Ems.close()

    def grandchild(of_child: ContextCaching) -> None:
        try:
            Ems.get_cc()
        except EmsException as error:
            assert "fork" in str(error)
        else:
            raise AssertionError("a grandchild inherited an object")
        Ems.init(config)
        mine = Ems.get_cc()
        assert mine is not None
        assert mine.load(None, ["c"], Buffers.empty([NBYTES]).value_list) == CcResult(1, 1)
        Ems.close()

    in_child(child)
    target = Buffers.empty([NBYTES])
    assert cc.load(None, ["c"], target.value_list) == CcResult(1, 1)
    assert target.value(0) == pattern("c", NBYTES)


def test_a_child_of_a_process_without_a_client_is_like_any_process(
    local_pool: LocalPool,
) -> None:
    def child() -> None:
        assert Ems.get_cc() is None
        Ems.init(local_pool.config)
        assert Ems.get_cc() is not None
        Ems.close()

    in_child(child)


def test_the_session_ends_with_the_parent_though_a_child_lives(local_pool: LocalPool) -> None:
    Ems.init(local_pool.config)
    cc = Ems.get_cc()
    assert cc is not None
    cc.save(None, ["k"], one("k").value_list)  # there is a write connection to inherit
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        Ems.close()
        wait_until(lambda: not status_of(local_pool).session_ids)
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_forks_while_operations_run(cc: ContextCaching) -> None:
    source = Buffers([pattern(n, NBYTES) for n in range(16)])
    keys = [f"k{n}" for n in range(16)]
    futures = []
    for _ in range(10):
        futures.append(cc.async_save(None, keys, source.value_list))
        futures.append(cc.async_load(None, keys, Buffers.empty([NBYTES] * 16).value_list))
        in_child(lambda: None)
    for future in futures:
        assert future.exception(20) is None


def test_nothing_of_the_pool_is_mapped_in_the_child(
    cc: ContextCaching, local_pool: LocalPool
) -> None:
    root = local_pool.root

    def child() -> None:
        with open("/proc/self/maps") as file:
            assert not [line for line in file if root in line]
        descriptors = []
        for name in os.listdir("/proc/self/fd"):
            try:
                descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                continue
        assert not [target for target in descriptors if root in target], descriptors

    in_child(child)
