"""Walks the table of RPCs and errors with grpcio; walk.go does the same with grpc-go.

    walk.py TABLE WORLD

TABLE is table.json, whose head says what a row means. WORLD is what tests/gateway/rpcs.rs has started: gateways with their ports
and process ids, tokens, and the file of descriptors. Messages are made from the descriptors, so no code is generated.
Each gateway has a thread, which goes through its rows in order and ends with the first that is not as the table says.
"""
import base64
import datetime
import json
import os
import queue
import signal
import sys
import threading
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

table, world = (json.load(open(path)) for path in sys.argv[1:3])
pool = descriptor_pool.DescriptorPool()
for file in descriptor_pb2.FileDescriptorSet.FromString(open(world["descriptors"], "rb").read()).file:
    pool.AddSerializedFile(file.SerializeToString())
DEADLINE = 40.0


class Wrong(Exception):
    """What came is not what the table says."""


def message_class(name):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def to_json(message):
    return json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=pool)


def fits(expected, actual):
    """Whether all that is expected is there; "*" is anything, and null nothing."""
    if expected == "*":
        return actual is not None
    if isinstance(expected, dict):
        return isinstance(actual, dict) and all(fits(value, actual.get(key)) for key, value in expected.items())
    if isinstance(expected, list):
        return all(any(fits(one, other) for other in actual or []) for one in expected) and (bool(expected) or not actual)
    return expected == actual


def status_of(error):
    """The error as a row describes it."""
    status = {"code": error.code().name}
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if packed is None:
        return status
    for detail in message_class("google.rpc.Status").FromString(packed).details:
        name = detail.type_url.rsplit("/", 1)[-1]
        content = to_json(message_class(name).FromString(detail.value))
        if name == "google.rpc.ErrorInfo":
            status.update(reason=content["reason"], domain=content["domain"], metadata=content.get("metadata", {}))
        elif name == "google.rpc.RetryInfo":
            status["retry"] = content["retry_delay"]
        elif name == "google.rpc.BadRequest":
            status["fields"] = [violation["field"] for violation in content["field_violations"]]
        else:
            status[name] = content
    return status


