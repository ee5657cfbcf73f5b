"""Ranks of one MLA instance in processes of their own, which all save the same list at once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

from v1_bench import Cache, filled, right, whole

from ems import CcConfig_v1, CcKvOption, Ems, EmsConfig
from ems.testing.child import child_environment

LONG = CcKvOption(timeout=60_000)
BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 2 * (2048 + 256) * 8  # of `make_cache`


def make_cache(blocks: int) -> Cache:
    """A cache of twice that many blocks, of about half a MiB each."""
    return Cache(head_sizes=((2048, 256),) * 8, num_blocks=2 * blocks, block_size=BLOCK_SIZE)


def config(root: str, rank: int, ranks: int) -> EmsConfig:
    v1 = CcConfig_v1(rank_id=rank, device_id=rank, model_id="m", tp_world_size=ranks)
    v1.kvcache_type = "MLA"
    # All ranks start at once, perhaps on two cores that have more to do.
    return EmsConfig(cc_config_v1=v1, root=root, init_timeout_ms=30_000)


def save_together(root: str, ranks: int, blocks: int) -> list[dict[str, Any]]:
    """What each rank says after all have saved the list and loaded it."""
    command = [sys.executable, __file__, root, str(ranks), str(blocks)]
    environment = child_environment()
    environment["PYTHONPATH"] += f":{__file__.rpartition('/')[0]}"
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(ranks)
        ]
        for step in ("ready", "saved"):
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline().strip() == step
            for child in children:
                assert child.stdin is not None
                print("go", file=child.stdin, flush=True)
        return [json.loads(child.communicate(timeout=60)[0]) for child in children]


def main() -> None:
    root, ranks, blocks, rank = sys.argv[1], *map(int, sys.argv[2:])
    Ems.init(config(root, rank, ranks))
    cc = Ems.get_cc()
    assert cc is not None
    cache = make_cache(blocks)
    cc.register_kvcache(cache.tensors)
    given = filled(cache, range(blocks), range(blocks))
    print("ready", flush=True)
    input()
    saved = cc.save(option=LONG, **given)
    print("saved", flush=True)
    input()
    target = range(blocks, 2 * blocks)
    loaded = cc.load(option=LONG, **whole(cache, target, range(blocks)))
    answer = {
        "saved": saved.success,
        "loaded": loaded.success,
        "right": all(right(cache, target, range(blocks))),
        "stats": Ems.stats(),
    }
    Ems.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
