"""One model that this frontend serves: its names, its tokenizer, how its prompts are built, where its engines are."""

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.frontend.engines.counts import DispatchCounts
from services.frontend.engines.status import EngineStatus
from services.frontend.generation import Generation, GenerationError
from services.frontend.generation_config import SamplingDefaults
from services.frontend.output.reasoning import make_reasoning_parser
from services.frontend.output.tools import ToolParser, make_tool_parser
from services.frontend.prompts.build import PromptBuilder
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.tokenizer import Tokenizer
from shared.protocol import ModelLimits

RETRY_WITHOUT_ENGINE = 5.0


class Engines(Protocol):
    """An engine pool as HTTP sees it; engines/pool.py is the real one."""

    @property
    def ready(self) -> bool: ...

    @property
    def limits(self) -> ModelLimits | None: ...

    @property
    def num_ready(self) -> int: ...

    @property
    def num_refusing(self) -> int: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_blocked(self) -> int: ...

    @property
    def counts(self) -> DispatchCounts: ...

    def statuses(self) -> Sequence[EngineStatus]: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, generation: Generation) -> None: ...

    def abort(self, request_id: int) -> None: ...


@dataclass(slots=True, eq=False)
class LoadedModel:
    """`names` are those that clients use, the first is the one that is answered; `root` is where it came from."""

    names: list[str]
    root: str
    tokenizer: Tokenizer
    template: ChatTemplate
    engines: Engines
    executor: Executor
    reasoning_parser: str | None = None
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")
    tool_call_parser: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: PromptBuilder = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = PromptBuilder(self.tokenizer, self.template, self.executor)

    def limits(self) -> ModelLimits:
        """The model's limits, which an engine tells. Raises GenerationError 503 while there is none."""
        limits = self.engines.limits
        if limits is None or not self.engines.ready:
            raise GenerationError(
                f"no engine for model {self.names[0]!r} is ready; try again in a few seconds",
                503,
                RETRY_WITHOUT_ENGINE,
            )
        return limits

    def new_reasoning_parser(self, prompt_token_ids: list[int], chat_template_kwargs: dict[str, Any]) -> Any:
        """A parser for one choice, or None where this model's answers are not split."""
        if self.reasoning_parser is None:
            return None
        return make_reasoning_parser(
            self.reasoning_parser,
            tokenizer=self.tokenizer,
            prompt_token_ids=prompt_token_ids,
            chat_template_kwargs=chat_template_kwargs,
            tags=self.reasoning_tags,
        )

    def new_tool_parser(self, names: Collection[str], *, single: bool) -> ToolParser:
        """A parser for one choice of a request that offers functions of these names."""
        assert self.tool_call_parser is not None
        return make_tool_parser(self.tool_call_parser, self.tokenizer, names, single=single)
