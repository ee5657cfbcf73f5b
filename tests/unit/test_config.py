from __future__ import annotations

import dataclasses
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ems import CcConfig, CcConfig_v1, EmsConfig, EmsErrorCode, EmsException, KVCacheType
from ems.cc_v1.cc_config import KVCacheType as KVCacheTypeAtHome
from ems.common.config import check_config, default_root

LONG_ID = "cc_kvstore@_@ds_default_ns_001"


def v0(**changes: Any) -> CcConfig:
    return CcConfig(**{"rank_id": 0, "device_id": 0, "model_id": "m", **changes})


def v1(**changes: Any) -> CcConfig_v1:
    return CcConfig_v1(**{"rank_id": 0, "device_id": 0, "model_id": "m", **changes})


def refusal(config: Any) -> str:
    with pytest.raises(EmsException) as caught:
        check_config(config)
    assert caught.value.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT
    return caught.value.message()


def test_what_real_clients_pass_is_accepted() -> None:
    config = v1(model_id="DeepSeek@V3", llm_engine="vllm@svc", rank_id=8)
    config.kvcache_type = KVCacheType.MLA
    settings = check_config(EmsConfig(access_id=LONG_ID, access_key="", cc_config=config))
    assert settings.access_key is None
    assert settings.access_id == LONG_ID
    assert settings.instance == dataclasses.replace(config, rank_in_tp_group=0, rank_in_pp_group=0)
    assert settings.instance is not config


def test_an_undocumented_character_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ems"):
        check_config(EmsConfig(cc_config=v0(model_id="a-b_c.9")))
        assert not caplog.records
        check_config(EmsConfig(cc_config=v0(model_id="A")))
        assert "config.cc_config.model_id is 'A'" in caplog.text


def test_the_settings_do_not_follow_later_changes() -> None:
    config = EmsConfig(cc_config=v0())
    settings = check_config(config)
    assert config.cc_config is not None
    config.cc_config.model_id = "other"
    assert settings.instance == v0()
    assert check_config(config) != settings
    assert check_config(EmsConfig(cc_config=v0())) == settings


def test_the_class_decides_the_generation_not_the_field() -> None:
    assert type(check_config(EmsConfig(cc_config=v1())).instance) is CcConfig_v1
    assert type(check_config(EmsConfig(cc_config_v1=v0())).instance) is CcConfig
    for both in (EmsConfig(v0(), v1()), EmsConfig(v1(), v0())):
        assert type(check_config(both).instance) is CcConfig_v1
    assert check_config(EmsConfig(v1(model_id="a"), v1(model_id="b"))).instance == v1(
        model_id="b", rank_in_tp_group=0, rank_in_pp_group=0
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rank_id": 5}, (0, 0)),
        ({"rank_id": 5, "tp_world_size": 4}, (1, 0)),
        ({"rank_id": 5, "pp_world_size": 4}, (0, 1)),
        ({"rank_id": 5, "tp_world_size": 4, "pp_world_size": 2}, (1, 1)),
        ({"rank_id": 13, "tp_world_size": 4, "pp_world_size": 2}, (1, 1)),  # the next replica
        ({"rank_id": 5, "tp_world_size": 4, "rank_in_tp_group": 0}, (0, 0)),
        ({"rank_id": 5, "tp_world_size": 4, "rank_in_tp_group": None}, (1, 0)),
        ({"rank_id": 5, "pp_world_size": 4, "rank_in_pp_group": 3}, (0, 3)),
    ],
)
def test_a_rank_that_is_left_out_follows_from_the_global_one(
    given: dict[str, int], expected: tuple[int, int]
) -> None:
    found = check_config(EmsConfig(cc_config_v1=v1(**given))).instance
    assert isinstance(found, CcConfig_v1)
    assert (found.rank_in_tp_group, found.rank_in_pp_group) == expected


def test_a_rank_that_is_left_out_reads_as_documented() -> None:
    assert v1(tp_world_size=4, rank_id=3).rank_in_tp_group == 0
    copied = pickle.loads(pickle.dumps(v1(tp_world_size=4, rank_id=3)))
    found = check_config(EmsConfig(cc_config_v1=copied)).instance
    assert isinstance(found, CcConfig_v1)
    assert found.rank_in_tp_group == 3


def test_no_two_ranks_of_an_instance_have_the_same_place() -> None:
    places = set()
    for rank in range(24):
        config = v1(rank_id=rank, tp_world_size=4, pp_world_size=6)
        found = check_config(EmsConfig(cc_config_v1=config)).instance
        assert isinstance(found, CcConfig_v1)
        places.add((found.rank_in_tp_group, found.rank_in_pp_group))
    assert len(places) == 24


def test_no_context_caching_is_a_configuration_too() -> None:
    assert check_config(EmsConfig()).instance is None


