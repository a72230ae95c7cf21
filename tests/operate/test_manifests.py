"""configs/container and configs/kubernetes: valid by the schemas of those who read them, and true to what the packer needs.

No container runtime and no cluster: what the manifests say is held against the schemas, against what
`packer-service COMMAND --help` says, and against one another.
"""

from __future__ import annotations

import importlib.resources
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from packer_service.cli import app
from packer_service.config import GIB, MIB, Settings, environment_name
from packer_service.pool.budget import LEFT_TO_OTHERS

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema", reason="needs the dev extra")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the dev extra")
pytest.importorskip("check_jsonschema", reason="needs the dev extra")

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "configs" / "container" / "compose.yaml"
DOCKERFILE = ROOT / "configs" / "container" / "Dockerfile"
KUBERNETES = sorted((ROOT / "configs" / "kubernetes").glob("*.yaml"))
OLDEST = {"dra.yaml": "1.34"}  # the oldest Kubernetes that a file is for
SIDECARS = "1.29"
UID = 10001
PACKER_BYTES = 120 * MIB  # docs/benchmarks.md, "Memory and idle cost"
PROBE_BYTES = 40 * MIB  # a health command beside it, resident: 37 MB
VARIABLES = {environment_name(name) for name in Settings.__dataclass_fields__}
_UNITS = {"Mi": MIB, "Gi": GIB, "M": MIB, "MiB": MIB, "GiB": GIB, "gb": GIB}  # Docker's M is 2^20 bytes


class Process(NamedTuple):
    """A container as the manifests have it: what it runs, and what it is given."""

    where: str
    spec: dict[str, Any]
    environment: dict[str, str]
    mounts: dict[str, str]  # path to volume
    arguments: list[str]

    @property
    def is_packer(self) -> bool:
        return self.arguments[:1] == ["serve"]

    @property
    def sockets(self) -> list[str]:
        return self.environment["PACKER_SOCKET"].split(",")


def nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]+)", text)
    assert match, text
    return int(match[1]) * _UNITS[match[2]]


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def pods(file: Path) -> Iterator[dict[str, Any]]:
    """The specs of the pods that a file is about."""
    for document in documents(file):
        if document["kind"] == "Pod":
            yield document["spec"]
        elif "template" in document["spec"]:
            yield document["spec"]["template"]["spec"]


def in_pod(file: Path, pod: dict[str, Any]) -> list[Process]:
    found = []
    for spec in (*pod.get("initContainers", []), *pod["containers"]):
        environment = {each["name"]: each["value"] for each in spec.get("env", [])}
        mounts = {each["mountPath"]: each["name"] for each in spec.get("volumeMounts", [])}
        arguments = [*spec.get("command", []), *spec.get("args", [])]
        found.append(Process(f"{file.name} {spec['name']}", spec, environment, mounts, arguments))
    return found


def in_compose() -> list[Process]:
    found = []
    for name, spec in documents(COMPOSE)[0]["services"].items():
        mounts = {path: volume for volume, path in (each.split(":")[:2] for each in spec["volumes"])}
        mounts["/run/secrets"] = ",".join(spec["secrets"])
        arguments = [*spec.get("entrypoint", []), *spec["command"]]
        found.append(Process(f"{COMPOSE.name} {name}", spec, spec["environment"], mounts, arguments))
    return found


def everything() -> list[Process]:
    return in_compose() + [process for file in KUBERNETES for pod in pods(file) for process in in_pod(file, pod)]


def packers() -> list[Process]:
    return [process for process in everything() if process.is_packer]


def engines() -> list[Process]:
    return [process for process in everything() if "vllm" in process.arguments[:1]]


def named(processes: list[Process]) -> Any:
    return pytest.mark.parametrize("process", processes, ids=[each.where for each in processes])


