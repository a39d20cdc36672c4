"""The compose file follows the Compose specification, keeps its secrets, and is read as compose reads it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from saturn_airflow.deployment.compose import ComposeError, interpolate, load, seconds
from saturn_airflow.deployment.local import LocalCluster, new_secrets, secrets_of

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = DOCKER / "compose.yaml"
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


@pytest.fixture(scope="module")
def raw() -> dict:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml", "node.yaml"])
def test_it_follows_the_specification(name):
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(DOCKER / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dependencies_exist_and_can_be_met(raw):
    services = raw["services"]
    for name, service in services.items():
        for other, body in service.get("depends_on", {}).items():
            assert body["condition"] in CONDITIONS
            if body["condition"] == "service_healthy":
                assert "healthcheck" in services[other], f"{name} waits for the health of {other}"
            if body["condition"] == "service_completed_successfully":
                assert services[other]["restart"] == "no"


def test_all_that_is_asked_for_is_there(raw):
    expected = {"postgres", "redis", "mlflow", "init", "airflow", "scheduler", "dag-processor", "triggerer"}
    assert set(raw["services"]) == expected | {"worker", "gpu-a", "gpu-b"}
    for node in ("gpu-a", "gpu-b"):
        assert f"--queues=saturn.{node}" in raw["services"][node]["command"]
    # Everything that stays has a health check, and is started again when it ends.
    for name, service in raw["services"].items():
        if name != "init":
            assert "healthcheck" in service
            assert service["restart"] == "unless-stopped"


def test_named_volumes_are_declared(raw):
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


def test_ports_are_open_on_this_machine_only_unless_asked(raw):
    published = [port for service in raw["services"].values() for port in service.get("ports", ())]
    assert len(published) == 4
    for port in published:
        assert interpolate(port, {}).startswith("127.0.0.1:")
        assert interpolate(port, {"SATURN_BIND": "10.0.0.5"}).startswith("10.0.0.5:")


def test_no_services_log_grows_without_bound(raw):
    for name, service in raw["services"].items():
        assert service["logging"]["driver"] == "local", name


@pytest.mark.parametrize("name", sorted(new_secrets()))
def test_no_secret_has_a_default(name):
    secrets = new_secrets()
    load(COMPOSE, secrets)
    for value in (None, ""):
        missing = {**secrets, name: value}
        if value is None:
            del missing[name]
        with pytest.raises(ComposeError, match=f"{name} is not set: see .env.example"):
            load(COMPOSE, missing)


def test_no_secret_is_written_in_the_files():
    for path in DOCKER.iterdir():
        if path.is_file():
            text = path.read_text()
            values = re.findall(r"(?:PASSWORD|SECRET|SECRET_KEY|FERNET_KEY)(?:=|: )[ \t]*(\S*)", text)
            assert [value for value in values if value and not value.startswith("${")] == [], path


@pytest.mark.parametrize("name", sorted(load(COMPOSE, new_secrets())))
def test_no_secret_is_in_a_command_line(name):
    secrets = new_secrets()
    service = load(COMPOSE, secrets)[name]
    texts = [*service.command, *(service.healthcheck.test if service.healthcheck else ())]
    assert [text for text in texts for value in secrets.values() if value in text] == []
    # What a shell puts into the arguments of another program is in its command line, too.
    words = [word for text in texts for word in shlex.split(text.partition("<<")[0])]
    shown = [word for word in words if re.search(r"\$\w*(PASSWORD|AUTH|SECRET|BROKER_URL)", word)]
    allowed = (
        ["--password=$ADMIN_PASSWORD"] if name == "init" else []
    )  # for seconds, when the database is made
    assert [word for word in shown if not word.startswith("CELERY_BROKER_URL=")] == allowed


def test_mlflow_answers_to_exact_names():
    def hosts(**variables):
        command = load(COMPOSE, {**new_secrets(), **variables})["mlflow"].command
        (option,) = [word for word in command if word.startswith("--allowed-hosts=")]
        return set(option.partition("=")[2].split(","))

    always = {"localhost:*", "127.0.0.1:*", "mlflow:*"}
    assert hosts() == always
    assert hosts(MLFLOW_ALLOWED_HOSTS="10.0.0.5:*,ml.shop:*") == always | {"10.0.0.5:*", "ml.shop:*"}
    for host in hosts():
        assert "*" not in host.removesuffix(":*"), "10.* matches 10.evil.example"


def test_services_can_not_become_root(raw):
    for name, service in raw["services"].items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # The images of Postgres and Redis begin as root and step down; ours never is.
        assert ("build" not in service) or service["cap_drop"] == ["ALL"], name
        assert not service.get("privileged")
        assert "cap_add" not in service


def test_images_have_versions(raw):
    for name, service in raw["services"].items():
        assert re.search(r":(\d|\$\{SATURN_DEVICE)", service["image"]), name


def test_the_example_lists_every_variable():
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", COMPOSE.read_text())) - {"LISTEN", "AIRFLOW_ADMIN_USER"}
    listed = set(re.findall(r"^#?(\w+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE))
    assert used == listed


def test_the_example_gives_the_defaults():
    text = (DOCKER / ".env.example").read_text()
    defaults = dict(re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", COMPOSE.read_text()))
    examples = dict(re.findall(r"^#(\w+)=(.*)$", text, re.MULTILINE))
    sizes = [name for name in examples if name.endswith(("_PORT", "_WORKERS", "_CONNECTIONS", "CONCURRENCY"))]
    assert len(sizes) >= 8
    assert {name: examples[name] for name in sizes} == {name: defaults[name] for name in sizes}


def test_the_image_has_what_the_files_name(raw):
    lines = (DOCKER / "Dockerfile").read_text()
    words = shlex.split(lines.replace("\\\n", " "), comments=True)
    for service in raw["services"].values():
        if "build" in service:
            assert service["build"]["dockerfile"] == "docker/Dockerfile"
            for text in service["volumes"]:
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
def test_variables_are_read_as_compose_reads_them(text, variables, expected):
    assert interpolate(text, variables) == expected


def test_what_is_no_compose_file_is_named(tmp_path):
    path = tmp_path / "compose.yaml"
    with pytest.raises(ComposeError, match=r"there is no compose file \S+compose\.yaml"):
        load(path, {})
    path.write_text("services: [")
    with pytest.raises(ComposeError, match=r"compose\.yaml is no YAML"):
        load(path, {})


def test_times():
    assert seconds("1m30s") == 90
    assert seconds("500ms") == 0.5


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path):
    first = secrets_of(tmp_path / "secrets.env")
    assert secrets_of(tmp_path / "secrets.env") == first
    assert (tmp_path / "secrets.env").stat().st_mode & 0o077 == 0
    assert secrets_of(tmp_path / "other.env") != first


def test_here_nothing_of_a_container_is_left(tmp_path):
    cluster = LocalCluster(tmp_path / "state", COMPOSE, tmp_path)
    for name, service in cluster.services.items():
        words = [cluster._local(word) for word in service.command]
        values = [cluster.environment(name)[key] for key in service.environment]
        for text in (*words, *values):
            paths = re.findall(r"(?<![\w.:/-])/(?:opt|var)/[\w/.-]+", text)
            assert [path for path in paths if not path.startswith(str(tmp_path))] == []
            assert not re.search(r"0\.0\.0\.0|[@/](postgres|redis|mlflow|airflow):\d", text)
    assert cluster.home == tmp_path / "state" / "volumes" / "checkpoints"
