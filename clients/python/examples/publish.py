"""Publishes to a topic, and tells what became of it.

    publish.py [TOPIC [TEXT]]
"""

import asyncio
import os
import sys

import mqtt_gateway
from mqtt_gateway import v1


async def main(topic: str = "lamp/switch", text: str = "on") -> None:
    async with mqtt_gateway.connect(
        os.environ.get("GATEWAY_ADDRESS", "localhost:10000"),
        ca=os.environ.get("GATEWAY_CA", "certs/ca.crt"),
        token=os.environ.get("GATEWAY_TOKEN"),
    ) as gateway:
        try:
            # Waits until every subscriber that is online has acknowledged it. Published once, whatever the network does meanwhile.
            answer = await gateway.publish_and_wait(topic, text, timeout=10)
        except mqtt_gateway.DeadlineExceeded as late:
            print(f"not acknowledged in time; it came as far as {late.level}")
        else:
            print(f"{v1.Outcome.Name(answer.outcome)}: {answer.sent} have it")


asyncio.run(main(*sys.argv[1:]))