def test_the_cache_type_is_a_string_enum() -> None:
    assert KVCacheTypeAtHome is KVCacheType
    assert KVCacheType.MLA == "MLA"
    assert f"{KVCacheType.MLA}" == str(KVCacheType.MLA) == "MLA"
    by_name = check_config(EmsConfig(cc_config_v1=v1(kvcache_type="GQA"))).instance
    assert isinstance(by_name, CcConfig_v1)
    assert by_name.kvcache_type is KVCacheType.GQA


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, "config is None of type NoneType; give an EmsConfig"),
        (EmsConfig(cc_config="m"), "config.cc_config is 'm' of type str"),  # type: ignore[arg-type]
        (EmsConfig(cc_config=v0(rank_id=-1)), "config.cc_config.rank_id is -1; it must be from 0"),
        (EmsConfig(cc_config=v0(device_id="0")), "config.cc_config.device_id is '0' of type str"),
        (EmsConfig(cc_config=v0(rank_id=True)), "config.cc_config.rank_id is True, a bool"),
        (EmsConfig(cc_config=v0(tp_world_size=0)), "tp_world_size is 0; it must be from 1"),
        (EmsConfig(cc_config=v0(pp_world_size=2**31)), "pp_world_size is 2147483648"),
        (EmsConfig(cc_config=v0(model_id="")), "model_id is 0 characters long"),
        (EmsConfig(cc_config=v0(model_id="m" * 513)), "model_id is 513 characters long"),
        (EmsConfig(cc_config=v0(model_id="a\nb")), "it must have printable characters only"),
        (EmsConfig(cc_config=v0(model_id=None)), "model_id is None of type NoneType; give a str"),
        (EmsConfig(cc_config_v1=v1(rank_in_tp_group=-1)), "config.cc_config_v1.rank_in_tp_group"),
        (EmsConfig(cc_config_v1=v1(rank_in_pp_group=1.0)), "rank_in_pp_group is 1.0 of type float"),
        (EmsConfig(cc_config_v1=v1(llm_engine="")), "llm_engine is 0 characters long"),
        (
            EmsConfig(cc_config_v1=v1(kvcache_type="mla")),
            "kvcache_type is 'mla'; give one of 'GQA'",
        ),
        (EmsConfig(cc_config_v1=v1(kvcache_type=None)), "kvcache_type is None; give one of"),
        (EmsConfig(v0(rank_id=1), v1()), "cc_config.rank_id is 1 and config.cc_config_v1.rank_id"),
        (EmsConfig(v0(), v1(device_id=3)), "config.cc_config_v1.device_id is 3"),
        (EmsConfig(access_id=""), "config.access_id is 0 characters long"),
        (EmsConfig(access_id=5), "config.access_id is 5"),  # type: ignore[arg-type]
        (EmsConfig(access_key="k" * 32), "config.access_key is given without config.access_id"),
        (EmsConfig(root="/" + "r" * 90), "91 bytes long; the limit is 90"),
        (EmsConfig(root=""), "config.root is ''"),
        (EmsConfig(root="a\0b"), "config.root is 'a\\x00b'"),
        (EmsConfig(root=b"/x"), "config.root is b'/x'"),  # type: ignore[arg-type]
        (EmsConfig(root=7), "config.root is 7"),  # type: ignore[arg-type]
        (EmsConfig(init_timeout_ms=0), "config.init_timeout_ms is 0; it must be from 1"),
    ],
)
def test_a_wrong_field_is_named(config: Any, text: str) -> None:
    assert text in refusal(config)


@pytest.mark.parametrize("key", ["k" * 31, "k" * 257, "k" * 32 + "!", "ä" * 40, 5])
def test_a_wrong_access_key_is_refused_and_never_shown(key: Any) -> None:
    text = refusal(EmsConfig(access_id="a", access_key=key))
    assert "config.access_key" in text
    assert str(key) not in text.replace("32 and 256", "")


def test_a_right_access_key_is_kept_and_never_shown() -> None:
    key = "aZ9+/=" * 6
    config = EmsConfig(access_id="a", access_key=key)
    settings = check_config(config)
    assert settings.access_key == key
    assert key not in repr(config) + repr(settings)


def test_where_the_server_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EMS_ROOT", raising=False)
    assert check_config(EmsConfig()).root == default_root() == "/dev/shm/ems"
    monkeypatch.setenv("EMS_ROOT", "/run/x")
    assert check_config(EmsConfig()).root == "/run/x"
    monkeypatch.setenv("EMS_ROOT", "")
    assert default_root() == "/dev/shm/ems"
    assert check_config(EmsConfig(root=Path("/a/../b"))).root == "/b"
    monkeypatch.chdir("/")
    assert check_config(EmsConfig(root="rel")).root == os.path.join("/", "rel")
