"""Replicas on Ray Serve: on the cores of one machine, or on the machines of a Ray cluster.

`draftree serve --replicas 2` starts them here; on a cluster, `serve run draftree.integrations.ray_serve:app model=M`.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from draftree.by_name import check_drafter, make_drafter
from draftree.checkpoints import Placement
from draftree.errors import check_least, install
from draftree.serve.app import Launch
from draftree.serve.settings import Limits, ServerSettings, keys_of

ENDLESS = 1_000_000
GRACE = 10.0  # Seconds that running answers have when a replica stops.


def deployment(launch: Launch, *, replicas: int = 1, most_replicas: int | None = None, gpus: float = 0.0) -> Any:
    """Return the application for `ray.serve.run`: replicas behind a front that routes by the beginnings of texts.

    Args:
        launch: how each replica makes its server.
        replicas: number of replicas; with `most_replicas` the smallest number.
        most_replicas: Ray adds replicas under load, up to this number.
        gpus: GPUs of each replica; a fraction lets several replicas share a GPU.

    Raises:
        ValueError: Ray is not installed, or a number is out of range.
    """
    _check(launch, replicas, most_replicas, gpus)
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from draftree.integrations.ray_serve.front import Front
    from draftree.integrations.ray_serve.replica import PrefixRouter, Replica

    make: Any = serve.deployment
    slots, settings = launch.settings.slots, launch.settings
    router: Any = {"request_router_class": PrefixRouter, "request_router_kwargs": {"slack": max(1, slots // 2)}}
    scale: dict[str, Any] = {"num_replicas": replicas}
    if most_replicas is not None:
        limits = {"min_replicas": replicas, "max_replicas": most_replicas, "target_ongoing_requests": slots}
        scale = {"autoscaling_config": limits}
    workers = make(
        Replica,
        name="Replica",
        max_ongoing_requests=ENDLESS,  # The replica itself refuses requests when its queue is full.
        ray_actor_options={"num_cpus": launch.threads or 1, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=GRACE,
        **scale,
    ).bind(launch)

    class Door:
        """Ray's ingress; it makes the front in its own process."""

        def __init__(self, handle: Any) -> None:
            self.front = Front(handle, settings)

        def __serve_build_asgi_app__(self) -> Any:
            return self.front

    ingress: Any = serve.ingress()(Door)
    door = make(ingress, name="Front", max_ongoing_requests=ENDLESS, ray_actor_options={"num_cpus": 0})
    return door.bind(workers)


def _check(launch: Launch, replicas: int, most_replicas: int | None, gpus: float) -> None:
    if find_spec("ray") is None:
        raise ValueError(f"Replicas need Ray: {install('serve,ray')}.")
    check_least(1, replicas=replicas)
    check_least(replicas, most_replicas=most_replicas)
    if not gpus >= 0:
        raise ValueError(f"gpus is {gpus:g}: give how many each replica has, or leave it out.")
    device = launch.placement.device
    if not gpus and device.startswith("cuda"):
        raise ValueError(f"device is {device!r}, and Ray shows replicas without gpus none: give how many each has.")


class OwnArguments(BaseModel):
    """Declare the arguments of `app` beside `Limits`: options of `draftree serve`, with the same names."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    drafter: str = "lookahead"
    trie: Path | None = None
    name: str | None = None
    runner: str = "auto"
    strict: bool = False
    threads: int = 1
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    api_keys: str | None = None
    replicas: int = 1
    most_replicas: int | None = None
    gpus: float = 0.0


LIMITS: Any = {one.name: (get_type_hints(Limits)[one.name], one.default) for one in fields(Limits)}
Arguments = create_model("Arguments", __base__=OwnArguments, **LIMITS)


def app(arguments: dict[str, Any]) -> Any:
    """Return the application of `serve run draftree.integrations.ray_serve:app NAME=VALUE ...`.

    Args:
        arguments: see `OwnArguments` and `Limits`; `api_keys`, joined by commas, are added to those of the environment.

    Raises:
        ValueError: an unknown argument, or a wrong value.
    """
    try:
        a: Any = Arguments(**arguments)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        if first["type"] == "extra_forbidden":
            names = ", ".join(Arguments.model_fields)
            raise ValueError(f"There is no argument {name!r}: give some of {names}.") from None
        raise ValueError(f"{name} is {arguments[str(name)]!r}: {first['msg']}.") from None
    check_drafter(a.drafter, a.trie)
    placement = Placement(a.device, a.dtype, None, a.quantize)
    # With GPUs, the machines of the replicas have the device.
    (replace(placement, device="cpu") if a.gpus else placement).check()
    settings = ServerSettings(
        model_name=a.name or (Path(a.model).name if a.model else "draftree-demo"),
        root=a.model or "",
        api_keys=keys_of(() if a.api_keys is None else a.api_keys.split(",")),
        **a.model_dump(include=set(LIMITS)),
    )
    parts = partial(_parts, a.drafter, a.trie)
    launch = Launch(a.model, parts, settings, a.runner, a.strict, a.threads, placement)
    return deployment(launch, replicas=a.replicas, most_replicas=a.most_replicas, gpus=a.gpus)


def _parts(drafter: str, trie: Path | None, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return `drafter` and `pruner` of an engine, by the drafter's name."""
    return {"drafter": make_drafter(drafter, tokenizer, model, trie=trie), "pruner": None}


def run(application: Any, host: str, port: int, cores: int) -> None:
    """Start Ray with `cores` cores on this machine unless it runs already, and serve until the process is stopped."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    if not ray.is_initialized():
        ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
    try:
        start: Any = serve.start
        start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        serve.run(application, name="draftree", route_prefix="/")
        print(f"draftree serves at http://{host}:{port}/v1; Ctrl-C stops it.", flush=True)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
