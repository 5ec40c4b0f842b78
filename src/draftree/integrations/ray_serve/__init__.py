"""Replicas on Ray Serve: on the cores of one machine, or on the machines of a Ray cluster.

`draftree serve --replicas 2` starts them here; on a cluster, `serve run draftree.integrations.ray_serve:app model=M`.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.by_name import check_drafter, make_drafter
from draftree.errors import install
from draftree.placement import Placement
from draftree.serve.launch import Launch
from draftree.serve.settings import ServerSettings, keys_of

MISSING = f"Replicas need Ray: {install('serve,ray')}."
ENDLESS = 1_000_000
GRACE = 10.0  # seconds that running answers have when a replica is told to stop
NUMBERS = {  # of `ServerSettings`: the argument, what it is called there, and what it is
    "slots": ("slots", int),
    "queue": ("queue", int),
    "max_prompt_tokens": ("max_prompt_tokens", int),
    "max_output_tokens": ("max_output_tokens", int),
    "max_choices": ("most_choices", int),
    "max_body_bytes": ("body_bytes", int),
    "timeout": ("timeout", float),
}
PLACEMENT = ("device", "dtype", "quantize")
OTHERS = (
    *("model", "drafter", "name", "trie", "runner", "strict", "threads", *PLACEMENT),
    *("replicas", "most_replicas", "exchange", "gpus", "api_keys", "share"),
)
TRUTH = {"true": True, "false": False}


def deployment(
    launch: Launch,
    *,
    replicas: int = 1,
    most_replicas: int | None = None,
    exchange: float | None = None,
    gpus: float = 0.0,
) -> Any:
    """The application as `ray.serve.run` takes it: replicas behind a front that routes by the beginnings of texts.

    Args:
        launch: how each replica makes its server.
        replicas: how many; with `most_replicas`, how many at least.
        most_replicas: Ray starts as many replicas more as the load asks for, up to so many in all.
        exchange: seconds between two exchanges of what the replicas' tries learned; None for none.
        gpus: of each replica; a part of one lets several replicas share it.

    Raises:
        ValueError: Ray is not installed, or a number out of range.
    """
    if find_spec("ray") is None:
        raise ValueError(MISSING)
    if replicas < 1 or (most_replicas is not None and most_replicas < replicas):
        raise ValueError(f"{replicas} to {most_replicas} replicas cannot be: give at least 1, and no fewer at most.")
    if exchange is not None and not exchange > 0:
        raise ValueError(f"exchange is {exchange:g}: give seconds over 0, or leave it out.")
    if not gpus >= 0:
        raise ValueError(f"gpus is {gpus:g}: give how many each replica has, or leave it out.")
    if not gpus and launch.placement.device.startswith("cuda"):
        raise ValueError(
            f"device is {launch.placement.device!r}, and Ray shows replicas without gpus none: give how many each has."
        )
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from draftree.integrations.ray_serve.front import Front
    from draftree.integrations.ray_serve.replica import Replica
    from draftree.integrations.ray_serve.router import PrefixRouter

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
        max_ongoing_requests=ENDLESS,  # the replica itself says when it is full
        # Ray shows a replica its own GPUs alone, and none where it was given none.
        ray_actor_options={"num_cpus": launch.threads or 1, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(**router),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=GRACE,
        **scale,
    ).bind(launch, exchange=exchange is not None)

    class Door:
        """Ray's ingress; makes the front where it runs."""

        def __init__(self, handle: Any) -> None:
            self.front = Front(handle, settings, exchange)

        def __serve_build_asgi_app__(self) -> Any:
            return self.front

    ingress: Any = serve.ingress()(Door)
    door = make(ingress, name="Front", max_ongoing_requests=ENDLESS, ray_actor_options={"num_cpus": 0})
    return door.bind(workers)


def app(arguments: dict[str, Any]) -> Any:
    """The application of `serve run draftree.integrations.ray_serve:app NAME=VALUE ...`.

    Args:
        arguments: model, drafter, trie, name, runner, strict (true or false), threads; device, dtype and quantize of
            `Placement`; api_keys (joined by commas, those of the environment are more), share (true or false);
            replicas, most_replicas, exchange and gpus of `deployment`; slots, queue, timeout, max_prompt_tokens,
            max_output_tokens, max_choices and max_body_bytes of `draftree serve`.

    Raises:
        ValueError: an argument that is not known, or a value that cannot be.
    """
    unknown = sorted(set(arguments) - set(NUMBERS) - set(OTHERS))
    if unknown:
        raise ValueError(f"There is no argument {unknown[0]!r}: give some of {', '.join(sorted({*NUMBERS, *OTHERS}))}.")

    def number(name: str, kind: Any, default: Any = None) -> Any:
        try:
            return kind(arguments[name]) if name in arguments else default
        except ValueError:
            raise ValueError(f"{name} is {arguments[name]!r}: give a number.") from None

    model, drafter = arguments.get("model"), arguments.get("drafter", "lookahead")
    trie = Path(arguments["trie"]) if "trie" in arguments else None
    check_drafter(drafter, trie)

    def truth(name: str) -> bool:
        said = str(arguments.get(name, "false")).lower()
        if said not in TRUTH:
            raise ValueError(f"{name} is {arguments[name]!r}: give true or false.")
        return TRUTH[said]

    given = {setting: number(name, kind) for name, (setting, kind) in NUMBERS.items() if name in arguments}
    keys = keys_of(str(arguments["api_keys"]).split(",") if "api_keys" in arguments else ())
    sharing = "all" if truth("share") else "key"
    placement = Placement(**{name: str(arguments[name]) for name in PLACEMENT if name in arguments})
    gpus = number("gpus", float, 0.0)
    # With GPUs the replicas' machines have the device, and not the one that this runs on.
    (replace(placement, device="cpu") if gpus else placement).check()
    name = arguments.get("name") or (Path(model).name if model else "draftree-demo")
    launch = Launch(
        model,
        partial(named_parts, drafter, trie),
        ServerSettings(model_name=name, root=model or "", api_keys=keys, sharing=sharing, **given),
        runner=arguments.get("runner", "auto"),
        strict=truth("strict"),
        threads=number("threads", int, 1),
        placement=placement,
    )
    replicas, most = number("replicas", int, 1), number("most_replicas", int)
    exchange = number("exchange", float)
    return deployment(launch, replicas=replicas, most_replicas=most, exchange=exchange, gpus=gpus)


def named_parts(drafter: str, trie: Path | None, model: Any, tokenizer: Any) -> dict[str, Any]:
    """`drafter` and `pruner` of an engine, by the drafter's name."""
    return {"drafter": make_drafter(drafter, tokenizer, model, trie=trie), "pruner": None}


def run(application: Any, host: str, port: int, cores: int) -> None:
    """Start Ray on this machine, where it does not run yet, and serve until the process is told to stop.

    Args:
        application: of `deployment`.
        host, port: to listen on.
        cores: that Ray may give away.
    """
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
