"""OpenAI clients that stream without pause from a thread of their own, and remember every answer and every failure."""

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

# Simulated tokens follow from it even where sampling is greedy.
SEED = 7
PROMPTS = [f"Question {number}: tell me about the number {number}." for number in range(8)]


@dataclass
class Tally:
    """What came of the load so far: for each prompt, every text that was answered, and how often."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    done: int = 0


class StreamLoad:
    """`clients` streams at all times. No client tries anything twice."""

    def __init__(self, base_url: str, api_key: str, model: str, clients: int, max_tokens: int) -> None:
        self.tally = Tally()
        self._base_url, self._api_key, self._model = base_url, api_key, model
        self._clients, self._max_tokens = clients, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Tally:
        self._stop.set()
        self._thread.join()
        return self.tally

    async def _run(self) -> None:
        # A connection for each request: nginx closes idle ones when it is told of other frontends, and a request just
        # being sent on one of them would be its failure, not the frontends'.
        http_client = DefaultAsyncHttpxClient(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
        async with AsyncOpenAI(
            base_url=self._base_url, api_key=self._api_key, max_retries=0, http_client=http_client
        ) as client:
            await asyncio.gather(*(self._stream_again_and_again(client, index) for index in range(self._clients)))

    async def _stream_again_and_again(self, client: AsyncOpenAI, index: int) -> None:
        turn = index
        while not self._stop.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            try:
                text = await self._stream(client, prompt)
            except Exception as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)
            else:
                self.tally.answers.setdefault(prompt, Counter())[text] += 1
                self.tally.done += 1

    async def _stream(self, client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            seed=SEED,
            max_tokens=self._max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, reasons, usage = "", [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.finish_reason:
                    reasons.append(choice.finish_reason)
        if len(reasons) != 1 or reasons[0] not in ("stop", "length"):
            raise RuntimeError(f"finish reasons {reasons}")
        if usage is None or not 0 < usage.completion_tokens <= self._max_tokens:
            raise RuntimeError(f"usage {usage}")
        return text
