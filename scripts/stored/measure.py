"""What is kept for devices and groups, and what it costs. See scripts/stored.sh, which calls this.

    measure.py SERVER MQLOAD GRPCLOAD WORK [ITEM...]

commands   100,000 stored commands for 10,000 devices that are away: starting them, memory, pages of ListCommands, commands to
           other devices beside them, kill -9 and start, and all of them expiring at once
shadows    updates by backends and by devices, as fast as 200 of them go, one under way for each
info       a look at a group (GetGroup, Fetch and heartbeats make one), of 100 groups with a million messages in 256 partitions

PYTHONPATH has the modules generated from the protos. SCALE (1; fewer for a trial) is of the environment. Exit 1: a bound was missed.
"""
import atexit
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request

import grpc
import gateway_process
from gateway.v1 import groups_pb2 as g
from gateway.v1 import groups_pb2_grpc as rpc

SERVER, MQLOAD, GRPCLOAD, WORK, *ITEMS = sys.argv[1:]
SCALE = float(os.environ.get("SCALE", "1"))
missed = []


class Gateway(gateway_process.Gateway):
    """A server process with a data directory of its own, started."""

    def __init__(self, name):
        directory = os.path.join(WORK, name)
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        super().__init__(SERVER, directory, LATEST__ENABLED="false", SYS__ENABLED="false")
        begun = time.monotonic()
        self.took = self.start() - begun

    def restart(self):
        """kill -9 and start; seconds until the port opens."""
        self.kill()
        begun = time.monotonic()
        return self.start() - begun

    def end(self):
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def rss(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

    def cpu(self):
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[1])
        return 0.0

    def grpcload(self, command, *args):
        errors = open(os.path.join(self.directory, "load.log"), "ab")
        line = [GRPCLOAD, command, "--addr", f"http://{self.address}", "--pid", self.process.pid, *args]
        process = subprocess.Popen([str(word) for word in line], stdout=subprocess.PIPE, stderr=errors, text=True)
        atexit.register(process.kill)
        return process


def report(process):
    """What a load generator says once it is done."""
    text, _ = process.communicate()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        sys.exit(f"a load generator ended with {process.returncode} and no report")


def told(item, bound, holds, **figures):
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
    print(f"{item}: {shown}; bound: {bound}: {'held' if holds else 'MISSED'}", flush=True)
    if not holds:
        missed.append(item)


def ms(figures, *names):
    return {name: round(figures[name] / 1000, 2) for name in names}


def commands():
    count = max(1, round(100_000 * SCALE))
    gateway = Gateway("commands")
    empty, base = gateway.took, gateway.rss()

    def beside(seconds=5):
        return gateway.grpcload("send", "--mqtt", f"127.0.0.1:{gateway.mqtt}", "--devices", 100, "--rate", 1000, "-d", seconds)
    before = report(beside())["send_us"]
    run = report(gateway.grpcload("stored", "--start", count))
    told("stored commands: start", "all", run["started"] == count, started=run["started"],
         a_second=round(run["started_per_sec"]), us_of_CPU=run["gateway_cpu_us_per_start"] and round(run["gateway_cpu_us_per_start"]),
         p50_and_p99_ms=ms(run["start_us"], "p50", "p99"))
    told("stored commands: memory", "1.5 KiB for each", gateway.rss() - base < 1.5 * count / 1024 + 32,
         grown_MiB=round(gateway.rss() - base), for_each_bytes=round((gateway.rss() - base) * 2**20 / count))
    told("stored commands: list", "25 ms for a page of 1,000", run["page_us"]["p50"] < 25_000, listed=run["listed"],
         pages=run["pages"], p50_and_max_ms=ms(run["page_us"], "p50", "max"), us_of_CPU=round(run["gateway_cpu_us_per_listed"] or 0, 1))
    listing = gateway.grpcload("stored", "--start", 0)
    during = report(beside(3))["send_us"]
    report(listing)
    told("stored commands: Send to others beside them", "20 ms at p99", during["p99"] < 20_000,
         without_ms=ms(before, "p50", "p99"), with_ms=ms(during, "p50", "p99"))
    starts = [gateway.restart() for _ in range(3)]
    listed = report(gateway.grpcload("stored", "--start", 0, "--active"))
    told("stored commands: restart", "1 s more than without", max(starts) - empty < 1 and listed["listed"] == count,
         there=listed["listed"], start_until_open_ms=[round(t * 1000) for t in starts], without_any=round(empty * 1000),
         MiB=round(gateway.rss()))
    gateway.end()

    gateway = Gateway("expiry")
    # Time enough to start them; then all end in the same second.
    expire = int(time.time()) + max(10, round(2 * count / run["started_per_sec"]))
    report(gateway.grpcload("stored", "--start", count, "--expire", expire))
    if time.time() > expire - 2:
        sys.exit("the machine is too slow: the commands began to expire before all were started")
    time.sleep(max(0, expire - 2 - time.time()))
    others, cpu = beside(10), gateway.cpu()
    while gateway.metric("gateway_commands_ended_total{state=\"timed_out\"}") < count and time.time() < expire + 60:
        time.sleep(0.02)
    took = time.time() - expire
    cpu = gateway.cpu() - cpu
    others = report(others)["send_us"]
    told("stored commands: all expire at once", "10 s, and Send to others 20 ms at p99", took < 10 and others["p99"] < 20_000,
         seconds=round(took, 2), us_of_CPU_for_each_with_what_is_beside_it=round(cpu * 1e6 / count, 1), others_ms=ms(others, "p50", "p99"))
    gateway.end()


