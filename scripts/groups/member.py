"""A member of a consumer group that writes down what it gets, for world.py.

    member.py ADDRESS GROUP MEMBER_ID FILE

PYTHONPATH has the modules generated from the protos.

Lines of FILE, with the time in nanoseconds:
`D time message_id attempt payload` for a delivery, before it is acknowledged, and `A time message_id` for an
acknowledgement that was answered OK; ` .` ends each, so that one that was cut short by a kill is known. Of a
hundred deliveries one is given back, of a thousand one is left until its deadline.
"""
import queue
import random
import sys
import time

import grpc
from gateway.v1 import groups_pb2 as g
from gateway.v1 import groups_pb2_grpc as rpc

address, group, member_id, file = sys.argv[1:5]

log = open(file, "a", buffering=1)
# What was killed may have left half a line.
log.write("\n")


def consume(stub):
    """One stream, until it ends."""
    requests = queue.Queue()
    requests.put(g.ConsumeRequest(open=g.Open(group=group, member_id=member_id)))
    ids = {}
    for response in stub.Consume(iter(requests.get, None)):
        settled = []
        for item in response.items:
            kind = item.WhichOneof("item")
            if kind == "message":
                delivery = item.message
                ids[delivery.delivery_id] = delivery.message_id
                payload = delivery.message.payload.decode()
                log.write(f"D {time.time_ns()} {delivery.message_id} {delivery.attempt} {payload} .\n")
                chance = random.random()
                if chance < 0.01:
                    requests.put(g.ConsumeRequest(nack=g.Nack(which=g.Ack(delivery_ids=[delivery.delivery_id]))))
                elif chance > 0.001:
                    settled.append(delivery.delivery_id)
            elif kind == "ack_results":
                now = time.time_ns()
                for held in item.ack_results.ok:
                    for delivery_id in range(held.first, held.last + 1):
                        message_id = ids.pop(delivery_id, None)
                        if message_id:
                            log.write(f"A {now} {message_id} .\n")
        if settled:
            requests.put(g.ConsumeRequest(ack=g.Ack(delivery_ids=settled)))


while True:
    try:
        with grpc.insecure_channel(address) as channel:
            consume(rpc.ConsumerStub(channel))
    except grpc.RpcError as error:
        print(error.code(), error.details(), file=sys.stderr, flush=True)
    time.sleep(0.2)
