"""Getting devices from Ray: connect or start a cluster, reserve one bundle per worker, wait visibly."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tlt.config.schema import RolloutSection
from tlt.errors import PlacementError

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 5.0
_START_ATTEMPTS = 3
_REACH_S = 10.0


@contextmanager
def ray_session(*, quiet: bool = True) -> Iterator[None]:
    """Join the cluster of ``RAY_ADDRESS``, or start one on this machine; leave or stop it at the end."""
    # Ray runs workers at nice 15 by default; a rollout engine is no background job.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # It also warns that its token authentication is on, which is how it should be.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    with _own_signal_handlers():
        _connect(os.environ.get("RAY_ADDRESS") or None, quiet=quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail at once where nothing listens: ``ray.init`` itself tries for minutes."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not (separator and port.isdecimal()):
        return  # "auto" and the like: Ray finds the address itself
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise PlacementError(
            f"nothing answers at RAY_ADDRESS={address} ({error}); check the address, or unset RAY_ADDRESS to start a "
            "Ray on this machine"
        ) from error


def _connect(address: str | None, *, quiet: bool) -> None:
    if address is not None:
        _check_reachable(address)
    where = f"the Ray cluster at RAY_ADDRESS={address}" if address else "a Ray cluster on this machine"
    for attempts_left in reversed(range(_START_ATTEMPTS)):
        try:
            ray.init(
                # Without an address Ray would join whatever cluster was last started on this machine.
                address=address or "local",
                include_dashboard=False if address is None else None,
                log_to_driver=not quiet,
                logging_level=logging.WARNING,
            )
        except Exception as error:  # Ray raises bare Exceptions when it cannot start
            ray.shutdown()
            # A loaded machine may miss the 30 s that Ray gives its own processes to come up.
            if address is None and attempts_left and "timed out during startup" in str(error):
                logger.warning("Ray did not come up in time (%s); trying again", error)
                continue
            remedy = "check the address, or unset RAY_ADDRESS to start a local one" if address else "see the cause"
            raise PlacementError(f"cannot use {where}: {type(error).__name__}: {error}; {remedy}") from error
        return


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the program's handlers: ``ray.init`` puts its own on SIGTERM, which exit without a word."""
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as error:
        if not in_main or error.code != signal.SIGTERM:
            raise
        # Ray's handler was in force when the signal came: do what ours would have done.
        _restore(handlers)
        signal.raise_signal(signal.SIGTERM)
    finally:
        if in_main:
            _restore(handlers)


def _restore(handlers: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@contextmanager
def reserve(section: RolloutSection, *, timeout_s: float) -> Iterator[PlacementGroup]:
    """Reserve one bundle per worker; free them at the end.

    Raises:
        PlacementError: the cluster is too small, or too busy for ``timeout_s`` seconds.
    """
    bundle = {"CPU": float(section.cores_per_worker)}
    if section.device == "gpu":
        bundle["GPU"] = float(section.tensor_parallel_size)
    _check_size(bundle, section.num_workers)
    group = placement_group([bundle] * section.num_workers, strategy="PACK")
    try:
        _wait(group, bundle, section.num_workers, timeout_s)
        yield group
    finally:
        remove_placement_group(group)


def _check_size(bundle: dict[str, float], num_workers: int) -> None:
    total = ray.cluster_resources()
    for resource, amount in bundle.items():
        needed, there = amount * num_workers, total.get(resource, 0.0)
        if needed > there:
            raise PlacementError(
                f"{num_workers} workers need {needed:g} {resource}, the Ray cluster has {there:g} in all; "
                "lower rollout.num_workers, rollout.cores_per_worker or rollout.tensor_parallel_size"
            )


def _wait(group: PlacementGroup, bundle: dict[str, float], num_workers: int, timeout_s: float) -> None:
    begin = time.monotonic()
    while not group.wait(_REPORT_EVERY_S):
        waited = time.monotonic() - begin
        if waited > timeout_s:
            raise PlacementError(
                f"waited {waited:.0f} s for {num_workers} x {bundle}, free are {ray.available_resources()}; "
                "another job holds them: end it, or ask for less"
            )
        logger.info("waiting for %d x %s (%.0f of %.0f s)", num_workers, bundle, waited, timeout_s)
