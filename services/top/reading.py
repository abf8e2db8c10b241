"""One look at the frontends: what their /metrics and /engines say. `figures` makes rates of two looks."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

# What one answer may have; a frontend with ten thousand engines has 3 MB.
_MAX_ANSWER_BYTES = 32 * 1024 * 1024
_TIMEOUT = httpx.Timeout(5.0)

Labels = frozenset[tuple[str, str]]


class Engine(msgspec.Struct):
    """An engine as /engines tells it; fields that a newer frontend adds are passed over."""

    model: str
    address: str
    state: str
    running_requests: int = 0
    waiting_requests: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    tokens_per_second: float = 0.0


class _EngineList(msgspec.Struct):
    data: list[Engine]


@dataclass(frozen=True, slots=True)
class _Answer:
    engines: list[Engine]
    samples: list[tuple[str, Labels, float]]


@dataclass(frozen=True, slots=True)
class Reading:
    """At `at` (monotonic seconds). `problems` has a sentence for each frontend that did not answer as it should."""

    at: float
    engines: list[Engine] = field(default_factory=list)
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_answered: int = 0

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's samples, added up by one label's value."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums


class Frontends:
    """The frontends of one deployment; connections are kept from look to look."""

    def __init__(
        self, urls: Sequence[str], api_key: str | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, transport=transport)
        self._urls = [url.rstrip("/") for url in urls]

    async def close(self) -> None:
        await self._client.aclose()

    async def read(self) -> Reading:
        """Ask all of them at once. Never raises for one that does not answer: it becomes a problem."""
        answers = await asyncio.gather(*(self._read_one(url) for url in self._urls), return_exceptions=True)
        reading = Reading(time.monotonic())
        answered: list[_Answer] = []
        for answer in answers:
            if isinstance(answer, Unreadable):
                reading.problems.append(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answered.append(answer)
        engines, samples = _together(answered)
        return Reading(reading.at, engines, samples, reading.problems, len(answered))

    async def _read_one(self, url: str) -> _Answer:
        # One after the other over one connection: processes that share a port would each answer a half.
        engines, metrics = await self._get(url + "/engines"), await self._get(url + "/metrics")
        try:
            return _parse(engines, metrics)
        except ValueError as error:
            raise Unreadable(f"{url} answers, but not as a Tandem frontend does: {error}") from error

    async def _get(self, url: str) -> bytes:
        try:
            async with self._client.stream("GET", url) as response:
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise Unreadable(f"{url} answers without end: is that a Tandem frontend?")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise Unreadable(
                f"{url} does not answer ({reason}): is the frontend there, and the port forwarded?"
            ) from error
        if response.status_code == 401:
            raise Unreadable(f"{url} wants an API key: give --api-key (or TANDEM_TOP_API_KEY)")
        if response.status_code != 200:
            raise Unreadable(f"{url} answers {response.status_code}: is that a Tandem frontend?")
        return bytes(content)


class Unreadable(Exception):
    """A frontend could not be read; the message says what to do."""


def _together(answers: Iterable[_Answer]) -> tuple[list[Engine], dict[str, dict[Labels, float]]]:
    """Engines once each, as the first that names one sees it; samples of the same name and labels added up."""
    engines: dict[tuple[str, str], Engine] = {}
    samples: dict[str, dict[Labels, float]] = {}
    for answer in answers:
        for engine in answer.engines:
            engines.setdefault((engine.model, engine.address), engine)
        for name, labels, value in answer.samples:
            family = samples.setdefault(name, {})
            family[labels] = family.get(labels, 0.0) + value
    return [engines[key] for key in sorted(engines)], samples


def _parse(engines: bytes, metrics: bytes) -> _Answer:
    """Raises ValueError where either is not what a frontend says."""
    return _Answer(
        msgspec.json.decode(engines, type=_EngineList).data,
        [
            (sample.name, frozenset(sample.labels.items()), sample.value)
            for metric in text_string_to_metric_families(metrics.decode())
            for sample in metric.samples
        ],
    )
