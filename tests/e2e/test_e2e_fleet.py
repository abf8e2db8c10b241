"""The chart's pods as real containers, under load, while engines and frontends come and go: no request may fail.

Two frontends and three engines behind a real nginx; then an engine is killed, one is added, one is drained, and every
frontend is replaced, one after another. A seeded greedy answer is the same before, during and after.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.chart.rendering import Rendered, render
from tests.e2e.nginx_ingress import NginxIngress
from tests.e2e.pods import Cluster, Pod, remove_folder, wait_for
from tests.e2e.stream_load import PROMPTS, SEED, StreamLoad
from tests.free_port import free_port

# The first test builds the images.
pytestmark = pytest.mark.timeout(2400)

VALUES = Path(__file__).with_name("values.yaml")


@dataclass(frozen=True)
class Variant:
    """What runs in the engines, and how much of it a small machine bears."""

    settings: dict[str, Any]
    clients: int
    max_tokens: int


VARIANTS = {
    "simulated": Variant({"executor": "simulated", "simulated_step_ms": 20, "num_kv_blocks": 2048}, 16, 60),
    "smollm2": Variant({"dtype": "bfloat16", "kv_cache_memory": 0.25, "max_model_len": 1024}, 4, 24),
}


@dataclass
class Fleet:
    """The deployed chart."""

    rendered: Rendered
    cluster: Cluster
    url: str
    api_key: str
    variant: Variant

    def start(self, component: str) -> Pod:
        kind = "Deployment" if component == "frontend" else "StatefulSet"
        return self.cluster.start(self.rendered.one(kind))

    def wait_until_ready(self, *pods: Pod) -> None:
        def all_ready() -> bool:
            failed = [f"{pod.name}: {pod.failed}" for pod in self.cluster.pods if pod.failed]
            assert not failed, failed
            return all(pod.ready for pod in pods)

        try:
            wait_for(all_ready, f"{len(pods)} pods ready", timeout=180)
        except TimeoutError:
            pytest.fail(f"not ready in time:\n{self.cluster.logs()}")


@pytest.fixture(scope="module", params=VARIANTS)
def fleet(
    request: pytest.FixtureRequest, images: dict[str, str], smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    variant = VARIANTS[request.param]
    tmp_path = tmp_path_factory.mktemp(request.param)
    values: dict[str, Any] = {"engine.modelCache.hostPath": str(smollm2.parent), "engine.settings": variant.settings}
    for service, image in images.items():
        registry, _, rest = image.partition("/")
        repository, _, tag = rest.rpartition(":")
        values |= {f"{service}.image": {"registry": registry, "repository": repository, "tag": tag}}
    rendered = render(values, VALUES)
    assert smollm2.name == "SmolLM2-135M-Instruct"

    def route() -> None:
        ready = [pod for pod in cluster.of("frontend") if pod.ready and not pod.terminating]
        nginx.route([f"{pod.address}:{pod.port('http')}" for pod in ready])

    cluster = Cluster(rendered, tmp_path / "volumes", route)
    port = free_port()
    service = rendered.one("Service", "frontend")
    listen = [f"127.0.0.1:{port}", f"{cluster.gateway}:{service['spec']['ports'][0]['port']}"]
    nginx = NginxIngress(rendered.one("Ingress"), tmp_path / "nginx", listen)
    (key,) = cluster.secret("tandem-api-keys")["keys"].split()
    fleet = Fleet(rendered, cluster, f"http://127.0.0.1:{port}", key, variant)
    try:
        for _ in range(rendered.one("StatefulSet")["spec"]["replicas"]):
            fleet.start("engine")
        for _ in range(rendered.one("Deployment")["spec"]["replicas"]):
            fleet.start("frontend")
        fleet.wait_until_ready(*cluster.pods)
        yield fleet
    finally:
        nginx.close()
        cluster.close()
        remove_folder(tmp_path / "volumes")


def metric(pod: Pod, name: str) -> float:
    status, text = pod.get("probes", "/metrics")
    assert status == 200, text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_fleet_under_change_fails_no_request(fleet: Fleet) -> None:
    cluster, variant = fleet.cluster, fleet.variant
    with OpenAI(base_url=f"{fleet.url}/v1", api_key=fleet.api_key, max_retries=0) as client:
        undisturbed = {prompt: answer(client, prompt, variant.max_tokens) for prompt in PROMPTS}
    load = StreamLoad(f"{fleet.url}/v1", fleet.api_key, "smollm2", variant.clients, variant.max_tokens)

    def more_answers(count: int) -> None:
        target = load.tally.done + count
        wait_for(lambda: load.tally.done >= target, f"{count} more answers", timeout=180)

    load.start()
    try:
        more_answers(variant.clients)
        every_engine_works(cluster)

        cluster.kill(cluster.of("engine")[0])
        more_answers(2 * variant.clients)

        added = fleet.start("engine")
        fleet.wait_until_ready(added)
        wait_for(lambda: metric(added, "tandem_engine_generated_tokens_total") > 0, "work for the new engine")

        drained = cluster.of("engine")[0]
        assert cluster.terminate(drained) == 0
        more_answers(variant.clients)

        for old in cluster.of("frontend"):
            fleet.wait_until_ready(fleet.start("frontend"))
            assert cluster.terminate(old) == 0
            more_answers(variant.clients)
    finally:
        tally = load.stop()
    print(f"{tally.done} streams, {len(tally.failures)} failed")
    assert not tally.failures, tally.failures[:5]
    for prompt, texts in tally.answers.items():
        assert list(texts) == [undisturbed[prompt]], f"{prompt}: the answer changed"
    for engine in cluster.of("engine"):
        wait_for(lambda engine=engine: is_idle(engine), f"{engine.name} idle", timeout=20)


def answer(client: OpenAI, prompt: str, max_tokens: int) -> str:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    done = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, seed=SEED, max_tokens=max_tokens
    )
    return done.choices[0].message.content or ""


def every_engine_works(cluster: Cluster) -> None:
    """Each frontend found every engine by the headless Service's name, and work reaches them all."""
    for engine in cluster.of("engine"):
        wait_for(lambda engine=engine: metric(engine, "tandem_engine_frontends") == 2, f"frontends on {engine.name}")
        wait_for(
            lambda engine=engine: metric(engine, "tandem_engine_generated_tokens_total") > 0, f"work on {engine.name}"
        )


