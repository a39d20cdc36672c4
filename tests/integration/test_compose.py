"""The compose files follow the specification, keep their secrets, and are read as compose reads them."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from saturn_airflow.deployment.compose import ComposeError, interpolate, load, seconds
from saturn_airflow.deployment.local import LocalCluster, new_secrets, secrets_of

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = DOCKER / "compose.yaml"
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


@pytest.fixture(scope="module")
def raw() -> Any:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml", "login.yaml", "node.yaml"])
def test_it_follows_the_specification(name: str) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(DOCKER / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dependencies_exist_and_can_be_met(raw: dict[str, Any]) -> None:
    services = raw["services"]
    for name, service in services.items():
        for other, body in service.get("depends_on", {}).items():
            assert body["condition"] in CONDITIONS
            if body["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for the health of {other}"
            if body["condition"] == "service_completed_successfully":
                assert services[other]["restart"] == "no"


def test_all_that_is_asked_for_is_there(raw: dict[str, Any]) -> None:
    expected = {"postgres", "redis", "mlflow", "airflow", "scheduler", "dag-processor", "triggerer"}
    assert set(raw["services"]) == expected | {"databases", "init", "worker", "gpu-a", "gpu-b"}
    for node in ("gpu-a", "gpu-b"):
        assert f"--queues=saturn.{node}" in raw["services"][node]["command"]
    # Everything that stays has a health check, and is started again when it ends.
    for name, service in raw["services"].items():
        if name not in ("databases", "init"):
            assert "healthcheck" in service
            assert service["restart"] == "unless-stopped"


def test_named_volumes_are_declared(raw: dict[str, Any]) -> None:
    used = set()
    for service in raw["services"].values():
        for text in service.get("volumes", ()):
            source = interpolate(text, {}).split(":")[0]
            if not source.startswith((".", "/")):
                used.add(source)
    assert used == set(raw["volumes"])
    for service in ("worker", "gpu-a", "gpu-b"):
        targets = [interpolate(text, {}).split(":")[1] for text in raw["services"][service]["volumes"]]
        assert "/var/lib/saturn" in targets


def test_ports_are_open_on_this_machine_only_unless_asked(raw: dict[str, Any]) -> None:
    published = [port for service in raw["services"].values() for port in service.get("ports", ())]
    assert len(published) == 4
    for port in published:
        assert interpolate(port, {}).startswith("127.0.0.1:")
        assert interpolate(port, {"SATURN_BIND": "10.0.0.5"}).startswith("10.0.0.5:")


def test_no_services_log_grows_without_bound(raw: dict[str, Any]) -> None:
    for name, service in raw["services"].items():
        assert service["logging"]["driver"] == "local", name


@pytest.mark.parametrize("name", sorted(new_secrets()))
def test_no_secret_has_a_default(name: Any) -> None:
    secrets = new_secrets()
    load(COMPOSE, secrets)
    for value in (None, ""):
        missing = {key: known for key, known in secrets.items() if key != name}
        if value is not None:
            missing[name] = value
        with pytest.raises(ComposeError, match=f"{name} is not set: see .env.example"):
            load(COMPOSE, missing)


def test_no_secret_is_written_in_the_files() -> None:
    for path in DOCKER.iterdir():
        if path.is_file():
            text = path.read_text()
            values = re.findall(r"(?:PASSWORD|SECRET|SECRET_KEY|FERNET_KEY)(?:=|: )[ \t]*(\S*)", text)
            assert [value for value in values if value and not value.startswith("${")] == [], path


@pytest.mark.parametrize("name", sorted(load(COMPOSE, new_secrets())))
def test_no_secret_is_in_a_command_line(name: Any) -> None:
    secrets = new_secrets()
    service = load(COMPOSE, secrets)[name]
    texts = [*service.command, *(service.healthcheck.test if service.healthcheck else ())]
    assert [text for text in texts for value in secrets.values() if value in text] == []
    # What a shell puts into the arguments of another program is in its command line, too; not what `printf`
    # prints, which is the shell's own.
    plain = [re.sub(r"(?m)^\s*printf [^|]*|<<END(?s:.*?)\n *END$", "", text) for text in texts]
    words = [word for text in plain for word in shlex.split(text, comments=True)]
    shown = [word for word in words if re.search(r"\$\w*(PASSWORD|AUTH|SECRET|BROKER_URL)", word)]
    assert [word for word in shown if not word.startswith("CELERY_BROKER_URL=")] == []


#: What each service is told of the secrets, and no more.
_QUEUES = {"REDIS_PASSWORD", "CELERY_DATABASE_PASSWORD"}
_DATABASE = {"AIRFLOW_DATABASE_PASSWORD", "AIRFLOW_FERNET_KEY"}
KEYS = {
    "postgres": {"POSTGRES_PASSWORD"},
    "redis": {"REDIS_PASSWORD"},
    "databases": {name for name in new_secrets() if name.endswith("DATABASE_PASSWORD")}
    | {"POSTGRES_PASSWORD"},
    "mlflow": {"MLFLOW_DATABASE_PASSWORD"},
    "init": {*_QUEUES, *_DATABASE, "AIRFLOW_ADMIN_PASSWORD"},
    "airflow": {*_DATABASE, "AIRFLOW_JWT_SECRET", "AIRFLOW_SECRET_KEY"},
    "scheduler": {*_QUEUES, *_DATABASE, "AIRFLOW_JWT_SECRET"},
    "dag-processor": _DATABASE,
    "triggerer": _DATABASE,
    "worker": _QUEUES,
    "gpu-a": _QUEUES,
    "gpu-b": _QUEUES,
}


def test_each_service_has_the_keys_that_it_needs_and_no_other() -> None:
    secrets = new_secrets()
    found = {
        name: {key for key, value in secrets.items() if any(value in text for text in _texts_of(service))}
        for name, service in load(COMPOSE, secrets).items()
    }
    assert found == KEYS


def test_a_node_of_its_own_needs_two_secrets_and_is_as_those_of_the_main_file(raw: dict[str, Any]) -> None:
    secrets = {name: value for name, value in new_secrets().items() if name in _QUEUES}
    variables = {**secrets, "SATURN_NODE": "gpu-a"}
    path = DOCKER / "node.yaml"
    assert set(load(path, variables)) == {"node"}
    with pytest.raises(ComposeError, match="SATURN_NODE is not set: the name of this node"):
        load(path, secrets)
    node = interpolate(yaml.safe_load(path.read_text())["services"]["node"], variables)
    del node["deploy"]  # its GPUs, as in gpu.yaml
    there = {**new_secrets(), **variables}
    expected = interpolate(raw["services"]["gpu-a"], there)
    del expected["depends_on"]
    assert node == expected


def test_a_login_for_mlflow_changes_nothing_else_of_it(raw: dict[str, Any]) -> None:
    added = yaml.safe_load((DOCKER / "login.yaml").read_text())["services"]
    assert set(added) == {"mlflow"}
    command = [word for word in added["mlflow"]["command"] if word != "--app-name=basic-auth"]
    assert command == raw["services"]["mlflow"]["command"]
    secrets = {name: f"secret-{name}" for name in ("MLFLOW_ADMIN_PASSWORD", "MLFLOW_SECRET_KEY")}
    service = interpolate(added["mlflow"], {**new_secrets(), **secrets})
    assert not any(value in word for word in service["command"] for value in secrets.values())
    for name in secrets:
        with pytest.raises(ComposeError, match=f"{name} is not set"):
            interpolate(added, {**new_secrets(), **secrets, name: ""})
    assert [text.split(":")[2] for text in service["volumes"]] == ["ro"]
    assert (DOCKER / "mlflow-login.ini").exists()


def _texts_of(service: Any) -> list[str]:
    return [*service.command, *service.environment.values()]


def test_mlflow_answers_to_exact_names() -> None:
    def hosts(**variables: Any) -> Any:
        command = load(COMPOSE, {**new_secrets(), **variables})["mlflow"].command
        (option,) = [word for word in command if word.startswith("--allowed-hosts=")]
        return set(option.partition("=")[2].split(","))

    always = {"localhost:*", "127.0.0.1:*", "mlflow:*"}
    assert hosts() == always
    assert hosts(MLFLOW_ALLOWED_HOSTS="10.0.0.5:*,ml.shop:*") == always | {"10.0.0.5:*", "ml.shop:*"}
    for host in hosts():
        assert "*" not in host.removesuffix(":*"), "10.* matches 10.evil.example"


def test_services_can_not_become_root_nor_change_their_image(raw: dict[str, Any]) -> None:
    for name, service in raw["services"].items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert not {"privileged", "cap_add", "pid", "ipc", "devices", "network_mode"} & set(service), name
        # The images of Postgres and Redis begin as root, which ours never is.
        assert "build" in service or service["user"] == service["image"].partition(":")[0], name
    assert "USER saturn" in (DOCKER / "Dockerfile").read_text().splitlines()


def test_services_have_memory_of_their_own(raw: dict[str, Any]) -> None:
    for name, service in raw["services"].items():
        assert re.fullmatch(r"\d+g|\$\{\w+_MEMORY:-\d+g\}", service["mem_limit"]), name


def test_what_code_of_jobs_can_write_holds_nothing_that_services_with_keys_run(raw: dict[str, Any]) -> None:
    """Only data: logs and Saturn's folder. Homes, caches and temporary folders are apart."""
    workers = ("worker", "gpu-a", "gpu-b")
    written = {name: _writable(service) for name, service in raw["services"].items()}
    for name, targets in written.items():
        shared = targets & set().union(*(written[worker] for worker in workers))
        assert name in workers or shared <= {"/opt/airflow/logs", "/var/lib/saturn"}, name
    for service in raw["services"].values():
        for text in service.get("volumes", ()):
            parts = interpolate(text, {}).split(":")
            assert parts[1] != "/opt/airflow/dags" or parts[2:] == ["ro"]
            assert "docker.sock" not in text


