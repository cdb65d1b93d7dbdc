"""A replica writes all that it has to write, also what came while another entry was on its way."""

import asyncio
import json
import time

from tests.rendezvous.replicas import P, Replica

from diloco.rendezvous.store import Store


def test_no_snapshot_and_no_farewell_is_lost_while_an_outer_entry_is_written(tmp_path, monkeypatch):
    create = Store.create

    async def slow_create(self, name: str, data, **limits):
        await asyncio.sleep(0.02 if name.startswith("log/") else 0)
        return await create(self, name, data, **limits)

    monkeypatch.setattr(Store, "create", slow_create)
    replica = Replica(str(tmp_path / "run"), snapshot_rounds=1)
    while replica.exchange.state.num_outer < 8 * P:
        replica.step()
        time.sleep(0.002)
    replica.finish()
    bodies = [
        json.loads(file.read_bytes().splitlines()[0]) for file in sorted((tmp_path / "run" / "log").iterdir())
    ]
    rounds = {kind: set() for kind in ("outer", "snapshot", "leave")}
    for entry in bodies[2:]:
        rounds[entry["kind"]].add((entry["body"].get("fragment"), entry["body"].get("round")))
    assert len(rounds["leave"]) == 1
    early = {(p, number) for p, number in rounds["outer"] if number <= 6}
    assert early <= rounds["snapshot"]