def is_idle(engine: Pod) -> bool:
    """Nothing runs, nothing waits, every KV block is free."""
    running = metric(engine, "tandem_engine_requests_running") + metric(engine, "tandem_engine_requests_waiting")
    return not running and metric(engine, "tandem_engine_kv_blocks_free") == metric(engine, "tandem_engine_kv_blocks")


def test_helm_test_pod_passes(fleet: Fleet) -> None:
    service = fleet.rendered.one("Service", "frontend")["metadata"]["name"]
    done = fleet.cluster.run_to_end(fleet.rendered.one("Pod"), "--add-host", f"{service}:{fleet.cluster.gateway}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smollm2:" in done.stdout


def test_ingress_streams_and_keeps_metrics_inside(fleet: Fleet) -> None:
    assert httpx.get(f"{fleet.url}/metrics").status_code == 404
    assert httpx.get(f"{fleet.url}/v1/models").status_code == 401
    arrivals = []
    with OpenAI(base_url=f"{fleet.url}/v1", api_key=fleet.api_key) as client:
        # Long enough to be told from what comes at once, however fast the engine is and whatever it would say.
        for chunk in client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Count to ten."}],
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                arrivals.append(time.monotonic())
    assert len(arrivals) > 5
    # Buffered, all of it would come at once.
    assert arrivals[-1] - arrivals[0] > 0.1


def test_frontend_without_the_links_keys_reaches_no_engine(fleet: Fleet) -> None:
    owner = copy.deepcopy(fleet.rendered.one("Deployment"))
    container = owner["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [variable for variable in container["env"] if variable["name"] != "TANDEM_LINK_KEYS"]
    pod = fleet.cluster.start(owner)
    mismatches = 'tandem_engine_handshake_failures_total{reason="encryption_mismatch"}'
    try:
        for engine in fleet.cluster.of("engine"):
            wait_for(lambda engine=engine: metric(engine, mismatches) > 0, f"a refusal by {engine.name}")
        wait_for(lambda: "engines_without_link" in pod.get("http", "/health/ready")[1], "the frontend's health tells")
        assert not pod.ready
    finally:
        fleet.cluster.kill(pod)


def test_engine_without_its_model_says_so_and_ends(fleet: Fleet) -> None:
    template = fleet.rendered.one("StatefulSet")["spec"]["template"]
    container = template["spec"]["containers"][0]
    env = [{**v, "value": "/models/absent"} if v["name"] == "TANDEM_MODEL" else v for v in container["env"]]
    pod_spec = {**template["spec"], "containers": [{**container, "env": env}]}
    broken = {"metadata": {"name": "broken"}, "spec": pod_spec}
    done = fleet.cluster.run_to_end(broken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "/models/absent" in done.stdout + done.stderr
