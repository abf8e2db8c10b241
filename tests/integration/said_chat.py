"""What a chat answered, whole and put together from a stream, held to what clients rely on."""

import json
from dataclasses import dataclass
from typing import Any

import openai


@dataclass
class Said:
    """A choice as a client has put it together."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


async def whole(client: openai.AsyncOpenAI, model: str, text: str, **fields: Any) -> Said:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    answer = await client.chat.completions.create(**body)
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    called = [(call.function.name, call.function.arguments) for call in calls]
    reasoning = (choice.message.model_extra or {}).get("reasoning") or ""
    return Said(choice.message.content or "", reasoning, called, choice.finish_reason)


async def streamed(client: openai.AsyncOpenAI, model: str, text: str, **fields: Any) -> Said:
    """The same from a stream, holding its deltas to what clients rely on."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
    said = Said("", "", [], "")
    ids: list[str] = []
    async for chunk in await client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            said.content += choice.delta.content or ""
            said.reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
            for delta in choice.delta.tool_calls or []:
                if delta.id is not None:
                    assert delta.index == len(said.calls)
                    ids.append(delta.id)
                    said.calls.append((delta.function.name, ""))
                assert delta.index == len(said.calls) - 1
                name, arguments = said.calls[-1]
                said.calls[-1] = (name, arguments + (delta.function.arguments or ""))
            said.finish_reason += choice.finish_reason or ""
    assert len(set(ids)) == len(ids)
    return said
