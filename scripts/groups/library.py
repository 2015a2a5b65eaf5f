"""A member of a consumer group through the client library, that writes down what it gets, for world.py; as member.py.

    library.py ADDRESS GROUP MEMBER_ID FILE

Has lines for deliveries only: the library acknowledges. Of a hundred messages one is given back.
"""
import asyncio
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients" / "python" / "src"))

import mqtt_gateway

address, group, member_id, file = sys.argv[1:5]

log = open(file, "a", buffering=1)
# What was killed may have left half a line.
log.write("\n")


async def handle(delivery):
    log.write(f"D {time.time_ns()} {delivery.message_id} {delivery.attempt} {delivery.payload.decode()} .\n")
    chance = random.random()
    if chance < 0.02:
        await asyncio.sleep(0.002)
    if chance < 0.01:
        raise mqtt_gateway.GiveBack("one in a hundred")


async def main():
    async with mqtt_gateway.connect(address, plaintext=True) as gateway:
        while True:
            try:
                await gateway.consume(group, handle, member_id=member_id).run()
            except mqtt_gateway.GatewayError as error:
                print(error, file=sys.stderr, flush=True)
            await asyncio.sleep(0.2)


asyncio.run(main())
