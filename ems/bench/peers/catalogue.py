"""Which peers there are, what each needs, and how its adapter is run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable

from ems.common.exception import io_error
from ems.testing.child import child_environment, python_command

__all__ = ["EMS", "PEERS", "Peer", "install"]

# The adapters of peers run without the package's own imports, which are not there: `ems` and
# `ems.bench` are empty packages to them.
_BARE = """
import runpy, sys, types
for name, path in zip(("ems", "ems.bench"), sys.argv[2:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""
_BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclasses.dataclass(frozen=True)
class Peer:
    """A contender.

    Args:
        name: of the contender, unique.
        module: its adapter in `ems.bench.peers`.
        variant: the adapter's.
        shared: whether another process can load what it saved.
        environment: folder of its virtual environment, empty for none.
        requirements: what pip installs there.
        programs: what must be found on `PATH`, with the Debian package that has it.
    """

    name: str
    module: str
    variant: str = ""
    shared: bool = True
    environment: str = ""
    requirements: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()

    def missing(self, folder: str | None) -> str:
        """Why it cannot be started, empty when nothing is known to be missing."""
        for program, package in self.programs:
            if shutil.which(program) is None:
                return f"{program} is not on PATH (Debian: {package})"
        if self.environment and folder is None:
            return "no environment: give one with --peers DIR, made by --install"
        if self.environment and not os.path.exists(self._python(folder)):
            return f"{self._python(folder)} is not there: --install makes it"
        return ""

    def command(self, folder: str | None) -> list[str]:
        """The command line of its adapter."""
        module = f"ems.bench.peers.{self.module}"
        if self is EMS:
            return python_command(module)
        python = self._python(folder) if self.environment else sys.executable
        return [python, "-c", _BARE, module, os.path.dirname(_BENCH), _BENCH]

    def variables(self) -> dict[str, str]:
        """The environment of its adapter."""
        if self is EMS:
            return child_environment()
        return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def _python(self, folder: str | None) -> str:
        return os.path.join(folder or "", self.environment, "bin", "python")


EMS = Peer("EMS", "ems_pool")
_REDIS = ("redis==8.1.0", "hiredis==3.5.0")
_MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
PEERS = (
    EMS,
    Peer(
        "LMCache local CPU",
        "lmcache_local",
        shared=False,
        environment="lmcache",
        requirements=("torch==2.13.0", "lmcache==0.5.6"),
    ),
    *(
        Peer(f"Mooncake {what}", "mooncake_store", variant, True, "mooncake", _MOONCAKE)
        for variant, what in (
            ("own", "own segment"),
            ("tcp", "over TCP"),
            ("client", "client process"),
        )
    ),
    Peer(
        "yuanrong datasystem",
        "yuanrong_kv",
        environment="yuanrong",
        requirements=("openyuanrong-datasystem==0.8.1",),
        programs=(("etcd", "etcd-server"),),
    ),
    *(
        Peer(name, "redis_unix", program, True, "redis", _REDIS, ((program, program),))
        for name, program in (("Valkey", "valkey-server"), ("Redis", "redis-server"))
    ),
    Peer("shared_memory dict", "shared_dict"),
)
"""All contenders, EMS first."""


def install(folder: str, progress: Callable[[str], object]) -> None:
    """Make the virtual environments of all peers below `folder`; those that are there are kept.

    Raises:
        EmsException: `EMS_IO_ERROR` with the end of what pip said, after all were tried.
    """
    failures = []
    for environment in dict.fromkeys(peer.environment for peer in PEERS if peer.environment):
        path = os.path.join(folder, environment)
        needed = next(peer.requirements for peer in PEERS if peer.environment == environment)
        if os.path.exists(os.path.join(path, "bin", "python")):
            progress(f"{path} is there")
            continue
        progress(f"{path}: {', '.join(needed)}")
        venv.create(path, with_pip=True)
        python = os.path.join(path, "bin", "python")
        # One after the other: the first may be there to be found by what needs it.
        for requirement in needed:
            done = subprocess.run(
                [python, "-m", "pip", "install", "--quiet", requirement],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                failures.append(f"{environment}: {done.stderr.strip()[-500:]}")
                shutil.rmtree(path, ignore_errors=True)
                break
    if failures:
        raise io_error("not installed:\n" + "\n".join(failures))
