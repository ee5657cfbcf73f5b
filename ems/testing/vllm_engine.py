"""A process with a vLLM engine in it, driven line by line; models of any size made on the spot.

Run as a program it makes the engine that its first argument describes (JSON) and answers lines of
JSON on its standard input with lines on its standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["MODELS", "Engine", "Generated", "ModelSize", "ems_transfer", "make_model"]

MARK = "ENGINE "
VOCABULARY = 1000
FORGET_S = 10.0  # longer than a save to a frozen server is waited for
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # not between our answers
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A Llama to be made with random weights.

    Args:
        layers: of it.
        hidden: width of a token.
        heads: of attention.
        kv_heads: of the KV cache.
        head: width of a head.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int


MODELS = {
    "tiny": ModelSize(4, 256, 8, 4, 32),  # 2.9 M parameters
    "small": ModelSize(8, 512, 8, 8, 64),  # 26 M
    "medium": ModelSize(12, 1024, 16, 8, 64),  # 144 M, 24 KiB of KV a token
}


def make_model(folder: Path, size: ModelSize, dtype: str = "bfloat16") -> None:
    """Write a model without a tokenizer whose next token depends on all of its context."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.2,  # with the usual 0.02 the context hardly matters
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


def ems_transfer(root: str, *, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` that names EMS.

    Args:
        root: of the server.
        policy: what vLLM does when a load fails.
        extra: settings of the connector.
    """
    return {
        "kv_connector": "EmsConnector",
        "kv_connector_module_path": "ems.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"root": root, **extra},
    }


@dataclasses.dataclass(frozen=True)
class Generated:
    """What became of one prompt.

    Args:
        tokens: generated.
        cached: tokens of the prompt that came from a cache, vLLM's own or another.
        reason: why it ended.
    """

    tokens: list[int]
    cached: int
    reason: str


class Engine:
    """A vLLM engine in a process of its own; everything of it ends with `close`.

    Args:
        model: folder of the model.
        transfer: the `kv_transfer_config`; None for no connector.
        separate: whether engine and workers are processes of their own, too.
        threads: of OpenMP.
        cache_gib: memory for KV blocks.
        environment: more variables.
        arguments: of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Path,
        transfer: Mapping[str, Any] | None = None,
        *,
        separate: bool = False,
        threads: int = 1,
        cache_gib: int = 1,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        given: dict[str, Any] = {"model": str(model), **arguments}
        if transfer is not None:
            given["kv_transfer_config"] = dict(transfer)
        self.seconds = 0.0
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate)),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **(environment or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ems.testing.vllm_engine", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            text=True,
            cwd="/",
            start_new_session=True,
        )
        self.log: list[str] = []
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read_log, args=(self._process.stderr,))
        self._reader.start()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, **sampling: Any
    ) -> list[Generated]:
        """Generate for all prompts at once; `seconds` says how long that took."""
        given = [list(tokens) for tokens in prompts]
        reply = self.ask(prompts=given, max_tokens=max_tokens, **sampling)
        self.seconds = reply["seconds"]
        return [Generated(*one) for one in reply["outputs"]]

    def forget(self) -> None:
        """Have vLLM's own prefix cache forget everything."""
        assert self.ask(forget=True)["forgotten"]

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters of EMS, by name (and reason); for `disable_log_stats=False`."""
        found: dict[str, float] = self.ask(metrics=True)["metrics"]
        return found

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a line, wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End every process of the engine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                return answer
        self._reader.join(5)
        raise RuntimeError("the engine ended:\n" + "".join(self.log)[-6000:])

    def _read_log(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.log.append(line)


def _serve() -> None:
    """Make the engine and answer questions until the standard input ends."""
    from vllm import LLM, SamplingParams

    defaults = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    llm = LLM(**{**defaults, **json.loads(sys.argv[1])})
    _tell({})
    for line in sys.stdin:
        question = json.loads(line)
        if question.pop("forget", False):
            _tell({"forgotten": _forgotten(llm, SamplingParams(max_tokens=2, detokenize=False))})
            continue
        if question.pop("metrics", False):
            _tell({"metrics": _metrics(llm)})
            continue
        prompts = [{"prompt_token_ids": tokens} for tokens in question.pop("prompts")]
        sampling = SamplingParams(
            **{"temperature": 0, "detokenize": False, "ignore_eos": True, **question}
        )
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        found = [(one, one.outputs[0]) for one in outputs]
        _tell(
            {
                "seconds": seconds,
                "outputs": [
                    (list(made.token_ids), one.num_cached_tokens or 0, made.finish_reason)
                    for one, made in found
                ],
            }
        )


def _forgotten(llm: Any, two_tokens: Any) -> bool:
    """Reset the prefix cache. Blocks held for a save are free only in a step after its end."""
    give_up = time.monotonic() + FORGET_S
    while True:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], two_tokens, use_tqdm=False)
        if llm.reset_prefix_cache():
            return True
        if time.monotonic() > give_up:
            return False
        time.sleep(0.002)


def _metrics(llm: Any) -> dict[str, float]:
    found = {}
    for one in llm.get_metrics():
        name = one.name.partition("vllm:ems_")[2]
        if name:
            found[" ".join([name, *filter(None, [one.labels.get("reason")])])] = one.value
    return found


def _tell(answer: dict[str, Any]) -> None:
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
