"""An engine process without a model: InProcessEngine behind a real ROUTER. Run by test_pool_over_zmq.

python -m tests.integration.router_engine PORT STEP_SECONDS      prints the port once it is bound
"""

import sys
import time

import zmq

from services.frontend.engines.in_process_engine import InProcessEngine

HEARTBEAT_SECONDS = 0.1
VOCAB_SIZE = 5000


def main(port: int, step_seconds: float) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.set(zmq.ROUTER_HANDOVER, 1)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.LINGER, 0)
    router.bind(f"tcp://127.0.0.1:{port}")
    engine = InProcessEngine(vocab_size=VOCAB_SIZE)

    def send(identity: bytes, data: bytes) -> None:
        try:
            router.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            engine.peers.pop(identity, None)

    engine.send = send
    print(router.get(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"), flush=True)
    next_step = next_heartbeat = time.monotonic()
    while True:
        if router.poll(max(0, int(1000 * (min(next_step, next_heartbeat) - time.monotonic())))):
            identity, data = router.recv_multipart()
            engine.receive(identity, data)
        now = time.monotonic()
        if now >= next_step:
            next_step = now + step_seconds
            engine.step()
        if now >= next_heartbeat:
            next_heartbeat = now + HEARTBEAT_SECONDS
            engine.heartbeat()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
