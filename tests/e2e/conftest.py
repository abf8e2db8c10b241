"""The run in containers takes minutes: `make e2e` asks for it. It is skipped, with the reason, where it cannot be."""

import os

import pytest


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    """Both images, by service, on a machine that was found able to run them. What fails beyond that is a failure."""
    if os.environ.get("TANDEM_E2E") != "1":
        pytest.skip("runs containers for minutes: `make e2e`")
    from tests.e2e.container_images import base_image, build, check_that_builds_reach_packages
    from tests.e2e.podman import CannotRunContainers, check_that_containers_run, why_not

    try:
        if reason := why_not():
            raise CannotRunContainers(reason)
        base = base_image()
        check_that_containers_run(base)
        check_that_builds_reach_packages(base)
        return {service: build(service) for service in ("frontend", "engine")}
    except CannotRunContainers as reason:
        pytest.skip(str(reason))
