"""The ways to select the packer that docs/running.md names, each through `vllm serve --omni`: the real server, over HTTP.

The commands are taken from that page, with a folder for MODEL and sizes that fit a small machine.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from engine_checks import DEVICE, torch
from packer_process import MIB, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "worker_shim.PackerDiffusionExecutor"
START_S = 300.0  # 15 s on an idle machine, 150 s on two cores that ten processes share
SIZE = (96, 64)


def ways() -> str:
    return (ROOT / "docs/running.md").read_text().partition("## Ways to select it")[2].partition("\n## ")[0]


def command(option: str) -> list[str]:
    """The options of the page's `vllm serve MODEL --omni ...` that has ``option``."""
    blocks = re.findall(r"^    vllm serve MODEL --omni ((?:.+\n)+)", ways(), re.MULTILINE)
    (block,) = [block for block in blocks if option in block]
    return shlex.split(block.replace("\\\n", ""))


def deploy_yaml() -> str:
    """The page's, with the path where vllm-omni's own is."""
    (block,) = re.findall(r"```yaml\n(.*?)```", ways(), re.DOTALL)
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    return str(block).replace("SITE_PACKAGES/vllm_omni", str(Path(spec.origin).parent))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers model of no registered pipeline, with as much in it as vllm-omni asks for before there are weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model_index.json").write_text("{}")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text('{"temporal_downsample": [false, true, true]}')
    return folder


class Server:
    """``log`` is all it has written so far."""

    def __init__(self, log: Path, process: subprocess.Popen[bytes], port: int) -> None:
        self._log, self.process, self._url = log, process, f"http://127.0.0.1:{port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def images(self, seed: int, n: int = 1) -> list[bytes]:
        body = {"prompt": "a test", "size": "{}x{}".format(*SIZE), "seed": seed, "n": n, "num_inference_steps": 2}
        request = urllib.request.Request(
            f"{self._url}/v1/images/generations", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [base64.b64decode(each["b64_json"]) for each in json.load(answer)["data"]]

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def packers(self) -> dict[int, str]:
        """Its packers' command lines, by pid."""
        lines = {child.pid: " ".join(child.cmdline()) for child in psutil.Process(self.process.pid).children(True)}
        return {pid: line for pid, line in lines.items() if re.search("packer_service.* serve ", line)}


@contextmanager
def served(folder: Path, tmp_path: Path, *options: str, **environment: str) -> Iterator[Server]:
    """`vllm serve` of the folder with a pipeline of ours in the place of weights, up and answering."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    vllm = Path(sys.executable).with_name("vllm")
    stub = ["--model-class-name", "QwenImagePipeline", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    stub += ["--custom-pipeline-args", json.dumps({"pipeline_class": "pipelines.ServedPipeline"})]
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(vllm), "serve", str(folder), "--omni", *stub, *options],
            env={**os.environ, "PACKER_POOL_BYTES": "64MiB", **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    server = Server(log, process, port)
    try:
        wait_until(server.ready, "the server answers", START_S)
        yield server
        packers = [psutil.Process(pid) for pid in server.packers()]
        process.terminate()
        process.wait(60)
        assert psutil.wait_procs(packers, 60)[1] == [], "a packer outlives its server"
    finally:
        process.kill()
        process.wait()


def assert_serves_through_a_packer(server: Server, *settings: str) -> None:
    """PNGs bit for bit of what diffusers makes of the pipeline's tensor, and a packer with these settings that brings it."""
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image
    from pipelines import content

    for seed in range(3):
        (png,) = server.images(seed)
        params: Any = SimpleNamespace(seed=seed, extra_args=None, num_frames=1, width=SIZE[0], height=SIZE[1])
        tensor = content(params, torch.device(DEVICE.replace("host", "cpu")))[:, :, 0] * 2 - 1
        (expected,) = VaeImageProcessor(vae_scale_factor=16).postprocess(tensor.cpu())
        assert Image.open(io.BytesIO(png)).tobytes() == expected.tobytes()
    (line,) = re.findall(r"outputs of .* go through packer \d+", server.log)
    ((pid, command_line),) = server.packers().items()
    assert line.endswith(f" {pid}")
    assert "exports its outputs to the packer" in server.log
    for setting in settings:
        assert setting in command_line.split()
    assert "vllm-omni's own" not in server.log


# -- a model that is diffusion alone -----------------------------------------------------------------------------------


def test_a_model_that_is_diffusion_alone_is_served_through_a_packer_by_the_options_of_the_command_line(
    folder, tmp_path
):
    options = [option.replace("32GiB", "80MiB") for option in command("--distributed-executor-backend")]
    with served(folder, tmp_path, *options, PACKER_WAIT_S="7") as server:
        assert_serves_through_a_packer(server, f"--pool-max-bytes={80 * MIB}", "--wait-s=7.0")
        metrics = server.metrics()
        assert float(re.findall(r"^packer_engine_outputs_total (\S+)", metrics, re.MULTILINE)[0]) >= 3
        assert "packer_engine_fallback_active 0.0" in metrics


def test_stage_overrides_work_for_it_too_and_a_deploy_yaml_is_ignored_without_a_word(folder, tmp_path):
    ignored = tmp_path / "deploy.yaml"
    ignored.write_text(
        f"stages:\n  - stage_id: 0\n    distributed_executor_backend: there.is.no.Such\n{' ' * 4}dtype: bad\n"
    )
    options = [o.replace("32GiB", "80MiB").replace('"1"', '"0"') for o in command("--stage-overrides")]
    with served(folder, tmp_path, *options, "--deploy-config", str(ignored)) as server:
        assert_serves_through_a_packer(server, f"--pool-max-bytes={80 * MIB}")
        assert "there.is.no.Such" not in server.log
        assert not re.search(r"(WARNING|ERROR).*deploy", server.log)


# -- a registered pipeline ---------------------------------------------------------------------------------------------


def test_a_deploy_yaml_that_names_a_registered_pipeline_is_read(folder, tmp_path):
    """One whose only stage is diffusion: an LLM stage needs weights."""
    text = "".join(line for line in deploy_yaml().splitlines(True) if not line.startswith("base_config"))  # four GPUs
    text = text.replace("glm_image", "hunyuan_image3_dit").replace("stage_id: 1", "stage_id: 0")
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(text.replace("32GiB", "80MiB"))
    with served(folder, tmp_path, "--deploy-config", str(deploy)) as server:
        assert_serves_through_a_packer(server, f"--pool-max-bytes={80 * MIB}")


def stages(folder: Path, deploy: Path | None = None, **options: Any) -> dict[int, Any]:
    """By number the stages that vllm-omni makes of these options: what its server starts."""
    from vllm_omni.config.resolver import resolve_omni_config

    overrides = options.pop("stage_overrides", None)
    resolved = resolve_omni_config(
        str(folder),
        trust_remote_code=False,
        deploy_config_path=None if deploy is None else str(deploy),
        cli_overrides=options,
        stage_overrides=overrides,
        strategy_config_path=None,
    )
    return {stage.stage_id: stage for stage in resolved.stage_configs}


def switched_on(stages: dict[int, Any]) -> set[int]:
    return {number for number, stage in stages.items() if BACKEND in repr(stage)}


def of_pipeline(tmp_path: Path, class_name: str) -> Path:
    folder = tmp_path / class_name
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    return folder


def test_beside_an_llm_stage_the_option_reaches_that_too_where_vllm_refuses_it_and_stage_overrides_do_not(tmp_path):
    from vllm.v1.executor.abstract import Executor

    folder = of_pipeline(tmp_path, "GlmImagePipeline")
    assert switched_on(stages(folder, distributed_executor_backend=BACKEND)) == {0, 1}
    refused: Any = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=BACKEND))
    with pytest.raises(TypeError, match="must be a subclass of Executor"):
        Executor.get_class(refused)
    options = command("--stage-overrides")
    overrides = json.loads(options[options.index("--stage-overrides") + 1])
    found = stages(folder, stage_overrides=overrides)
    assert switched_on(found) == {1}
    assert "32GiB" in repr(found[1])


