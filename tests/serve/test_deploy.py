"""The files of `deploy/`: the dashboard reads existing metrics."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import yaml
from serve_driver import Running

from draftree.serve.app import GRACE, SENDING

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_dashboard_reads_existing_metrics(server: Running) -> None:
    server.complete("The sea the sea the sea", max_tokens=30, ignore_eos=True)
    known = set(re.findall(r"^(draftree_\w+)", server.http.get("/metrics").text, re.M))
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"draftree_\w+", target["expr"])}  # fmt: skip
    assert len(dashboard["panels"]) == 14
    assert asked <= known
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(set(places)) == 14


def test_mounted_files_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounted = [
        volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", ())
    ]
    assert len(mounted) == 4
    assert all((DEPLOY / path).is_file() for path in mounted)
    own = compose["services"]["draftree"]
    assert (DEPLOY.parent / own["build"]["dockerfile"]).is_file()
    assert int(own["stop_grace_period"].removesuffix("s")) > GRACE + SENDING
    for name in ("prometheus.yaml", "grafana/datasource.yaml", "grafana/dashboards.yaml"):
        assert yaml.safe_load((DEPLOY / name).read_text())


def test_ports_are_open_to_this_machine_only() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_ignored_files_stay_out_of_the_image() -> None:

    def lines(name: str) -> list[str]:
        text = (DEPLOY.parent / name).read_text()
        return [line.strip("/") for line in text.splitlines() if line and not line.startswith("#")]

    kept_out = [line.removeprefix("**/") for line in lines(".dockerignore")]
    assert ".git" in kept_out
    for line in lines(".gitignore"):
        assert any(fnmatch(line.removeprefix("src/draftree/**/"), pattern) for pattern in kept_out), line
