"""Asks every served model for one chat completion, through the Service, as a client would. Run by `helm test`."""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

BASE_URL = os.environ["BASE_URL"]
TIMEOUT = float(os.environ["TIMEOUT"])


def ask(path: str, body: dict | None = None) -> dict:
    headers = {"Content-Type": "application/json"}
    if key_file := os.environ.get("API_KEY_FILE"):
        headers["Authorization"] = "Bearer " + Path(key_file).read_text().split()[0]
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE_URL + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}")
    except OSError as error:
        sys.exit(f"{BASE_URL}{path} cannot be reached: {error}")


models = [model["id"] for model in ask("/v1/models")["data"]]
if not models:
    sys.exit("/v1/models lists no model")
for model in models:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = ask("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0})
    choice = answer["choices"][0]
    if choice["finish_reason"] not in ("stop", "length") or answer["usage"]["completion_tokens"] < 1:
        sys.exit(f"{model} gave no completion: {json.dumps(answer)[:500]}")
    print(f"{model}: {json.dumps(choice['message'], ensure_ascii=False)[:300]}")
