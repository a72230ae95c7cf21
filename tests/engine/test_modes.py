"""The ways PackerDiffusionExecutor can be set up: sidecar, no packer to be had, settings."""

from __future__ import annotations

import gc
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_checks import (
    DEVICE,
    MIB,
    References,
    Residue,
    assert_same,
    exporter_state,
    in_packer_memory,
    leases,
    outputs,
    packer_engine,
    run,
    wait_settled,
    warnings_logged,
)
from engine_harness import STEP, RunningEngine, engine
from packer_process import Packer, running_packer, wait_until

from packer_service.errors import HandshakeError, PackerUnavailable, SettingError

pytestmark = pytest.mark.engine

IMAGE = {"height": 512, "width": 512}  # 3 MiB of float32
# not "dict": vllm-omni's own path cannot pack an empty view of a large tensor
MIXED = [
    {"seed": seed, "behaviour": name, **IMAGE} for seed, name in enumerate(("image", "views", "bfloat16", "small"))
]


# -- references and sidecar --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uni() -> Iterator[References]:
    with engine("uni", "RequestPipeline") as running:
        yield References(running)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packer]:
    """A packer that somebody else started, with room for five images and no patience."""
    directory = tmp_path_factory.mktemp("sidecar")
    with running_packer(
        directory, device=DEVICE, pool_step_bytes="16MiB", pool_max_bytes="16MiB", wait_s="0"
    ) as packer:
        yield packer


def key_file(directory: Path, key: bytes) -> str:
    path = directory / f"key-{secrets.token_hex(4)}"
    path.touch(mode=0o600)
    path.write_bytes(key)
    return str(path)


def settings_of(sidecar: Packer, directory: Path) -> dict[str, str]:
    return {"mode": "sidecar", "socket": sidecar.socket, "key_file": key_file(directory, sidecar.key)}


# -- sidecar -----------------------------------------------------------------------------------------------------------


def test_one_engine_after_another_is_served_by_the_same_sidecar(sidecar, uni, tmp_path, monkeypatch):
    residue = Residue()
    gone = sidecar.log.count("is gone")
    with packer_engine(packer=settings_of(sidecar, tmp_path)) as running:
        assert running.executor.packer_pids == [sidecar.process.pid]
        # The packer has no patience, and its pool starts too small for the first output.
        wait_until(lambda: in_packer_memory(outputs(running, *MIXED)[0]), "the pool has grown")
        received = outputs(running, *MIXED)
        assert_same(received, uni(*MIXED))
        assert in_packer_memory(received[0])
        wait_settled(running)
    sidecar.wait_log("is gone", gone + 2)
    assert sidecar.process.poll() is None
    assert_same(received, uni(*MIXED))
    del received
    residue.assert_none()

    for name, value in settings_of(sidecar, tmp_path).items():
        monkeypatch.setenv(f"PACKER_{name.upper()}", value)
    with packer_engine() as running:
        assert running.executor.packer_pids == [sidecar.process.pid]
        declines_what_finds_no_room(running, uni)
    residue.assert_none()


def declines_what_finds_no_room(running: RunningEngine, uni: References) -> None:
    """With wait_s = 0 in the packer, at once. Growing makes room too, but not at once: so the pool grows before."""
    images = [{"seed": seed, **IMAGE} for seed in range(8)]

    def grown() -> bool:
        wait_until(lambda: gc.collect() >= 0 and leases(running).outstanding == 0, "all leases go back")
        received = outputs(running, *images[:5])
        assert_same(received, uni(*images[:5]))
        return all(map(in_packer_memory, received))

    wait_until(grown, "the pool grows to its limit")
    wait_until(lambda: gc.collect() >= 0 and leases(running).outstanding == 0, "all leases go back")
    received = outputs(running, *images)
    assert_same(received, uni(*images))
    assert sum(map(in_packer_memory, received)) == 5
    assert wait_settled(running)["broken"] == ""


# -- no packer to be had -----------------------------------------------------------------------------------------------


