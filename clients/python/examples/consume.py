"""Consumes what meters send, until Ctrl-C or SIGTERM; what it has taken is finished and acknowledged first.

Run several: they share the work. Kill one, or the gateway: nothing is lost.
"""

import asyncio
import os
import signal

import mqtt_gateway
from mqtt_gateway import v1


async def handle(delivery: mqtt_gateway.Delivery) -> None:
    """Called for one message of a meter after the other; those of different meters beside each other."""
    print(delivery.device_id, delivery.topic, delivery.payload.decode(), flush=True)
    if delivery.payload == b"":
        raise mqtt_gateway.GiveBack("no reading", delay=60)


async def main() -> None:
    async with mqtt_gateway.connect(
        os.environ.get("GATEWAY_ADDRESS", "localhost:10000"),
        ca=os.environ.get("GATEWAY_CA", "certs/ca.crt"),
        token=os.environ.get("GATEWAY_TOKEN"),
    ) as gateway:
        group = v1.Group(name="billing", filter=v1.Filter(topic_filters=["meter/#"]))
        # The same group again is no error.
        await gateway.stubs.groups.CreateGroup(v1.CreateGroupRequest(group=group))
        consumer = gateway.consume("billing", handle, concurrency=8)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, consumer.stop)
        print("consuming", flush=True)
        await consumer.run()
        print(f"{consumer.confirmed} acknowledged", flush=True)


asyncio.run(main())