def test_beside_an_llm_stage_a_deploy_yaml_switches_on_the_stage_that_it_names(tmp_path):
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(deploy_yaml())
    folder = of_pipeline(tmp_path, "GlmImagePipeline")
    found = stages(folder, deploy)
    assert switched_on(found) == {1}
    assert "32GiB" in repr(found[1])
    deploy.write_text("".join(line for line in deploy_yaml().splitlines(True) if not line.startswith("base_config")))
    with pytest.raises(ValueError, match="async_chunk"):  # it stands in the file that this one replaces
        stages(folder, deploy)


def test_a_deploy_yaml_need_not_name_a_pipeline_that_vllm_omni_recognizes_the_model_as(tmp_path, folder):
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"stages:\n  - stage_id: 0\n    distributed_executor_backend: {BACKEND}\n")
    assert switched_on(stages(of_pipeline(tmp_path, "WanPipeline"), deploy)) == {0}
    assert switched_on(stages(folder, deploy, model_class_name="QwenImagePipeline")) == set()


def test_a_key_at_the_top_of_a_deploy_yaml_reaches_every_stage(tmp_path):
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"{deploy_yaml().partition('stages:')[0]}distributed_executor_backend: {BACKEND}\n")
    assert switched_on(stages(of_pipeline(tmp_path, "GlmImagePipeline"), deploy)) == {0, 1}


def test_the_readme_names_the_first_of_these_ways():
    readme = re.findall(r"^    (vllm serve .*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert readme == [re.findall(r"^    (vllm serve .*?) \\$", ways(), re.MULTILINE)[0]]


def test_with_no_backend_named_one_gpu_means_uni():
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor

    config: Any = SimpleNamespace(distributed_executor_backend=None, num_gpus=1)
    assert DiffusionExecutor.get_class(config).__name__ == "UniProcDiffusionExecutor"
