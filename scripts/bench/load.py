"""Runs of the load generators, with what is kept of each: the JSON they print."""

import json
import subprocess
import time

from brokers import pinned

# A run with another exit code than 0 is no result: it is repeated so often, then reported.
REPEATS = 2


class Failed(Exception):
    """A measurement that gave no result; the text says why."""


class Loader:
    """Runs mqload and grpcload pinned to their CPU and remembers how disturbed the machine was."""

    def __init__(self, tools, cpus, seconds):
        self.tools = tools
        self.cpus = cpus
        self.seconds = seconds
        self.commands = []
        self.runs = []

    def mqload(self, broker, command, *args, via="tcp", timed=True, check=True):
        """One run against `broker` through its listener `via`; gives mqload's report."""
        line = ["mqload", command, "-p", str(broker.ports[via]), "--pid", str(broker.pid), *map(str, args)]
        if timed:
            line += ["-d", str(self.seconds)]
        if via == "tls":
            line += ["--tls", "--insecure"]
        if via == "ws":
            line += ["--ws"]
        return self.run(broker, [*line, "--quiet"], check)

    def grpcload(self, broker, command, *args):
        line = ["grpcload", command, "--addr", f"http://127.0.0.1:{broker.ports['grpc']}"]
        line += ["--pid", str(broker.pid), "-d", str(self.seconds), *map(str, args)]
        return self.run(broker, line, True)

    def run(self, broker, line, check):
        for attempt in range(1 + REPEATS):
            report, code, text = self.once(line)
            self.note(broker, line, report, code)
            if code == 0 or (report and not check):
                return report
            if broker.process.poll() is not None:
                raise Failed(f"{broker.name} ended: {broker.log_tail()[-200:]}")
            time.sleep(1)
        raise Failed(f"{line[0]} exit {code} in {1 + REPEATS} runs: {why(report) or text.strip()[-200:]}")

    def once(self, line):
        command = pinned(self.cpus, [str(self.tools / line[0]), *line[1:]])
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            return json.loads(done.stdout), done.returncode, done.stderr
        except json.JSONDecodeError:
            return None, done.returncode or 1, done.stderr

    def note(self, broker, line, report, code):
        # Ports and pids differ from run to run: the docs show the rest.
        shown = drop_option(drop_option(drop_option(line, "-p"), "--pid"), "--addr")
        command = " ".join(a for a in shown if a != "--quiet")
        if command not in self.commands:
            self.commands.append(command)
        self.runs.append({"side": broker.name, "command": command, "exit": code, "report": report})

    def disturbed(self):
        """The highest share of CPU that neither broker nor generator used, in percent of one CPU."""
        seen = [run["report"].get("other_cpu_percent") for run in self.runs if run["report"]]
        return max((x for x in seen if x is not None), default=0.0)


def drop_option(line, name):
    at = [i for i, a in enumerate(line) if a == name]
    return [a for i, a in enumerate(line) if not any(i in (k, k + 1) for k in at)]


def why(report):
    """What an unsuccessful report complains about."""
    if not report:
        return ""
    parts = {k: report.get(k) for k in ("connect_failures", "dropped_connections", "lost", "duplicated", "misrouted", "unacked")}
    return ", ".join(f"{k} {v}" for k, v in parts.items() if v)