def no_packer(why: str, sidecar: Packer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make it so that no packer can be had, and return the settings to go with it."""
    if why == "nobody listens":
        return {**settings_of(sidecar, tmp_path), "socket": str(tmp_path / "nobody.sock"), "start_timeout_s": 0.2}
    if why == "wrong key":
        return {**settings_of(sidecar, tmp_path), "key_file": key_file(tmp_path, secrets.token_hex(32).encode())}
    if why == "no socket":
        return {"mode": "sidecar"}
    if why == "does not start":
        return {"allowed_uids": "nobody"}
    if why == "too slow":
        return {"start_timeout_s": 0.1}
    return {}


WHY = {
    "nobody listens": (
        PackerUnavailable,
        r"no packer listens at .*nobody.sock.* The engine waited 0\.\d+ s for it \(setting start_timeout_s\)",
    ),
    "wrong key": (
        HandshakeError,
        "the key is not this packer's: give both sides the same file in the setting key_file",
    ),
    "no socket": (PackerUnavailable, "mode is 'sidecar' and the setting socket names no"),
    "does not start": (PackerUnavailable, "the packer on .* did not start: allowed_uids is 'nobody'"),
    "too slow": (PackerUnavailable, "was not ready within start_timeout_s = 0.1"),
}


@pytest.mark.parametrize("why", WHY)
def test_with_no_packer_to_be_had_fallback_fail_refuses_and_says_why(why, sidecar, uni, tmp_path, monkeypatch):
    error, message = WHY[why]
    residue = Residue()
    settings = no_packer(why, sidecar, tmp_path, monkeypatch)
    with pytest.raises(error, match=message):
        with packer_engine(packer={**settings, "fallback": "fail"}):
            pytest.fail("it started")
    residue.assert_none()


@pytest.mark.parametrize("why", WHY)
def test_with_no_packer_to_be_had_one_warning_says_why_and_vllm_omnis_own_path_is_chosen(
    why, sidecar, uni, tmp_path, monkeypatch
):
    """The choice alone, without an engine around it: what it serves is the next test's."""
    import re

    from packer_service.config import Settings
    from worker_shim.engine.packers import Packers
    from worker_shim.engine.receiver import Delivered

    _, message = WHY[why]
    residue = Residue()
    settings = no_packer(why, sidecar, tmp_path, monkeypatch)
    packers = Packers(Delivered(), threading.Event())
    with warnings_logged() as warnings:
        config = packers.open(Settings.load(settings), frozenset({0}))
    assert len(warnings) == 1
    assert re.search(message, warnings[0])
    assert "own output path" in warnings[0]
    assert "fallback" in warnings[0]
    assert not config.ranks
    assert packers.keepers == []
    residue.assert_none()


def test_with_no_packer_to_be_had_every_request_is_served_all_the_same(sidecar, uni, tmp_path, monkeypatch):
    settings = no_packer("nobody listens", sidecar, tmp_path, monkeypatch)
    residue = Residue()
    with warnings_logged() as warnings, packer_engine(packer=settings) as running:
        assert len(warnings) == 1
        assert running.executor.packer_pids == []
        assert exporter_state(running) == {}
        requests = [*MIXED, {"seed": 7}, {"seed": 8, "behaviour": "trajectory", **IMAGE}]
        received = outputs(running, *requests)
        assert_same(received, uni(*requests))
        bad, good = run(running, {"seed": 9, "behaviour": "unpicklable", **IMAGE}, {"seed": 10, **IMAGE})
        assert "pickle" in str(bad.error)
        assert_same(good.output, uni({"seed": 10, **IMAGE})[0])
        running.diffusion_engine.collective_rpc("synchronize_device", timeout=30, kwargs={"timeout": 30.0})
        assert len(warnings) == 1
    residue.assert_none()


@pytest.mark.parametrize("mode", [STEP, pytest.param({}, marks=pytest.mark.gpu)], ids=["step", "request"])
def test_an_engine_of_a_vllm_omni_we_do_not_know_serves_its_own_way(mode, uni, monkeypatch):
    """What is taken instead is tested in test_compat. With no GPU vllm-omni's own worker hangs in request mode."""
    monkeypatch.setattr("worker_shim.compat.SUPPORTED", ("0.29",))
    with warnings_logged() as warnings, packer_engine("StepPipeline" if mode else "RequestPipeline", **mode) as running:
        assert "supported is 0.29" in " ".join(warnings)
        requests = [{"seed": seed, **IMAGE} for seed in range(3)]
        assert_same(outputs(running, *requests), uni(*requests))
        assert not any(map(in_packer_memory, outputs(running, *requests)))
    assert len(warnings) == 1


@pytest.fixture
def full_house(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A sidecar that takes the engine and no worker beside it: the settings that lead there."""
    with running_packer(tmp_path / "full", device=DEVICE, max_sessions=2) as packer:
        other = packer.connect("engine", secrets.token_hex(8))
        try:
            yield settings_of(packer, tmp_path)
        finally:
            other.close()


def test_a_worker_that_its_packer_turns_away_ends_the_start_where_fallback_is_fail(full_house):
    residue = Residue()
    with pytest.raises(PackerUnavailable, match="worker 0: "):
        with packer_engine(packer={**full_house, "fallback": "fail"}):
            pytest.fail("it started")
    residue.assert_none()


def test_a_packer_that_turned_its_only_worker_away_is_left_and_not_named_among_those_that_serve(full_house, uni):
    residue = Residue()
    with packer_engine(packer=full_house) as running:
        assert running.executor.packer_pids == []
        assert_same(outputs(running, {"seed": 1}), uni({"seed": 1}))
    residue.assert_none()


@pytest.mark.parametrize(
    ("packer", "environment", "message"),
    [
        ({"wait_s": "long"}, {}, "wait_s is 'long'; allowed is a number from 0.0 to 600.0"),
        ({"mode": "sidcar"}, {}, "mode is 'sidcar'; allowed is 'managed' or 'sidecar'"),
        ({"arena_bytes": 1}, {}, "'arena_bytes' is no setting of the packer; did you mean 'arena_max_bytes'"),
        ({}, {"PACKER_POOL_BYTES": "1 banana"}, "PACKER_POOL_BYTES is '1 banana'; allowed is a size"),
        ("managed", {}, r"additional_config\['packer'\] is 'managed'; allowed is a mapping of settings"),
    ],
)
def test_a_bad_setting_stops_the_engine_whatever_fallback_says(packer, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=message):
        with packer_engine(packer=packer):
            pytest.fail("it started")


def test_a_name_that_is_nearly_a_settings_is_one_warning_of_the_engine(sidecar, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKER_FALLBAK", "own")
    with warnings_logged() as warnings, pytest.raises(PackerUnavailable):
        with packer_engine(packer={**no_packer("nobody listens", sidecar, tmp_path, monkeypatch), "fallback": "fail"}):
            pytest.fail("it started")
    assert [line for line in warnings if "PACKER_" in line] == [
        "packer: PACKER_FALLBAK in the environment is no setting and is ignored; did you mean PACKER_FALLBACK?"
    ]


def test_where_vllm_omni_sizes_its_kv_cache_by_what_is_free_the_arena_is_taken_before(uni):
    with packer_engine("PagedPipeline", {"arena_max_bytes": "48MiB"}) as running:
        assert exporter_state(running)["arena_bytes"] == 48 * MIB
        assert_same(outputs(running, {"seed": 3}), uni({"seed": 3}))
        assert exporter_state(running)["arena_bytes"] == 48 * MIB
