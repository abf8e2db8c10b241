"""An app over a fake engine pool that echoes prompts token by token, and a tokenizer of single bytes."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from services.frontend.engines.dispatch import DispatchCounts
from services.frontend.engines.status import EngineStatus
from services.frontend.generation import Generation, GenerationError
from services.frontend.http.protocol import Protocol
from services.frontend.tokenizer import Tokenizer
from shared.protocol import FinishReason, ModelLimits, RequestOutput, TokenLogprobs

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' and m.content == 'REFUSE' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% if m.role == 'user' and m.content == 'CRASH' %}{{ m.content + 1 }}{% endif %}"
    "{{ m.role }}:{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}|"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{{ suffix }}"
)
EOS = "<|end|>"
MAX_MODEL_LEN = 512


def write_byte_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges: a token is a byte, so that text is cut everywhere."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = BackendTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class EchoPool:
    """Echoes each prompt, a token a turn of the loop, as an engine would: eos, max_tokens, logprobs, deadlines.

    `reply` is echoed instead of the prompts where it is set; `hold` stops all output while it is set.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self.limits: ModelLimits | None = ModelLimits(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=vocab_size or tokenizer.vocab_size,
            eos_token_ids=[tokenizer.eos_token_id or 0],
            block_size=16,
        )
        self.ready = True
        self.tokenizer = tokenizer
        self.reply: str | None = None
        self.hold = False
        self.fail_after: int | None = None  # tokens
        self.abort_after: int | None = None
        self.hold_after: int | None = None
        self.delivered: dict[int, int] = {}  # request id → tokens
        self.refuse: GenerationError | None = None
        self.refuse_from = 0  # which submission on, counted from 0
        self.submitted: list[Generation] = []
        self.aborted: list[int] = []
        self.running: dict[int, asyncio.Task[None]] = {}
        self.started = self.stopped = False
        self.num_ready = 1
        self.num_refusing = 0
        self.num_waiting = self.num_blocked = 0
        self.counts = DispatchCounts()
        self.engine_statuses: list[EngineStatus] = []

    @property
    def num_requests(self) -> int:
        return len(self.running)

    def statuses(self) -> list[EngineStatus]:
        return self.engine_statuses

    async def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.stopped = True

    def submit(self, generation: Generation) -> None:
        if self.refuse is not None and len(self.submitted) >= self.refuse_from:
            raise self.refuse
        self.submitted.append(generation)
        self.running[generation.request_id] = asyncio.get_running_loop().create_task(self._echo(generation))

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def pace(self, generation: Generation, number: int) -> None:
        """Before each token."""
        await asyncio.sleep(0)

    async def _echo(self, generation: Generation) -> None:
        sampling = generation.sampling
        source = (
            generation.prompt_token_ids
            if self.reply is None
            else self.tokenizer.encode(self.reply, add_special_tokens=False)
        )
        eos = self.tokenizer.eos_token_id or 0
        first = RequestOutput(generation.request_id, cached_tokens=3)
        if sampling.prompt_logprobs is not None:
            first.prompt_logprobs = [
                self.logprob(token_id, sampling.prompt_logprobs) for token_id in generation.prompt_token_ids[1:]
            ]
        if sampling.max_tokens == 0:
            first.finish_reason = FinishReason.LENGTH
            self._deliver(generation, first)
            return
        for number, token_id in enumerate([*source, eos]):
            await self.pace(generation, number)
            while self.hold or (self.hold_after is not None and number >= self.hold_after):
                await asyncio.sleep(0.001)
            if self.fail_after == number:
                generation.sink.fail(GenerationError("the engine died", 500))
                self.running.pop(generation.request_id, None)
                return
            output = first if number == 0 else RequestOutput(generation.request_id)
            if self.abort_after == number:
                output.finish_reason = FinishReason.ABORT
                self._deliver(generation, output)
                return
            output.token_ids = [token_id]
            if sampling.logprobs is not None:
                output.logprobs = [self.logprob(token_id, sampling.logprobs)]
            if token_id == eos and not sampling.ignore_eos:
                output.finish_reason, output.stop_token_id = FinishReason.STOP, eos
            elif number + 1 == sampling.max_tokens or (token_id == eos and number + 1 >= len(source)):
                output.finish_reason = FinishReason.LENGTH
            if self._deliver(generation, output):
                return

    def _deliver(self, generation: Generation, output: RequestOutput) -> bool:
        if output.cached_tokens is not None:
            generation.first_output_at = time.perf_counter()
        finished = generation.sink.accept(output)
        self.delivered[generation.request_id] = self.delivered.get(generation.request_id, 0) + len(output.token_ids)
        if finished:
            generation.finished_at = time.perf_counter()
            self.running.pop(generation.request_id, None)
        return finished

    @staticmethod
    def logprob(token_id: int, top: int) -> TokenLogprobs:
        ids = [token_id, *(other for other in range(top) if other != token_id)][:top]
        return TokenLogprobs(token_id, -0.25, 1, ids, [-0.25 - 0.5 * rank for rank in range(len(ids))])


Result = TypeVar("Result")

OPEN_CALLS: list["Call"] = []


class Call:
    """Runs one request after the other against an app, all on one loop: what the app keeps may belong to it."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._runner: asyncio.Runner | None = None
        OPEN_CALLS.append(self)

    def __call__(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.run(self.send(method, path, **arguments))

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def close(self) -> None:
        """End the processes that the app may have started, and the loop."""
        OPEN_CALLS.remove(self)
        if self._runner is not None:
            self.run(self.app.state.frontend.grammars.close())
            self._runner.close()

    def post(self, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
        return self("POST", path, json=body, **arguments)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self("GET", path, **arguments)

    def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    async def send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)


def events(response: httpx.Response) -> list[Any]:
    """A stream's events: each data line as JSON, the last of them [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    # Clients pass over comments, which a slow machine has the server send between any two events.
    lines = [line for line in text.split("\n\n")[:-1] if not line.startswith(":")]
    assert not [line for line in lines if not line.startswith("data: ")]
    assert "data: [DONE]" not in lines[:-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class LiveServer:
    """The app on a real uvicorn in a thread; `loop` is where its tasks live."""

    def __init__(self, app: FastAPI) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, http=Protocol, lifespan="on", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self, listener: socket.socket) -> None:
        async def main() -> None:
            serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.001)
            self._ready.set()
            await serving

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
