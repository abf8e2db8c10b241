"""Several processes behind one port, whose metrics add up: each writes its values to files in a folder that all share,
and whichever is asked reads them all (prometheus_client's multiprocess mode, whose files these are).

Values are written twice a second and when this process is asked. The files of a process that died stay, so that no
counter falls; the launcher removes those of its gauges.
"""

from collections.abc import Mapping, Sequence

from prometheus_client.core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import ValueClass

from shared.metrics import Distribution, Labels, Metric, Value, bound_names, family

Values = Mapping[Metric, Mapping[Labels, Value]]


class SharedValues:
    """The part of one process. PROMETHEUS_MULTIPROC_DIR must name the folder when the process starts."""

    def __init__(self, folder: str) -> None:
        self._files = MultiProcessCollector(None, folder)
        self._written: dict[tuple[str, Labels], _Written] = {}

    def write(self, values: Values) -> None:
        for metric, by_labels in values.items():
            for labels, value in by_labels.items():
                if isinstance(value, Distribution):
                    self._write_distribution(metric, labels, value)
                elif metric.kind == "counter":
                    self._write(metric, metric.name, metric.labels, labels, value)
                else:
                    self._write(metric, metric.name, metric.labels, labels, value)

    def read(self, catalogue: Sequence[Metric], own: Values) -> list[Family]:
        """Every process's values together; as exemplars, those of this process (`own`)."""
        found: dict[str, Family] = {each.name: each for each in self._files.collect()}
        families: list[Family] = []
        for metric in catalogue:
            shown = found.get(metric.name.removesuffix("_total"))
            if shown is None:
                shown = family(metric, {})
            elif metric.kind == "histogram":
                _add_exemplars(shown, metric, own.get(metric, {}))
            families.append(shown)
        return families

    def _write_distribution(self, metric: Metric, labels: Labels, value: Distribution) -> None:
        self._write(metric, f"{metric.name}_sum", metric.labels, labels, value.total)
        names = (*metric.labels, "le")
        for bound, count in zip(bound_names(value.buckets), value.counts(), strict=True):
            self._write(metric, f"{metric.name}_bucket", names, (*labels, bound), count)

    def _write(self, metric: Metric, sample: str, names: Labels, labels: Labels, value: float) -> None:
        written = self._written.get((sample, labels))
        if written is None:
            written = self._written[sample, labels] = _Written(metric, sample, names, labels)
        written.set(value)


class _Written:
    """One number in this process's file."""

    __slots__ = ("_file", "_last", "_start")

    def __init__(self, metric: Metric, sample: str, names: Labels, labels: Labels) -> None:
        self._file = ValueClass(
            metric.kind,
            metric.name.removesuffix("_total"),
            sample,
            names,
            labels,
            metric.text,
            multiprocess_mode=metric.sharing,
        )
        # An earlier process may have had the same id: its counts stay.
        self._start = 0.0 if metric.kind == "gauge" else self._file.get()
        self._last: float | None = None

    def set(self, value: float) -> None:
        if value != self._last:
            self._last = value
            self._file.set(self._start + value)


def _add_exemplars(shown: Family, metric: Metric, own: Mapping[Labels, Value]) -> None:
    buckets: dict[str, int] = {bound: number for number, bound in enumerate(bound_names(metric.buckets))}
    for number, sample in enumerate(shown.samples):
        bound = sample.labels.get("le")
        if bound is None:
            continue
        value = own.get(tuple(sample.labels[name] for name in metric.labels))
        exemplar = value.exemplar(buckets[bound]) if isinstance(value, Distribution) else None
        if exemplar is not None:
            shown.samples[number] = sample._replace(exemplar=exemplar)
