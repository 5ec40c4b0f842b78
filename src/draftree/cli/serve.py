"""`draftree serve`: an OpenAI-compatible server for any model, drafting included."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.decoding import Drafting, Running
from draftree.cli.options import RealModel, Where, chosen_model, grouped
from draftree.errors import install
from draftree.serve.settings import KEYS, LOCAL_HOSTS, Limits, keys_of

if TYPE_CHECKING:
    from draftree.engine.engine import Engine
    from draftree.serve.app import Launch

MISSING = f"The server needs more packages: {install('serve')}."


@grouped
def serve(
    *,
    model: RealModel = None,
    where: Where,
    drafting: Drafting,
    trie: Annotated[Path | None, "Saved trie to draft from."] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model, beside --model itself.", show_default="last part of --model"),
    ] = None,
    host: Annotated[str, "Address to listen on; 0.0.0.0 lets other machines in."] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    limits: Limits,
    keep_alive: Annotated[
        int, typer.Option(min=1, help="Seconds after which a connection that is idle is closed.")
    ] = 75,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Key that lets a client in; may be given again. Better in {KEYS}, joined by commas."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host that requests may name; may be given again. Others get status 421.",
            show_default="any; localhost where it listens for this machine alone and has no key",
        ),
    ] = None,
    running: Running,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Replicas on Ray Serve, with --threads each.", show_default="none, no Ray")
    ] = None,
    most_replicas: Annotated[
        int | None, typer.Option(min=1, help="Replicas that Ray may start as the load asks.", show_default="--replicas")
    ] = None,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of each replica; a part of one is shared.")] = 0.0,
) -> None:
    """Serve MODEL under the OpenAI API: chat, completions, streams, metrics; the text is that of plain decoding."""
    drafting = drafting.under_grammars()
    drafting.check(trie)
    try:
        from draftree.serve.app import GracefulServer, Launch
        from draftree.serve.settings import ServerSettings, start_logging
    except ImportError as error:
        raise ValueError(MISSING) from error
    running.check()
    where.check()
    keys = keys_of(api_key or ())
    model = chosen_model(model, embedded=drafting.of_embedded)
    settings = ServerSettings(
        model_name=name or (Path(model).name.removesuffix(".gguf") if model else "draftree-demo"),
        root=model or "",
        api_keys=keys,
        allowed_hosts=hosts_for(host, allowed_host or (), keys),
        **vars(limits),
    )
    parts = partial(drafting.for_engine, trie=trie)
    launch = Launch(model, parts, settings, running.name, running.strict, where.threads, where.placement)
    if replicas is not None and keep_alive != 75:
        raise ValueError("Ray Serve keeps connections as it is set up itself: leave --keep-alive out with --replicas.")
    of_replicas = {"most_replicas": most_replicas, "gpus": gpus}
    if replicas is not None:
        scale_out(launch, replicas, host, port, **of_replicas)
        return
    for option, value in of_replicas.items():
        if value not in (None, 0.0):
            raise ValueError(f"--{option.replace('_', '-')} is for replicas: give --replicas too, or leave it out.")
    app = launch.app()
    start_logging()
    with listening(host, port) as opened:
        report(host, opened.getsockname()[1], settings.model_name, app.state.server.engine)
        quiet: dict[str, Any] = {"log_level": "warning", "log_config": None}  # uvicorn uses the root logger.
        GracefulServer(app.state.server.worker, app=app, keep_alive=keep_alive, **quiet).run(sockets=[opened])


def hosts_for(host: str, allowed: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that requests may name, none for any; see `ServerSettings.allowed_hosts`.

    A server without keys that listens on a loopback address is meant for this machine alone.
    """
    local = host in LOCAL_HOSTS or host.startswith("127.")
    return (*LOCAL_HOSTS, host, *allowed) if allowed or (local and not keys) else ()


def scale_out(launch: Launch, replicas: int, host: str, port: int, **options: Any) -> None:
    """Serve with replicas on this machine that share its cores; see `deployment` for `options`."""
    from draftree.integrations import ray_serve

    cores, most = os.cpu_count() or 1, options.get("most_replicas") or replicas
    launch = replace(launch, threads=launch.threads or max(1, cores // most))
    if not options.get("gpus") and launch.placement.device == "auto":  # Ray shows replicas no GPU.
        launch = replace(launch, placement=replace(launch.placement, device="cpu"))
    application = ray_serve.deployment(launch, replicas=replicas, **options)
    listening(host, port).close()
    launch.check()  # Ray restarts a failing replica again and again.
    ray_serve.run(application, host, port, max(cores, most * (launch.threads or 1)))


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"The server cannot listen on {host} port {port} ({error.strerror}): give another.") from error


def report(host: str, port: int, name: str, engine: Engine) -> None:
    """Print the address, the model and the drafter."""
    drafter = engine.config.drafter
    drafts = "no drafter" if drafter is None else f"drafter {drafter.name}"
    where = f"http://{'localhost' if host in ('127.0.0.1', '0.0.0.0') else host}:{port}"
    about = f"draftree serves {name} at {where}/v1 ({engine.runner.name} runner, {drafts})"
    print(f"{about}, and a chat page at {where}; Ctrl-C stops it.", flush=True)
