from __future__ import annotations

import contextlib
import subprocess
import sys

from ems.bench.cursor import Cursor

TAKER = """
import sys
from ems.bench.cursor import Cursor
cursor = Cursor(int(sys.argv[1]))
print(*[cursor.take() for _ in range(300)])
"""


def test_numbers_come_in_order() -> None:
    with contextlib.closing(Cursor.create()) as cursor:
        assert [cursor.take(), cursor.take()] == [0, 1]
        assert cursor.value == 2


def test_no_two_processes_get_the_same_number() -> None:
    with contextlib.closing(Cursor.create()) as cursor:
        takers = [
            subprocess.Popen(
                [sys.executable, "-c", TAKER, str(cursor.fd)],
                pass_fds=[cursor.fd],
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": ":".join(sys.path)},
            )
            for _ in range(3)
        ]
        answers = [taker.communicate()[0].split() for taker in takers]
        assert cursor.value == 900
    for answer in answers:
        assert [int(number) for number in answer] == sorted(int(number) for number in answer)
    assert {int(number) for answer in answers for number in answer} == set(range(900))
