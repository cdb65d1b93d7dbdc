import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engine.cases import Case, inner_step
from tests.processes import run_replicas

import diloco

pytest.importorskip("prometheus_client")

from diloco.integrations.prometheus import MetricsServer


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def scraped(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    model = case.model()
    engine = case.engine(model)
    replica = engine.exchange.replica
    server = MetricsServer(engine, 0, replica=replica)
    with ThreadPoolExecutor() as pool:  # in another thread, while training goes on
        first = pool.submit(scrape, server.port)
        for t in range(1, case.T + 1):
            inner_step(model, replica, t)
            engine.step()
        first = first.result()
    last = scrape(server.port)
    counters = engine.logs(computed=False)
    server.close()
    with pytest.raises(OSError):
        scrape(server.port)
    assert last[f'diloco_blocked_seconds_total{{replica="{replica}"}}'] == counters["blocked_seconds"]
    return first, last


def test_a_scrape_shows_steps_bytes_seconds_and_the_age_of_each_peer():
    case = Case(P=2, T=9, wire="bf16")
    for replica, (_, last) in enumerate(run_replicas(scraped, 2, case)):
        own, other = f'{{replica="{replica}"}}', f'{{other_replica="{1 - replica}",replica="{replica}"}}'
        assert last[f"diloco_last_step{own}"] == 9
        assert last[f"diloco_bytes_sent_total{own}"] > last[f"diloco_bytes_received_total{own}"] - 1 > 0
        assert last[f"diloco_encode_seconds_total{own}"] > 0 and last[f"diloco_merge_seconds_total{own}"] > 0
        assert 0 <= last[f"diloco_last_heard_seconds{other}"] < 30
        assert 0 <= last[f"diloco_lateness_seconds{other}"] < 30


def test_a_port_in_use_is_refused():
    case = Case(P=1)
    engine = case.engine(case.model())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(diloco.UserError, match=rf"127.0.0.1:{port} can't be used .*choose a free port"):
            MetricsServer(engine, port, replica=0)
