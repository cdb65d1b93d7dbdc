"""An engine's counters for Prometheus, at `http://127.0.0.1:{port}/metrics`."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from diloco.errors import UserError
from diloco.files import requiring

with requiring("prometheus_client", extra="prometheus"):
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector


class Counting(Protocol):
    """An engine, or whatever else has logs."""

    def logs(self, *, computed: bool) -> dict[str, float]:
        """Numbers by name, as `StreamingDiLoCo.logs` gives them; nothing need be computed."""
        ...


class MetricsServer:
    """A server in a thread of its own, which reads the counters when it is asked for them.

    A scrape shows each counter, such as `diloco_bytes_sent_total`, since the server's start: Prometheus takes a
    counter that has fallen, as at a resume, for one that began at 0. The step is `diloco_last_step`, and with the
    label `other_replica` there are the gauges `diloco_last_heard_seconds` (since a message of that replica was
    taken) and `diloco_lateness_seconds` (how long the last wait for it took). Every sample has this replica as the
    label `replica`.

    Args:
        engine: whose counters are shown.
        port: on which it listens.
        replica: the label of this replica.
        address: of the network interface on which it listens; nothing that it shows is protected.

    Raises:
        UserError: if the port can't be used.

    >>> import diloco, torch, urllib.request
    >>> model = torch.nn.Linear(3, 1)
    >>> schedule = diloco.Schedule(sync_every=2, num_fragments=1)
    >>> exchange = diloco.LoopbackExchange()
    >>> engine = diloco.StreamingDiLoCo(model, fragments=diloco.whole(model), schedule=schedule, exchange=exchange)
    >>> server = MetricsServer(engine, 0, replica=exchange.replica)
    >>> engine.step()
    ()
    >>> page = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    >>> [line for line in page.splitlines() if line.startswith("diloco_last_step")]
    ['diloco_last_step{replica="0"} 1.0']
    >>> server.close()
    """

    def __init__(self, engine: Counting, port: int, *, replica: int, address: str = "127.0.0.1") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_EngineCollector(engine, str(replica)))
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise UserError(
                f"prometheus_port: {address}:{port} can't be used ({error.strerror}): choose a free port",
                "prometheus_port",
            ) from error
        self.port: int = self._server.server_port
        """The port on which it listens, also where 0 asked for any."""

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _EngineCollector(Collector):
    """Reads the counters at each scrape."""

    def __init__(self, engine: Counting, replica: str) -> None:
        self._engine, self._replica = engine, replica
        self._before = engine.logs(computed=False)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families of all counters, and one for each fact about the other replicas."""
        values = self._engine.logs(computed=False)
        yield self._family(GaugeMetricFamily, "last_step", "Inner steps taken", {(): values.pop("num_steps")})
        others: dict[str, dict[tuple[str, ...], float]] = {}
        for name, value in values.items():
            kind, _, other = name.partition("/replica_")
            if other:
                others.setdefault(kind, {})[other,] = value
            elif name.startswith("exchange_"):
                yield self._family(GaugeMetricFamily, name, "Mbit/s of the last exchange", {(): value})
            else:
                since: dict[tuple[str, ...], float] = {(): value - self._before.get(name, 0.0)}
                yield self._family(CounterMetricFamily, name, f"{name.replace('_', ' ')} so far", since)
        for kind, by_other in others.items():
            yield self._family(GaugeMetricFamily, kind, _MEANINGS[kind], by_other, "other_replica")

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        meaning: str,
        values: Mapping[tuple[str, ...], float],
        *labels: str,
    ) -> CounterMetricFamily | GaugeMetricFamily:
        family = kind(f"diloco_{name}", meaning, labels=("replica", *labels))
        for of_labels, value in values.items():
            family.add_metric((self._replica, *of_labels), value)
        return family


_MEANINGS = {
    "last_heard_seconds": "Seconds since a message of the other replica was taken",
    "lateness_seconds": "Seconds that the last wait for the other replica took",
}
"""The meaning of each fact about another replica, by the counter's name."""
