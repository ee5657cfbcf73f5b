"""What a vLLM configuration says that matters to EMS."""

from __future__ import annotations

from typing import Any

from ems.integrations.vllm_layout import model_identity

__all__ = ["attention_facts", "check_supported", "engine_facts", "tensor_rank"]

_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError, with what to do, for an engine that the connector does not serve."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"the model has {len(groups)} KV cache groups, EmsConnector serves models with one; "
            "start vLLM with --disable-hybrid-kv-cache-manager, or without the connector"
        )
    kind = type(groups[0].kv_cache_spec).__name__
    if kind not in _KINDS:
        raise ValueError(
            f"the model's KV cache is of kind {kind}, EmsConnector serves {' and '.join(_KINDS)}: "
            "others hand blocks back while a request runs; start vLLM without the connector"
        )
    parallel = vllm_config.parallel_config
    for name in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{name}_parallel_size", 1)
        if size != 1:
            raise ValueError(
                f"{name}_parallel_size is {size}; EmsConnector serves engines that split a model "
                "by tensor (and data) parallelism only"
            )


def engine_facts(vllm_config: Any, kv_cache_config: Any, model_id: str | None) -> dict[str, object]:
    """Return what of the whole engine changes the bytes of a block."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return {
        "model": model_id or model_identity(model.model, model.revision),
        "quantization": model.quantization,
        "dtype": model.dtype,
        "cache_dtype": cache.cache_dtype,
        "hash": cache.prefix_caching_hash_algo,
        "block_size": spec.block_size,
        "page_bytes": spec.page_size_bytes,
        "spec": type(spec).__name__,
        "order": kv_cache_config.kv_cache_layout,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
    }


def attention_facts(vllm_config: Any, kv_cache_config: Any) -> dict[str, object]:
    """Return who packs the bytes inside a page, and in which way."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform

    names = kv_cache_config.kv_cache_groups[0].layer_names
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    facts: dict[str, object] = {"platform": current_platform.device_name, "backends": backends}
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        facts["packing"] = _get_attn_isa(
            vllm_config.model_config.dtype,
            spec.block_size,
            spec.head_size,
            vllm_config.cache_config.cache_dtype,
        )
    return facts


def tensor_rank(kv_cache_config: Any) -> int:
    """Return whose part of the heads this worker has; with MLA all have the same."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    if type(kv_cache_config.kv_cache_groups[0].kv_cache_spec).__name__ == "MLAAttentionSpec":
        return 0
    return int(get_tensor_model_parallel_rank())