def test_what_services_write_they_may_write(raw: dict[str, Any]) -> None:
    """As far as it is known: the configuration's defaults, temporary files, sockets, caches."""
    for name, service in raw["services"].items():
        targets = _writable(service) | {text.partition(":")[0] for text in service["tmpfs"]}
        expected = {"/tmp"}
        if "build" in service and name != "databases":
            expected |= {"/opt/airflow", "/home/saturn"}
        expected |= {"postgres": {"/run/postgresql"}}.get(name, set())
        assert expected <= targets, name


def _writable(service: dict[str, Any]) -> set[str]:
    parts = [interpolate(text, {}).split(":") for text in service.get("volumes", ())]
    return {part[1] for part in parts if part[2:] != ["ro"]}


def test_images_have_versions(raw: dict[str, Any]) -> None:
    for name, service in raw["services"].items():
        exact = r"\w+:\d+\.\d+(\.\d+)?-bookworm|saturn-airflow:\$\{SATURN_DEVICE:-cpu\}"
        assert re.fullmatch(exact, service["image"]), name
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert "--constraint constraints.txt" in text


def test_the_image_has_a_compiler_for_what_torch_compiles_on_the_node() -> None:
    (installed,) = re.findall(r"apt-get install ([^&]*)", (DOCKER / "Dockerfile").read_text())
    assert "g++" in installed.split()


