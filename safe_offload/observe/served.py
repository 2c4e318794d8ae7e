"""Metrics served by the engine itself, for API servers of vLLM that drop them.

vLLM's Rust frontend exports metrics of vLLM's own connectors only, and without log statistics there
are none. Hooks only write and a scrape only reads, so neither waits for the other.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram, core, generate_latest
from prometheus_client.utils import floatToGoString

from safe_offload.config.options import OffloadConfig
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.observe.metrics import OffloadPromMetrics, OffloadStats, StatsReporter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from safe_offload.sides import Side

logger = logging.getLogger(f"vllm.{__name__}")

KINDS = (Counter, Gauge, Histogram)
FAMILIES = {kind: getattr(core, f"{kind.__name__}MetricFamily") for kind in KINDS}


class _Series:
    """One series, with the methods of prometheus_client that `OffloadPromMetrics` calls."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.value = 0.0
        self.counts = [0] * (len(bounds) + 1)

    def inc(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.value += value


class _Metric:
    """A metric; prometheus_client's own would write to the files that API servers share.

    Bound: a series for each set of labels.
    """

    def __init__(
        self,
        kind: Any,
        labelnames: Any,
        buckets: Any = (),
        multiprocess_mode: Any = "",
        **what: Any,
    ) -> None:
        self._new_family = functools.partial(FAMILIES[kind], labels=labelnames, **what)
        self._bounds = buckets
        self._series: dict[tuple[str, ...], _Series] = {}

    def labels(self, *values: object) -> _Series:
        return self._series.setdefault(tuple(map(str, values)), _Series(self._bounds))

    def pieces(self) -> Iterator[bytes]:
        """Yield its part of the page, series by series."""
        head = _text(self._new_family())
        yield head
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, series in list(self._series.items()):
            family = self._new_family()
            counts = list(zip(bounds, accumulate(list(series.counts)), strict=True))
            family.add_metric(labels, *([counts] if self._bounds else []), series.value)
            yield _text(family).removeprefix(head)


def _text(family: Any) -> bytes:
    registry: Any = SimpleNamespace(collect=lambda: [family])
    text: bytes = generate_latest(registry)
    return text


class ServedStats:
    """Passes on the statistics of a reporter, and serves them with those of the workers.

    Bound: an entry for each name.
    """

    def __init__(
        self, reporter: StatsReporter, config: OffloadConfig, vllm_config: VllmConfig
    ) -> None:
        from safe_offload.observe.page_server import PageServer  # imports asyncio

        index = vllm_config.parallel_config.data_parallel_index
        labels = {0: [vllm_config.model_config.served_model_name, str(index)]}
        types: Any = {kind: functools.partial(self._make, kind) for kind in FAMILIES}
        self._metrics: list[_Metric] = []
        self._prom = OffloadPromMetrics(vllm_config, types, ["model_name", "engine"], labels)
        self._reporter = reporter
        self._server = config.open_metrics(
            index, functools.partial(PageServer, make_pieces=self.pieces)
        )
        message = 'Serving metrics at http://%s:%d/metrics ("metrics_host", "metrics_port").'
        logger.info(message, config.metrics_host, self._server.port)

    def _make(self, kind: Any, **options: Any) -> _Metric:
        self._metrics.append(_Metric(kind, **options))
        return self._metrics[-1]

    def pieces(self) -> Iterator[bytes]:
        """Yield the page, series by series."""
        return (piece for metric in list(self._metrics) for piece in metric.pieces())

    def take(self, side: Side) -> OffloadStats | None:
        """Return what `StatsReporter.take` does, and serve it."""
        stats = self._reporter.take(side)
        if stats is not None:
            self._prom.observe(stats.data)
        return stats

    def of_workers(self, stats: Any) -> None:
        """Serve the statistics of the workers, also those within MultiConnector's."""
        if not isinstance(stats, OffloadStats):
            stats = getattr(stats, "data", {}).get(CONNECTOR_NAME)
        if stats is not None:
            self._prom.observe(stats.data)

    def close(self) -> None:
        """Free the port."""
        self._server.close()
