from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

LEAKS = {
    "shared_memory": (
        "def test_shared_memory(): open('/dev/shm/ems-leak-guard-test', 'w').close()",
        "in /dev/shm: /dev/shm/ems-leak-guard-test",
    ),
    "process": (
        "def test_process(): KEPT.append(subprocess.Popen(['sleep', '30']))",
        "child process: sleep 30",
    ),
    "thread": (
        "def test_thread():\n"
        "    threading.Thread(target=time.sleep, args=(9,), name='stays', daemon=True).start()",
        "thread: stays",
    ),
    "descriptor": (
        "def test_descriptor(): KEPT.append(open('/dev/null'))",
        "descriptor: /dev/null",
    ),
    "task": (
        "@pytest.mark.asyncio\n"
        "async def test_task():\n"
        "    KEPT.append(asyncio.ensure_future(asyncio.sleep(30)))",
        "Task",
    ),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "conftest.py").write_text(
        "import fix_leaks\n"
        "fix_leaks._PATIENCE_S = 0.1\n"
        "from fix_leaks import leaves_no_task_behind, leaves_nothing_behind\n"
    )
    (folder / "test_leaks.py").write_text(
        "import asyncio, subprocess, threading, time, pytest\nKEPT = []\n"
        + "\n".join(source for source, _ in LEAKS.values())
        + "\ndef test_nothing(): pass\n"
        + "def teardown_module():\n"
        + "    KEPT[0].kill(); KEPT[0].wait(); KEPT[1].close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", folder, "-rA", folder],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(TESTS), "PATH": "/usr/bin:/bin"},
        timeout=50,
    )
    Path("/dev/shm/ems-leak-guard-test").unlink()
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_its_test(report: str, kind: str) -> None:
    assert re.search(rf"^ERROR .*::test_{kind}\b", report, re.MULTILINE), report
    assert LEAKS[kind][1] in report


def test_a_clean_test_passes(report: str) -> None:
    assert not re.search(r"^ERROR .*::test_nothing\b", report, re.MULTILINE), report
