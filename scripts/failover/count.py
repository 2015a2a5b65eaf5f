"""Counts what clients have logged: count.py DIRECTORY CLIENT...

Logs are CLIENT-pub.log and CLIENT-sub.log, with lines `TIME acknowledged N` and `TIME arrived N`; `events` has lines `TIME NAME`. Exit code
1: something acknowledged is missing, or a message of QoS 2 came twice.
"""
import collections
import pathlib
import re
import sys

QOS = {"mosquitto": 1, "paho": 2, "mqttjs": 1}
LINE = re.compile(r"^(\d+\.\d+) (acknowledged|arrived) (\d+)$")


def read(path):
    """Times and numbers, in order."""
    found = (LINE.match(line) for line in path.read_text().splitlines())
    return [(float(match[1]), int(match[3])) for match in found if match]


def longest_gaps(times, events):
    """By event: the longest time between two, in the event in which it ended."""
    longest = collections.Counter()
    for before, after in zip(times, times[1:]):
        name = next((name for begun, name in reversed(events) if begun <= after), None)
        longest[name] = max(longest[name], after - before)
    return longest


def table(rows):
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [str(cell).ljust(width) if column == 0 else str(cell).rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells))


def main():
    directory, clients = pathlib.Path(sys.argv[1]), sys.argv[2:]
    events = [line.split(" ", 1) for line in (directory / "events").read_text().splitlines()]
    events = [(float(time), name) for time, name in events]
    counts = [["client", "QoS", "acknowledged", "arrived", "missing", "duplicates"]]
    gaps = [["longest gap, seconds"] + [name for _, name in events]]
    is_good = True
    for client in clients:
        sent, arrived = read(directory / f"{client}-pub.log"), read(directory / f"{client}-sub.log")
        acknowledged = {number for _, number in sent}
        copies = collections.Counter(number for _, number in arrived)
        missing, twice = acknowledged - copies.keys(), sum(copies.values()) - len(copies)
        counts.append([client, QOS[client], len(acknowledged), len(copies), len(missing), twice])
        if not acknowledged or missing or QOS[client] == 2 and twice:
            is_good = False
        for what, times in (("acknowledged", sent), ("arrived", arrived)):
            longest = longest_gaps([time for time, _ in times], events)
            gaps.append([f"{client}, {what}"] + [f"{longest[name]:.1f}" for _, name in events])
    table(counts)
    print()
    table(gaps)
    sys.exit(0 if is_good else 1)


main()