def shadows():
    for by in ("backends", "devices"):
        gateway = Gateway("shadows")
        load = ("--by", by, "--mqtt", f"127.0.0.1:{gateway.mqtt}", "-d", max(1, 5 * SCALE))
        many = report(gateway.grpcload("shadows", "--shadows", 200, *load))
        one = report(gateway.grpcload("shadows", "--shadows", 1, *load))
        # What a fleet of 10,000 needs that reports every 10 seconds.
        told(f"shadows, updated by {by}", "1,000 a second", many["updates_per_sec"] >= 1000, a_second=round(many["updates_per_sec"]),
             us_of_CPU=round(many["gateway_cpu_us_per_update"]), p50_and_p99_ms=ms(many["update_us"], "p50", "p99"),
             one_alone_a_second=round(one["updates_per_sec"]), its_p50_and_p99_ms=ms(one["update_us"], "p50", "p99"))
        gateway.end()


def info():
    gateway = Gateway("info")
    with grpc.insecure_channel(gateway.address) as channel:
        groups = rpc.GroupsStub(channel)
        for number in range(100):
            groups.CreateGroup(g.CreateGroupRequest(group=g.Group(name=f"g{number:02}", filter=g.Filter(topic_filters=["#"]))))
        each = max(1, round(10_000 * SCALE))
        line = [MQLOAD, "pubsub", "-p", gateway.mqtt, "-t", "none", "--qos", 1, "--quiet", "-P", 100, "-w", 100, "-n", each]
        subprocess.run([str(word) for word in line], stdout=subprocess.DEVNULL, check=True)
        rounds = max(1, round(100 * SCALE))
        cpu, begun = gateway.cpu(), time.monotonic()
        for _ in range(rounds):
            page = groups.ListGroups(g.ListGroupsRequest(page_size=100)).groups
        cpu, took = gateway.cpu() - cpu, time.monotonic() - begun
        lag = [group.status.lag_messages for group in page]
        us = cpu * 1e6 / rounds / 100
        told("info", "50 us of CPU for a group, its encoding included", len(page) == 100 and min(lag) == 100 * each and us < 50,
             groups=len(page), each_with_lag=lag[0], us_of_CPU_for_each=round(us, 1), ms_for_a_list_of_100=round(took * 1000 / rounds, 2))
    gateway.end()


for item in ITEMS or ("commands", "shadows", "info"):
    {"commands": commands, "shadows": shadows, "info": info}[item]()
if missed:
    sys.exit("missed: " + ", ".join(missed))
