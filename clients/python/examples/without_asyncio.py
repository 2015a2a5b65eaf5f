"""Asks a device something, sets what it is to be, and follows latest values, without asyncio."""

import os

from mqtt_gateway import FailedPrecondition, Reason, sync, v1

with sync.connect(
    os.environ.get("GATEWAY_ADDRESS", "localhost:10000"),
    ca=os.environ.get("GATEWAY_CA", "certs/ca.crt"),
    token=os.environ.get("GATEWAY_TOKEN"),
) as gateway:
    try:
        reply = gateway.commands.send("lamp", "blink", b"3", timeout=10)
        print("the lamp answers", reply.device_status, reply.payload.decode())
    except FailedPrecondition as error:
        if error.reason is not Reason.DEVICE_OFFLINE:
            raise
        # It is stored, and goes out when the lamp is there.
        command = gateway.commands.start("lamp", "blink", b"3")
        print("the lamp is away; its command waits as", command.command_id)

    shadow = gateway.shadows.update("lamp", desired={"on": True})
    print("still to be done:", shadow.delta)

    with gateway.latest.watch("meter/#") as values:
        for value in values:
            if isinstance(value, v1.SnapshotEnd):
                break
            if isinstance(value, v1.LatestValue):
                print(value.device_id, value.topic, value.payload)
