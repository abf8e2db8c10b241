"""The scenarios: what clients of language models do, each a locust user. Words are random, and always the same ones."""

import random
import time
from typing import Any

from locust import between, constant, task
from locust.contrib.fasthttp import FastHttpUser

from loadtest.locust_stream import stream_chat

_VOCABULARY = (
    "river stone market letter engine window garden winter number silver question forest captain music "
    "paper mountain history signal kitchen doctor harbor theory bridge machine summer island lantern "
    "copper valley orchard station picture reason season travel weather balance carbon desert feather "
)
_WORDS = _VOCABULARY.split()


def words(count: int, seed: object) -> str:
    """So many words of text, the same for the same seed."""
    return " ".join(random.Random(str(seed)).choices(_WORDS, k=count))


def question(topic_words: int = 8) -> str:
    return f"Tell me a short story about {words(topic_words, random.random())}."


class _StreamingUser(FastHttpUser):
    abstract = True
    network_timeout = 600.0
    connection_timeout = 30.0

    def ask(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return stream_chat(self, type(self).__name__.removesuffix("User"), messages, **kwargs).text


class ChatUser(_StreamingUser):
    """Short questions, with time to read the answers."""

    weight = 10
    wait_time = between(1, 5)

    @task
    def chat(self) -> None:
        self.ask([{"role": "user", "content": question()}])


class LongContextUser(_StreamingUser):
    """A document that nobody sent before, and a question about it: prefill, and nothing in the cache."""

    weight = 2
    wait_time = between(2, 10)

    @task
    def summarize(self) -> None:
        document = words(self.environment.parsed_options.context_words, random.random())
        self.ask([{"role": "user", "content": f"{document}\n\nSummarize this in one sentence."}])


class SharedPrefixUser(_StreamingUser):
    """One long system prompt for everybody, short questions: what a prefix cache is for."""

    weight = 4
    wait_time = between(1, 5)

    @task
    def ask_assistant(self) -> None:
        instructions = words(self.environment.parsed_options.context_words, "shared prefix")
        self.ask([{"role": "system", "content": instructions}, {"role": "user", "content": question()}])


class AgentUser(_StreamingUser):
    """An agent: turn after turn at once, each with the whole history and a tool's result of some hundred words."""

    weight = 4
    wait_time = constant(0)

    def on_start(self) -> None:
        self.begin()

    def begin(self) -> None:
        task_text = f"You are an agent. Your task: {words(40, random.random())}."
        self.history: list[dict[str, Any]] = [{"role": "system", "content": task_text}]
        self.turns_left = random.randint(6, 15)

    @task
    def turn(self) -> None:
        if self.turns_left == 0:
            self.begin()
        self.turns_left -= 1
        result = f"Tool result: {words(random.randint(50, 300), random.random())}. What next?"
        self.history.append({"role": "user", "content": result})
        answer = self.ask(self.history)
        if answer:
            self.history.append({"role": "assistant", "content": answer})
        else:
            # Failed: a history with a hole is no history.
            self.begin()


class BurstUser(_StreamingUser):
    """Silent, and then everybody at the same instant, by the clock, on every machine that runs these users."""

    weight = 2

    def wait_time(self) -> float:
        period = self.environment.parsed_options.burst_seconds
        return period - time.time() % period

    @task
    def burst(self) -> None:
        self.ask([{"role": "user", "content": question()}])


class DisconnectingUser(_StreamingUser):
    """Hangs up in the middle of an answer; the server must notice, and stop working for it."""

    weight = 1
    wait_time = between(0.5, 2)

    @task
    def hang_up(self) -> None:
        self.ask([{"role": "user", "content": question()}], hang_up_after=random.randint(1, 20))
