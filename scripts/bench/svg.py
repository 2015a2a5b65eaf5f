"""A small writer of charts as SVG: horizontal bars and lines, both with a logarithmic axis."""

import math
from html import escape

COLOURS = ["#8a8f98", "#1f6feb", "#2da44e", "#bf8700", "#a475f9", "#cf222e", "#1b7c83"]
FONT = 'font-family="sans-serif" font-size="12"'


def ticks(low, high):
    """Powers of ten from below `low` to above `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**k for k in range(first, max(last, first + 1) + 1)]


def scale(marks, start, end):
    """Maps a value logarithmically onto the pixels from `start` to `end`."""
    low, high = math.log10(marks[0]), math.log10(marks[-1])
    return lambda value: start + (math.log10(value) - low) / (high - low) * (end - start)


def text(x, y, content, anchor="start", fill="#57606a"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" {FONT}>{escape(str(content))}</text>'


def segment(x1, y1, x2, y2, colour="#d0d7de", width=1):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def document(width, height, title, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, text(10, 20, title, fill="#24292f"), *parts, "</svg>"]) + "\n"


def legend(names, x, y):
    parts = []
    for i, name in enumerate(names):
        at = x + 140 * i
        parts.append(f'<rect x="{at}" y="{y - 10}" width="12" height="12" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(text(at + 18, y, name))
    return parts


def bars(title, groups, sides):
    """`groups`: (label, {side: value}). One bar for each side that has a value."""
    values = [v for _, by_side in groups for v in by_side.values() if v and v > 0]
    if not values:
        return None
    left, right, top, bar = 120, 780, 60, 14
    marks = ticks(min(values), max(values))
    to_x = scale(marks, left, right)
    height = top + sum(len(sides) * bar + 12 for _ in groups) + 30
    parts = legend(sides, 120, 42)
    for mark in marks:
        parts.append(segment(to_x(mark), top - 4, to_x(mark), height - 26))
        parts.append(text(to_x(mark), height - 10, f"{mark:g}", "middle"))
    y = top
    for label, by_side in groups:
        parts.append(text(left - 8, y + len(sides) * bar / 2 + 4, label, "end", "#24292f"))
        for i, side in enumerate(sides):
            value = by_side.get(side)
            if value and value > 0:
                width = max(1.0, to_x(value) - left)
                colour = COLOURS[i % len(COLOURS)]
                parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{bar - 2}" fill="{colour}"/>')
                parts.append(text(left + width + 4, y + bar - 4, f"{value:.3g}"))
            y += bar
        y += 12
    return document(860, height, title, parts)


def lines(title, x_label, series):
    """`series`: {name: [(x, y), ...]}."""
    points = [p for line in series.values() for p in line if p[1] and p[1] > 0]
    if len(points) < 2:
        return None
    left, right, top, bottom = 70, 780, 70, 340
    x_marks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_marks = ticks(min(y for _, y in points), max(y for _, y in points))
    to_x, to_y = scale(x_marks, left, right), scale(y_marks, bottom, top)
    parts = []
    for i, name in enumerate(series):
        x, y = 70 + 360 * (i % 2), 40 + 15 * (i // 2)
        parts.append(segment(x, y - 4, x + 18, y - 4, COLOURS[i % len(COLOURS)], 3))
        parts.append(text(x + 24, y, name))
    for mark in x_marks:
        parts += [segment(to_x(mark), top, to_x(mark), bottom), text(to_x(mark), bottom + 18, f"{mark:,.0f}", "middle")]
    for mark in y_marks:
        parts += [segment(left, to_y(mark), right, to_y(mark)), text(left - 8, to_y(mark) + 4, f"{mark:g}", "end")]
    for i, line in enumerate(series.values()):
        shown = [(to_x(x), to_y(y)) for x, y in line if y and y > 0]
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in shown]
    parts.append(text((left + right) / 2, bottom + 38, x_label, "middle"))
    return document(860, bottom + 50, title, parts)
