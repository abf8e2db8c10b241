"""What the tests of the API's options share: the client's ways of asking, and which options they run."""

from collections.abc import Callable
from typing import Any

import httpx

from loadtest.server_process import ServerProcess

KEY = "a-key-of-the-test"
MODEL = "smol"
EOS = 2  # <|im_end|>
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."

RUN: set[str] = set()

Test = Callable[..., None]


def runs(*options: str) -> Callable[[Test], Test]:
    """This test runs these options."""

    def note(test: Test) -> Test:
        RUN.update(options)
        return test

    return note


def split(method: Callable[..., Any], fields: dict[str, Any]) -> dict[str, Any]:
    """What the client knows as its arguments, and the rest as extra_body."""
    known = set(method.__wrapped__.__annotations__) if hasattr(method, "__wrapped__") else set()  # type: ignore[attr-defined]
    own = {name: value for name, value in fields.items() if name in known and name != "timeout"}
    return own | {"extra_body": {name: value for name, value in fields.items() if name not in own}}


def text(answer: Any) -> str:
    return answer.choices[0].text


def content(answer: Any) -> Any:
    return answer.choices[0].message.content


def output_ids(answer: Any) -> list[int]:
    return answer.choices[0].model_extra["token_ids"]


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200, response.text
    return response.json()


def encode(server: ServerProcess, prompt: str) -> list[int]:
    return post(server, "/tokenize", {"prompt": prompt})["tokens"]


def detokenize(server: ServerProcess, token_ids: list[int]) -> str:
    return post(server, "/detokenize", {"tokens": token_ids})["prompt"]


def prompt_of(server: ServerProcess, answer: Any) -> str:
    """The prompt's text, of an answer that was asked with return_token_ids."""
    return detokenize(server, answer.model_extra["prompt_token_ids"])
