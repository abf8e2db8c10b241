"""`tandem serve --trace console` prints each request's tree, put together from all processes."""

from pathlib import Path

import openai
from process_fleet import wait_until

from tests.start_server import StartServer


def test_a_request_is_printed_as_a_tree(start_server: StartServer, smollm2: Path) -> None:
    flags = ("--executor", "simulated", "--simulated-tokens", "echo", "--trace", "console", "--engines", "2")
    # Proxies are for others than this machine.
    server = start_server(*flags, environment={"HTTP_PROXY": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": "a secret question"}],
            max_tokens=7,
            stream=True,
        )
        assert list(stream)
    wait_until(lambda: "\ntrace " in server.log and "decode" in server.log, "the tree is printed")
    tree = server.log[server.log.index("\ntrace ") :].splitlines()[2:]
    names = ["POST", "chat", "template", "tokenize", "route", "generate", "queue", "prefill", "decode", "stream"]
    shown = [line.strip(" ├└│").split()[0] for line in tree[: len(names)]]
    assert shown == names
    depths = [len(line) - len(line.lstrip(" ├└│")) for line in tree[: len(names)]]
    assert depths == [2, 4, 6, 6, 6, 6, 8, 8, 8, 6]
    assert "7 tokens made, length" in tree[1]
    assert "secret" not in server.log
