"""Names stay within Kubernetes' limits, and releases do not get into each other's way."""

import pytest

from tests.chart.rendering import render

LONG = "a-release-name-of-fifty-three-characters-as-helm-all"
POOLS = {"pools": {"a-pool-of-20-letters": {"model": "org/a"}, "a-pool-of-20-letterz": {"model": "org/b"}}}
FULL = {
    **POOLS,
    "apiKeys.enabled": True,
    "linkEncryption.enabled": True,
    "prometheusRule.enabled": True,
    "grafanaDashboard.enabled": True,
    "huggingFace.token": "t",
    "ingress.enabled": True,
    "podMonitor.enabled": True,
    "frontend.autoscaling.enabled": True,
    "engine.autoscaling.enabled": True,
    "engine.modelCache.type": "sharedClaim",
}


@pytest.mark.parametrize("release", ["t", "tandem", LONG, "x" * 53])
def test_names_fit(release: str) -> None:
    rendered = render(FULL, release=release)
    for manifest in rendered.manifests:
        name = manifest["metadata"]["name"]
        assert len(name) <= 63
        assert not name.endswith("-")
        for value in manifest["metadata"]["labels"].values():
            assert len(value) <= 63
    for stateful_set in rendered.of_kind("StatefulSet"):
        # The controller labels pods with its name, a dash and a hash of ten; a pod's name is also its host name.
        assert len(stateful_set["metadata"]["name"]) <= 52
    assert len({s["metadata"]["name"] for s in rendered.of_kind("StatefulSet")}) == 2


@pytest.mark.parametrize(
    ("first", "second"), [("one", "two"), (LONG, LONG + "o"), ("tandem", "tandem-two"), ("x" * 52, "x" * 53)]
)
def test_two_releases_share_a_namespace(first: str, second: str) -> None:
    one, two = render(FULL, release=first), render(FULL, release=second)

    def names(rendered: object) -> set[tuple[str, str]]:
        return {(m["kind"], m["metadata"]["name"]) for m in rendered.manifests}  # type: ignore[attr-defined]

    assert not names(one) & names(two)
    for selecting, other in ((one, two), (two, one)):
        others = [owner["spec"]["template"]["metadata"]["labels"] for owner in other.pod_owners()]
        for service in selecting.of_kind("Service"):
            assert not any(service["spec"]["selector"].items() <= labels.items() for labels in others)
        link, *_ = selecting.one("NetworkPolicy", "engine")["spec"]["ingress"]
        assert not any(link["from"][0]["podSelector"]["matchLabels"].items() <= labels.items() for labels in others)


def test_names_can_be_replaced() -> None:
    assert render({"fullnameOverride": "chat"}).one("Deployment")["metadata"]["name"] == "chat-frontend"
    assert render({"nameOverride": "llm"}, release="r").one("Deployment")["metadata"]["name"] == "r-llm-frontend"
    assert render(release="my-tandem").one("Deployment")["metadata"]["name"] == "my-tandem-frontend"
