"""Bridges: regions of replicas that come and go, each of which is a replica of an outer run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.cases import theta_of
from tests.rendezvous.replay import replayed
from tests.rendezvous.replicas import CUTS, P, Replica, new_model, theta0

import diloco
from diloco.engine.parameters import FragmentParameters
from diloco.engine.replica import outer_state
from diloco.engine.replica import Replica as OfEngine
from diloco.engine.settings import settings_of
from diloco.training.bridge import Bridge, Region

H = 4


def of_engine(*, sync_every: int, overlap_steps: int, wire: str, outer: str | None, mixing: float) -> OfEngine:
    model = new_model()
    settings = settings_of(
        model,
        fragments=diloco.sequential(model, layers_per_fragment=1),
        schedule_for=lambda num: diloco.Schedule(
            sync_every=sync_every, num_fragments=num, overlap_steps=overlap_steps
        ),
        outer=outer,
        mixing=mixing,
        wire=wire,
        combine="gather",
        error_feedback=None,
        seed=0,
        buffers="own",
        weights="equal",
    )
    parameters = FragmentParameters(model, settings.fragments)
    return OfEngine(settings, parameters, outer_state(settings, parameters, offload=False))


def bridge(folder: Path, name: str, *, wire: str = "fp32", outer: str | None = None) -> Bridge:
    pace = {"poll_seconds": 0.004, "timeout_seconds": 20.0}
    own = diloco.StoreRendezvous(str(folder / name), name=f"{name}-bridge", bridge=f"{name}-bridge", **pace)
    region = Region(of_engine(sync_every=6, overlap_steps=0, wire=wire, outer=None, mixing=0.5), own)
    rendezvous = diloco.StoreRendezvous(str(folder / "outer"), name=name, **pace)
    replica = of_engine(sync_every=2 * P, overlap_steps=1, wire="fp32", outer=outer, mixing=0.0)
    return Bridge(region, replica, rendezvous, folder / "notes" / name)


def trainer(folder: Path, region: str, name: str = "r", **settings) -> Replica:
    """A replica of a region, towards targets of the region's own."""
    target = 10 * ("eu", "us").index(region)
    return Replica(str(folder / region), name=name, bridge=f"{region}-bridge", first_target=target, **settings)


def test_smoke(tmp_path: Path) -> None:
    a, b = (trainer(tmp_path, n) for n in ("eu", "us"))
    bridges = [bridge(tmp_path, n) for n in ("eu", "us")]
    for i in range(400):
        a.step(pause_seconds=0.002); b.step(pause_seconds=0.002)
        for one in bridges:
            one.step()
    print([log.round for log in bridges[0].outer.rendezvous.state.fragments])
    print([log.round for log in a.exchange.state.fragments], [log.averages for log in a.exchange.state.fragments])