def test_the_example_lists_every_variable() -> None:
    text = "".join(path.read_text() for path in DOCKER.glob("*.yaml"))
    unlisted = {"LISTEN", "AIRFLOW_ADMIN_USER", "SATURN_NODE"}
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", text)) - unlisted
    listed = set(re.findall(r"^#?(\w+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE))
    assert used == listed


def test_the_example_gives_the_defaults() -> None:
    text = (DOCKER / ".env.example").read_text()
    defaults = dict(re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", COMPOSE.read_text()))
    examples = dict(re.findall(r"^#(\w+)=(.*)$", text, re.MULTILINE))
    sizes = [name for name in examples if name.endswith(("_PORT", "_WORKERS", "_CONNECTIONS", "CONCURRENCY"))]
    assert len(sizes) >= 8
    assert {name: examples[name] for name in sizes} == {name: defaults[name] for name in sizes}


def test_the_image_has_what_the_files_name(raw: dict[str, Any]) -> None:
    lines = (DOCKER / "Dockerfile").read_text()
    words = shlex.split(lines.replace("\\\n", " "), comments=True)
    for service in raw["services"].values():
        if "build" in service:
            assert service["build"]["dockerfile"] == "docker/Dockerfile"
            for text in service.get("volumes", ()):
                assert interpolate(text, {}).split(":")[1] in words
    for line in re.findall(r"^COPY (.*) \S+$", lines, re.MULTILINE):
        for name in line.split():
            assert (DOCKER.parent / name).exists()
            assert f"!{name}" in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("${A:-b}", {}, "b"),
        ("${A:-b}", {"A": ""}, "b"),
        ("${A-b}", {"A": ""}, ""),
        ("${A:-b}", {"A": "c"}, "c"),
        ("$A/${A}", {"A": "c"}, "c/c"),
        ("$$A $${A}", {"A": "c"}, "$A ${A}"),
        ("${A:-http://x:80}", {}, "http://x:80"),
        ("costs 5$", {}, "costs 5$"),
    ],
)
def test_variables_are_read_as_compose_reads_them(text: Any, variables: Any, expected: Any) -> None:
    assert interpolate(text, variables) == expected


def test_what_is_no_compose_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    with pytest.raises(ComposeError, match=r"there is no compose file \S+compose\.yaml"):
        load(path, {})
    path.write_text("services: [")
    with pytest.raises(ComposeError, match=r"compose\.yaml is no YAML"):
        load(path, {})


def test_times() -> None:
    assert seconds("1m30s") == 90
    assert seconds("500ms") == 0.5


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    first = secrets_of(tmp_path / "secrets.env")
    assert secrets_of(tmp_path / "secrets.env") == first
    assert (tmp_path / "secrets.env").stat().st_mode & 0o077 == 0
    assert secrets_of(tmp_path / "state" / "secrets.env") != first
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700, "logs and databases will be there"
    # As an earlier version left it, which knew fewer.
    (tmp_path / "old.env").write_text("# mine\nREDIS_PASSWORD=kept")
    completed = secrets_of(tmp_path / "old.env")
    assert completed["REDIS_PASSWORD"] == "kept"
    assert set(completed) == set(new_secrets())
    assert secrets_of(tmp_path / "old.env") == completed


def test_here_nothing_of_a_container_is_left(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "state", COMPOSE, tmp_path)
    for name, service in cluster.services.items():
        words = [cluster._local(word) for word in service.command]
        values = [cluster.environment(name)[key] for key in service.environment]
        for text in (*words, *values):
            paths = re.findall(r"(?<![\w.:/-])/(?:opt|var)/[\w/.-]+", text)
            assert [path for path in paths if not path.startswith(str(tmp_path))] == []
            assert not re.search(r"0\.0\.0\.0|[@/](postgres|redis|mlflow|airflow):\d+(?![\w@])", text)
    assert cluster.home == tmp_path / "state" / "volumes" / "checkpoints"