def commands(process: Process) -> Iterator[list[str]]:
    """What else is run in the container: its probes and its hooks."""
    spec = process.spec
    if "healthcheck" in spec:
        kind, *command = spec["healthcheck"]["test"]
        assert kind == "CMD"
        yield command
    handlers = [spec.get(f"{probe}Probe", {}) for probe in ("startup", "liveness", "readiness")]
    handlers += spec.get("lifecycle", {}).values()
    yield from (handler["exec"]["command"] for handler in handlers if "exec" in handler)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Of a Dockerfile: each instruction and what stands behind it, continued lines put together."""
    lines = [line for line in file.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def final_stage() -> list[tuple[str, str]]:
    found = instructions(DOCKERFILE)
    return found[max(n for n, (name, _) in enumerate(found) if name == "FROM") :]


def check_command(words: list[str]) -> None:
    """There is such a command of packer-service, with these options."""
    program, name, *arguments = words
    assert program == "packer-service"
    known = get_command(app).commands[name]  # type: ignore[attr-defined]
    known.make_context(name, list(arguments))  # raises where an option is unknown, or its value
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert [word for word in arguments if word.startswith("--") and f"{word} " not in shown] == []


# -- the schemas -------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_one_by_the_compose_specification():
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(documents(COMPOSE)[0])


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_each_kubernetes_manifest_is_one_by_the_oldest_and_the_newest_schema_that_it_is_for(file):
    for version in (OLDEST.get(file.name, SIDECARS), kubernetes_validate.latest_version()):
        for document in documents(file):
            kubernetes_validate.validate(document, version, strict=True)


def test_a_name_that_is_misspelt_would_be_found():
    """The schemas are strict: without that they find little."""
    pod = documents(ROOT / "configs" / "kubernetes" / "pod.yaml")[0]
    pod["spec"]["initContainers"][0]["restartpolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="restartpolicy"):
        kubernetes_validate.validate(pod, SIDECARS, strict=True)


# -- isolation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_no_pod_shares_namespaces_with_its_node_nor_any_of_them_among_its_containers(file):
    for pod in pods(file):
        assert not {"hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"} & pod.keys()
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == UID
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False


def test_the_containers_of_compose_share_no_namespace():
    for process in in_compose():
        assert not {"ipc", "pid", "uts", "userns_mode", "privileged", "init"} & process.spec.keys(), process.where
        assert process.spec["user"] == f"{UID}:{UID}"


@named(packers())
def test_a_packer_has_a_nameless_uid_no_capability_and_a_read_only_root(process):
    if "securityContext" in process.spec:
        context = process.spec["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "runAsUser" not in context  # the pod's
    else:
        assert process.spec["read_only"] is True
        assert process.spec["cap_drop"] == ["ALL"]
        assert process.spec["security_opt"] == ["no-new-privileges:true"]


def test_packers_and_engines_have_the_socket_directory_and_the_key_in_common_and_nothing_else():
    together = [in_compose(), *(in_pod(file, pod) for file in KUBERNETES for pod in pods(file))]
    shared = {"sockets", "packer-key"}
    for processes in together:
        for packer in (each for each in processes if each.is_packer):
            assert set(packer.mounts.values()) == shared, packer.where
            assert "/dev/shm" not in packer.mounts
        for engine in (each for each in processes if each.arguments[:1] == ["vllm"]):
            assert set(engine.mounts.values()) >= shared, engine.where


def is_read_only(process: Process, volume: str) -> bool:
    if mounts := process.spec.get("volumeMounts"):
        return any(each["name"] == volume and each.get("readOnly", False) for each in mounts)
    return any(each.startswith(f"{volume}:") and each.endswith(":ro") for each in process.spec["volumes"])


@named(engines())
def test_an_engine_may_connect_to_sockets_and_neither_remove_nor_replace_one(process):
    """test_namespaces.py connects through such a mount."""
    assert is_read_only(process, "sockets")


@named(packers())
def test_a_packer_may_write_to_the_directory_of_its_socket(process):
    assert not is_read_only(process, "sockets")


# -- who finds whom ----------------------------------------------------------------------------------------------------


@named(packers() + engines())
def test_socket_and_key_are_where_a_volume_is_mounted(process):
    for path in (*process.sockets, process.environment["PACKER_KEY_FILE"]):
        volume = next((name for mount, name in process.mounts.items() if path.startswith(f"{mount}/")), None)
        assert volume == ("sockets" if path.endswith(".sock") else "packer-key"), path


def test_each_engine_is_told_of_the_packers_beside_it_under_the_paths_that_these_have():
    sets = [in_compose()] + [in_pod(file, pod) for file in KUBERNETES for pod in pods(file)]
    daemons = [process for process in packers() if process.where.startswith("daemonset.yaml")]
    for processes in sets:
        for engine in (each for each in processes if each.arguments[:1] == ["vllm"]):
            beside = [each for each in processes if each.is_packer] or daemons
            assert sorted(engine.sockets) == sorted(socket for each in beside for socket in each.sockets)
            assert {each.environment["PACKER_KEY_FILE"] for each in (engine, *beside)} == {
                engine.environment["PACKER_KEY_FILE"]
            }
            assert engine.environment["PACKER_MODE"] == "sidecar"


def test_the_nodes_directory_is_the_same_for_the_packers_and_for_the_engines():
    paths = {
        volume["hostPath"]["path"]
        for file in KUBERNETES
        for pod in pods(file)
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    assert paths == {"/run/packer-service"}


@named(packers() + engines())
def test_every_variable_that_begins_with_packer_is_a_setting_and_has_a_value_that_is_allowed(process):
    given = {name: value for name, value in process.environment.items() if name.startswith("PACKER_")}
    assert given.keys() <= VARIABLES
    pool = given.pop("PACKER_POOL_MAX_BYTES", None)  # this machine may have less memory
    Settings.load({}, given)
    assert pool is None or nbytes(pool) >= GIB


def test_the_packers_of_one_pod_have_sockets_metrics_and_gpus_of_their_own():
    for file in KUBERNETES:
        for pod in pods(file):
            found = [each.environment for each in in_pod(file, pod) if each.is_packer]
            for name in ("PACKER_SOCKET", "PACKER_METRICS_ADDRESS", "NVIDIA_VISIBLE_DEVICES"):
                values = [environment.get(name) for environment in found]
                assert len(set(values)) == len(values), (file.name, name)


# -- the GPU -----------------------------------------------------------------------------------------------------------


@named(packers())
def test_no_packer_requests_a_gpu_of_its_own(process):
    resources = process.spec.get("resources", {})
    assert not [name for kind in ("requests", "limits") for name in resources.get(kind, {}) if "nvidia.com" in name]
    assert "devices" not in process.spec.get("deploy", {}).get("resources", {}).get("reservations", {})
    assert "gpus" not in process.spec


def test_both_containers_of_a_pod_with_a_claim_name_the_same_one():
    file = ROOT / "configs" / "kubernetes" / "dra.yaml"
    (pod,) = pods(file)
    processes = in_pod(file, pod)
    assert [each.spec["resources"]["claims"] for each in processes] == [[{"name": "gpu"}]] * 2
    (template,) = (each for each in documents(file) if each["kind"] == "ResourceClaimTemplate")
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 1
    assert not [each for each in processes if "NVIDIA_VISIBLE_DEVICES" in each.environment]


def test_both_containers_of_compose_are_shown_the_same_gpu():
    first, second = in_compose()
    assert first.environment["NVIDIA_VISIBLE_DEVICES"] == second.environment["NVIDIA_VISIBLE_DEVICES"]
    assert first.spec["runtime"] == second.spec["runtime"] == "nvidia"


def test_a_pod_whose_packer_sees_a_gpu_by_its_number_has_the_runtime_that_reads_the_variable():
    for file in KUBERNETES:
        for pod in pods(file):
            if any("NVIDIA_VISIBLE_DEVICES" in each.environment for each in in_pod(file, pod)):
                assert pod["runtimeClassName"] == "nvidia", file.name


# -- memory, probes and the end ----------------------------------------------------------------------------------------


@named(packers())
def test_a_packers_memory_limit_holds_its_pool_itself_a_probe_and_what_a_pool_leaves_free(process):
    resources = process.spec.get("resources") or process.spec["deploy"]["resources"]
    limit = nbytes(resources["limits"]["memory"])
    assert limit >= nbytes(process.environment["PACKER_POOL_MAX_BYTES"]) + PACKER_BYTES + PROBE_BYTES + LEFT_TO_OTHERS
    if "requests" in resources:
        assert resources["requests"]["memory"] == resources["limits"]["memory"]  # pinned: nothing of it is taken back


@named(packers())
def test_a_packers_arguments_its_probes_and_its_hooks_are_commands_that_there_are_and_reach_it(process):
    check_command(["packer-service", *process.arguments])
    assert process.arguments == ["serve", "--device", "cuda:0"]
    assert process.environment["PACKER_EXIT_AFTER_S"] == "0"
    found = list(commands(process))
    assert found
    for command in found:
        check_command(command)
        options = dict(itertools.pairwise(command))
        assert options["--socket"] == process.environment["PACKER_SOCKET"]
        assert options["--key-file"] == process.environment["PACKER_KEY_FILE"]


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_a_probe_has_more_time_than_its_command_takes_and_a_hook_less_than_the_pod(file):
    for pod in pods(file):
        for process in (each for each in in_pod(file, pod) if each.is_packer):
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in process.spec:
                    assert process.spec[probe]["timeoutSeconds"] > 3.0  # health's own --timeout-s
            hook = process.spec.get("lifecycle", {}).get("preStop")
            if hook:
                command = hook["exec"]["command"]
                assert command[1] == "drain"
                assert pod["terminationGracePeriodSeconds"] >= float(command[command.index("--timeout-s") + 1]) + 15


def test_a_packer_beside_its_engine_is_a_native_sidecar_that_nothing_drains_before_the_engine_ended():
    for name in ("pod.yaml", "dra.yaml"):
        for pod in pods(ROOT / "configs" / "kubernetes" / name):
            (sidecar,) = pod["initContainers"]
            assert sidecar["restartPolicy"] == "Always"
            assert "startupProbe" in sidecar  # the engine is started when it is met
            assert "readinessProbe" not in sidecar  # the pod serves without a packer, too
            assert "lifecycle" not in sidecar
    assert documents(COMPOSE)[0]["services"]["vllm-omni"]["depends_on"] == {"packer": {"condition": "service_started"}}


# -- the image ---------------------------------------------------------------------------------------------------------


def test_the_images_last_stage_is_the_packer_with_a_numeric_user_and_pid_1():
    stage = final_stage()
    assert stage[0][1].endswith(" AS packer")
    of = {name: rest for name, rest in stage}
    assert of["USER"] == f"{UID}:{UID}"
    assert json.loads(of["ENTRYPOINT"]) == ["packer-service"]  # JSON: no shell stands between
    check_command([*json.loads(of["ENTRYPOINT"]), *json.loads(of["CMD"])])


def test_the_images_own_settings_and_its_health_check_name_the_same_socket():
    of = {name: rest for name, rest in final_stage()}
    environment = dict(word.split("=", 1) for word in shlex.split(of["ENV"]))
    assert {name for name in environment if name.startswith("PACKER_")} <= VARIABLES
    assert "NVIDIA_VISIBLE_DEVICES" not in environment
    command = json.loads(of["HEALTHCHECK"].split(" CMD ", 1)[1])
    check_command(command)
    assert command[command.index("--socket") + 1] == environment["PACKER_SOCKET"]


def test_the_image_is_built_from_files_that_there_are_and_from_the_lock_with_its_hashes():
    copied = [rest.split() for name, rest in instructions(DOCKERFILE) if name == "COPY" and "--from" not in rest]
    assert copied
    assert [source for *sources, _ in copied for source in sources if not (ROOT / source).exists()] == []
    installs = " ".join(rest for name, rest in instructions(DOCKERFILE) if name == "RUN")
    assert "--require-hashes -r requirements/packer.lock" in installs
    assert "[cuda]" in installs
    assert "torch" not in installs


def test_the_key_beside_the_compose_file_gets_into_no_commit_no_sdist_and_no_build():
    (secret,) = (Path(each["file"]) for each in documents(COMPOSE)[0]["secrets"].values())
    folder = (COMPOSE.parent / secret).parent.relative_to(ROOT).as_posix()
    assert f"/{folder}" in (ROOT / ".gitignore").read_text().splitlines()
    assert f"prune {folder}" in (ROOT / "MANIFEST.in").read_text().splitlines()
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"  # nothing, but for what is named after it; the last rule that matches holds
    assert rules.index("!configs") < rules.index(COMPOSE.parent.relative_to(ROOT).as_posix())
    copied = [rest.split()[:-1] for name, rest in instructions(DOCKERFILE) if name == "COPY" and "--from" not in rest]
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert {source.rstrip("/") for sources in copied for source in sources} == allowed