class Gateway:
    """One gateway, and what rows have saved."""

    def __init__(self, name):
        at = world["gateways"][name]
        self.name, self.pid, self.saved = name, at["pid"], {}
        credentials = grpc.ssl_channel_credentials(open(at["ca"], "rb").read())
        self.channel = grpc.secure_channel(f"localhost:{at['grpc']}", credentials)

    def filled(self, value):
        """With what is saved in place of {name}, and what the head of the table says about $bytes, $times and $in."""
        if isinstance(value, str):
            for name, saved in self.saved.items():
                value = value.replace("{" + name + "}", saved)
        elif isinstance(value, list):
            return [self.filled(one) for one in value]
        elif isinstance(value, dict):
            if "$bytes" in value:
                return base64.b64encode(bytes(value["$bytes"])).decode()
            if "$in" in value:
                then = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=value["$in"])
                return then.strftime("%Y-%m-%dT%H:%M:%SZ")
            if "$times" in value:
                return [self.filled(value["of"])] * value["$times"]
            return {self.filled(key): self.filled(one) for key, one in value.items()}
        return value

    def save(self, wanted, answer):
        for name, path in wanted.items():
            value = answer
            for part in path.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
            self.saved[name] = str(value)

    def walk(self, row):
        for n in range(row.get("repeat", 1)):
            self.saved["n"] = str(n)
            end = time.monotonic() + DEADLINE
            while True:
                try:
                    self.call(row)
                    break
                except Wrong as wrong:
                    if not row.get("eventually") or time.monotonic() > end:
                        raise Wrong(f"{row.get('name', row['call'])}: {wrong}") from None
                time.sleep(0.02)

    def call(self, row):
        service, method = row.get("types", row["call"]).split("/")
        method = pool.FindServiceByName(service).methods_by_name[method]
        request_class = message_class(method.input_type.full_name)

        def encoded(request):
            if "raw" in row:
                return base64.b64decode(row["raw"])
            return json_format.ParseDict(self.filled(request), request_class(), descriptor_pool=pool).SerializeToString()

        metadata = [(key, self.filled(value)) for key, value in row.get("headers", {}).items()]
        if "as" in row:
            metadata.append(("authorization", "Bearer " + self.filled(world["tokens"].get(row["as"], row["as"]))))
        path, decode = "/" + row["call"], message_class(method.output_type.full_name).FromString
        arguments = {"metadata": metadata, "timeout": row.get("timeout_ms", DEADLINE * 1000) / 1000}
        ended = None
        try:
            if not method.server_streaming:
                call = self.channel.unary_unary(path, encoded, decode)
                answer = to_json(call(row.get("request", {}), **arguments))
                if not fits(self.filled(row.get("answer", {})), answer):
                    raise Wrong(f"answered {answer}")
                self.save(row.get("save", {}), answer)
                ended = {"code": "OK"}
            else:
                requests = queue.SimpleQueue()
                if method.client_streaming:
                    call = self.channel.stream_stream(path, encoded, decode)(iter(requests.get, None), **arguments)
                else:
                    call = self.channel.unary_stream(path, encoded, decode)(row.get("request", {}), **arguments)
                try:
                    ended = self.steps(row, call, requests)
                finally:
                    requests.put(None)
                    call.cancel()
        except grpc.RpcError as error:
            ended = status_of(error)
        expected = {"code": row.get("code", "OK")}
        if "reason" in row:
            expected.update(reason=row["reason"], domain="mqtt-server", metadata=self.filled(row.get("metadata", {})))
        expected.update({key: row[key] for key in ("retry", "fields") if key in row})
        if set(ended) != set(expected) or not fits(expected, ended) or len(ended.get("metadata", ())) != len(
                expected.get("metadata", ())):
            raise Wrong(f"ended with {ended}, not {expected}")

    def steps(self, row, call, requests):
        """Goes through the steps of a stream; how it ended, or OK if it was to go on."""
        for step in row.get("steps", []):
            if "send" in step:
                requests.put(step["send"])
            elif "close" in step:
                requests.put(None)
            elif "read" in step:
                expected, answer = self.filled(step["read"]), None
                while answer is None or not fits(expected, answer):
                    try:
                        answer = to_json(next(call))
                    except StopIteration:
                        raise Wrong(f"ended before {expected} with {answer}") from None
                    except grpc.RpcError as error:
                        raise Wrong(f"ended before {expected} with {answer} and {status_of(error)}") from None
                self.save(step.get("save", {}), answer)
            elif "opened" in step:
                call.initial_metadata()
            elif "row" in step:
                self.walk(step["row"])
            elif "signal" in step:
                os.kill(self.pid, getattr(signal, step["signal"]))
            else:
                raise Wrong(f"no such step: {step}")
        if row.get("code", "OK") != "OK" or row.get("ends"):
            for _ in call:
                pass
        return {"code": "OK"}


def main():
    problems, walked = [], []

    def walk(name):
        gateway, rows = Gateway(name), [row for row in table["rows"] if row["on"] == name]
        try:
            for row in rows:
                gateway.walk(row)
                walked.append(row)
        except Exception as error:  # Whatever it is, it is told with the name of the gateway.
            problems.append(f"{name}: {row.get('name', row['call'])}: {type(error).__name__}: {error}")
        gateway.channel.close()

    threads = [threading.Thread(target=walk, args=(name,)) for name in world["gateways"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n".join(problems))
    print(f"grpcio {grpc.__version__}: {len(walked)} of {len(table['rows'])} rows are as the table says")
    sys.exit(1 if problems or len(walked) != len(table["rows"]) else 0)


main()
