"""The files of contrib/ say what the program and the package have. `tools/deployments.py` tries them."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from mtmd.cli import parser
from mtmd.cluster.command import SOME_FAILED
from mtmd.commands.ray_options import check_ray_options, replicas
from mtmd.commands.serve import _settings
from mtmd.web.models.progress import Loading
from mtmd.web.settings import ServerSettings
from mtmd.web.small_apps.loading_app import create_loading_app

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib"
IMAGE = "registry.example.org/mtmd-ray"
LIMITS = ServerSettings()


def unit():
    result = configparser.ConfigParser(strict=False, interpolation=None)
    result.optionxform = str
    result.read(CONTRIB / "mtmd.service")
    return result


def steps():
    """(instruction, the rest) of each step of the Containerfile."""
    text = (CONTRIB / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def of_proxies():
    texts = [(CONTRIB / name).read_text() for name in ("nginx.conf", "Caddyfile")]
    return [line for text in texts for line in re.findall(r"^#\s+mtmd (serve .*)$", text, re.M)]


def command_lines():
    (exec_,) = [value for key, value in unit()["Service"].items() if key == "ExecStart"]
    yield exec_.partition(" ")[2].replace("$MTMD_OPTIONS", "-m org/name --parallel 32")
    (entry,) = [json.loads(rest) for word, rest in steps() if word == "ENTRYPOINT"]
    assert entry[0] == "mtmd"
    yield shlex.join(entry[1:])
    yield from of_proxies()


@pytest.mark.parametrize("line", [*command_lines()])
def test_its_options_are_those_of_the_command(line, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("anna:a-key-that-is-long-enough\n")
    arguments = [str(keys) if "keys" in word else word for word in shlex.split(line)]
    assert isinstance(_settings(parser().parse_args(arguments)), ServerSettings)


def test_the_container_is_built_of_what_is_here():
    words = [word for word, _ in steps()]
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE"}
    known |= {"STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert set(words) == known and words[0] == "FROM" and words.index("USER") < words.index("CMD")
    health = dict(steps())["HEALTHCHECK"]
    compile(json.loads(health[health.index("[") :])[2], "HEALTHCHECK", "exec")
    installed = " ".join(rest for word, rest in steps() if word == "RUN")
    assert "-c constraints.txt ." in installed
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "web"} & set(left_out)
    compose = (CONTRIB / "compose.yaml").read_text()
    assert (ROOT / "contrib" / re.search(r"context: (\S+)", compose)[1]).resolve() == ROOT
    assert (ROOT / re.search(r"dockerfile: (\S+)", compose)[1]).is_file()


def test_who_stops_it_waits_for_the_drain():
    service = unit()["Service"]
    drain = float(re.search(r"--drain (\d+)", service["ExecStart"])[1])
    assert float(service["TimeoutStopSec"]) > drain + 20  # and for the step that the device is in
    grace = int(re.search(r"stop_grace_period: (\d+)s", (CONTRIB / "compose.yaml").read_text())[1])
    assert grace > LIMITS.drain_s
    assert service["RestartPreventExitStatus"] == "2"


def test_proxies_let_through_what_the_server_takes():
    site = (CONTRIB / "nginx.conf").read_text()
    assert int(re.search(r"client_max_body_size (\d+)m", site)[1]) << 20 >= LIMITS.body_bytes
    named = {re.search(r"--root-path (\S+)", line)[1] for line in of_proxies() if "root" in line}
    assert named == {re.search(r"location (/\w+)/ ", site)[1]} == {"/mtmd"}


def test_the_job_of_a_ray_cluster_is_a_command_that_there_is():
    spec = yaml.safe_load((CONTRIB / "ray" / "rayjob.yaml").read_text())["spec"]
    command, _, otherwise = spec["entrypoint"].partition(" || ")
    args = parser().parse_args(shlex.split(command)[1:])
    workers = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert args.verb == "batch" and args.ray == "auto" and args.resume
    assert args.actors == sum(group["replicas"] for group in workers)
    assert otherwise == f"test $? -eq {SOME_FAILED}"
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [group["template"]["spec"]["containers"] for group in (head, *workers)]
    assert {container["image"] for pod in pods for container in pod} == {IMAGE}


def test_the_service_of_a_ray_cluster_is_a_command_that_there_is():
    spec = yaml.safe_load((CONTRIB / "ray" / "rayservice.yaml").read_text())["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    args = parser().parse_args(
        ["serve", "--ray", "auto", *shlex.split(application["args"]["command"])]
    )
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert check_ray_options(args)
    assert replicas(args.replicas) == (workers["minReplicas"], workers["maxReplicas"])
    assert args.threads <= 8
    assert "--host" not in application["args"]["command"], "http_options says it"
    assert spec["rayClusterDeletionDelaySeconds"] > args.drain
    pod = workers["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args.drain
    head = spec["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [pod, head["template"]["spec"]]
    assert {container["image"] for one in pods for container in one["containers"]} == {IMAGE}


@pytest.mark.parametrize("code", (0, 1, 2, SOME_FAILED, 130, 137))
def test_the_job_of_a_ray_cluster_is_tried_again_unless_every_row_is_there(code, tmp_path):
    """1 is what Python gives for a program that breaks."""
    spec = yaml.safe_load((CONTRIB / "ray" / "rayjob.yaml").read_text())["spec"]
    (tmp_path / "mtmd").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "mtmd").chmod(0o700)
    done = subprocess.run(["/bin/sh", "-c", spec["entrypoint"]], env={"PATH": str(tmp_path)})
    assert (done.returncode == 0) == (code in (0, SOME_FAILED))


def test_the_machines_of_a_ray_cluster_have_what_is_published():
    text = (CONTRIB / "ray" / "Containerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    pins = (ROOT / "constraints.txt").read_text()
    ray = re.search(r"^ray==(.*)$", pins, re.M)[1]
    assert (
        re.search(r"ARG VERSION=(.*)", text)[1] == re.search(r'^version = "(.*)"', project, re.M)[1]
    )
    assert set(re.findall(r"rayproject/ray:([\d.]+)", text)) == {ray} and f'"ray=={ray}"' in text
    for file in ("rayjob.yaml", "rayservice.yaml"):
        assert f'rayVersion: "{ray}"' in (CONTRIB / "ray" / file).read_text()
    extras = re.search(r"mtmd\[([\w,]+)\]", text)[1].split(",")
    assert "ray" in extras and all(re.search(rf"^{extra} = ", project, re.M) for extra in extras)
    assert IMAGE in text


def test_kubernetes_starts_what_the_image_has_and_asks_what_the_server_answers(tmp_path):
    claim, service, deployment = yaml.safe_load_all((CONTRIB / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (entry,) = [json.loads(rest) for word, rest in steps() if word == "ENTRYPOINT"]
    keys = tmp_path / "keys"
    keys.write_text("anna:a-key-that-is-long-enough\n")
    words = [word.replace("/etc/mtmd/keys", str(keys)) for word in container["args"]]
    args = parser().parse_args([*entry[1:], *words])
    settings = _settings(args)
    assert settings.api_key_file == keys and args.model == "org/name"
    user = {word: rest for word, rest in steps() if word == "USER"}["USER"].partition(":")[0]
    assert int(user) == pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= before + settings.drain_s + 10
    (port,) = (one["containerPort"] for one in container["ports"])
    assert port == settings.port == service["spec"]["ports"][0]["port"]
    routes = {rule.rule for rule in create_loading_app(Loading(), settings).url_map.iter_rules()}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        requested = container[probe]["httpGet"]
        assert requested["path"] in routes and requested["port"] == port
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert Path(args.data).is_relative_to(mounted["data"])
    names = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
    assert claim["metadata"]["name"] in names
