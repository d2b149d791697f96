"""One picture per idea, as SVG: python docs/pictures.py writes them into docs/.

Each picture is computed: the timelines by a small simulation, the walks by gradient descent on a
quadratic, the weights by edit.py. The same code gives the same bytes.
"""

import math
import random
import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parent.parent))  # the project's folder

import torch

import diloco
import edit

WIDTH = 720
COMPUTES = "#0072b2"
FORWARD = "#3a93cc"
WAITS = "#e69f00"  # for the link
OTHERS = "#d7d7d7"  # waits for others
LINK = "#444444"
FLAGGED = "#d55e00"
OUTER = "#009e73"
PALE = "#cfe3f1"
INK = "#1c1c1c"
WHITE = "#ffffff"

DEFINITIONS = f"""<defs>
<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)">
<rect width="7" height="7" fill="{WAITS}"/><rect width="3" height="7" fill="#ffd98a"/>
</pattern>
</defs>"""


class Picture:
    """Shapes, in pixels from the left upper corner."""

    def __init__(self, height, title):
        self.size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        self.parts = [f"<title>{escape(title)}</title>"]
        self.rect(0, 0, WIDTH, height, WHITE)

    def add(self, tag, content=None, **attributes):
        words = [tag]
        for name, value in attributes.items():
            if isinstance(value, float):
                value = f"{value:.1f}"
            words.append(f'{name.replace("_", "-")}="{value}"')
        end = "/>" if content is None else f">{escape(content)}</{tag}>"
        self.parts.append(f"<{' '.join(words)}{end}")

    def rect(self, x, y, width, height, fill, **more):
        place = dict(x=float(x), y=float(y), width=float(width), height=float(height))
        self.add("rect", **place, fill=fill, **more)

    def box(self, x, y, width, height, fill, words="", color=WHITE):
        """A rectangle with words in its middle."""
        self.rect(x, y, width, height, fill, stroke=WHITE)
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, anchor="middle", color=color)

    def text(self, x, y, words, size=13, anchor="start", color=INK, **more):
        place = dict(x=float(x), y=float(y), font_size=size, text_anchor=anchor)
        self.add("text", words, **place, fill=color, **more)

    def heading(self, x, y, words):
        self.text(x, y, words, size=14, font_weight="bold")

    def line(self, points, color=INK, width=1.5, **more):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add("polyline", points=path, fill="none", stroke=color, stroke_width=width, **more)

    def arrow(self, begin, end, color=INK, width=2.0, both=False):
        """An arrow; both: with two heads."""
        self.line([begin, end], color, width)
        self.head(begin, end, color, width)
        if both:
            self.head(end, begin, color, width)

    def head(self, begin, end, color, width):
        """The triangle at the end of an arrow."""
        size = 5 + 1.5 * width
        length = math.dist(begin, end)
        u = (end[0] - begin[0]) / length
        v = (end[1] - begin[1]) / length
        x, y = end[0] - size * u, end[1] - size * v
        side = size / 2.2
        corners = [end, (x - side * v, y + side * u), (x + side * v, y - side * u)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.add("polygon", points=points, fill=color)

    def measure(self, begin, end, y, words, color=INK):
        """An arrow with two heads from one x to another, with words above its middle."""
        self.arrow((begin, y), (end, y), color, 1.0, both=True)
        self.text((begin + end) / 2, y - 6, words, anchor="middle", color=color)

    def dot(self, x, y, color, radius=4.5, **more):
        self.add("circle", cx=float(x), cy=float(y), r=radius, fill=color, **more)

    def legend(self, y, entries, x=16):
        for color, words in entries:
            self.rect(x, y - 11, 16, 12, color)
            self.text(x + 22, y, words)
            x += 22 + 7.3 * len(words) + 14

    def svg(self):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} font-family="sans-serif">'
        return "\n".join([head, DEFINITIONS, *self.parts, "</svg>"]) + "\n"


KINDS = [
    (COMPUTES, "computes"),
    (WAITS, "waits for the link"),
    (OTHERS, "waits for the other replica"),
    (LINK, "the link is busy"),
]


# ---- minibatch and local SGD; rounds by steps and by the clock ----


def simulate(step_s, steps, link_s, horizon_s):
    """Rounds of `steps[i]` steps of replica i; then the link is busy for link_s. step_s[i]: seconds
    of its steps, over and over. Returns spans (row, color, begin, end): a row for each replica, and
    "link"; and the number of steps until the horizon."""
    spans = []
    counts = [0] * len(step_s)
    begin = 0.0
    while begin < horizon_s:
        ends = []
        for i, seconds in enumerate(step_s):
            now = begin
            for _ in range(steps[i]):
                end = now + seconds[counts[i] % len(seconds)]
                spans.append((i, COMPUTES, now, end))
                counts[i] += end <= horizon_s
                now = end
            ends.append(now)
        last = max(ends)
        for i, end in enumerate(ends):
            spans.append((i, OTHERS, end, last))
            spans.append((i, WAITS, last, last + link_s))
        spans.append(("link", LINK, last, last + link_s))
        begin = last + link_s
    return spans, counts


def draw_rounds(picture, top, title, spans, counts, horizon_s):
    left, right = 90, 610
    scale = (right - left) / horizon_s
    rows = {0: (top + 14, 24), 1: (top + 44, 24), "link": (top + 74, 10)}
    picture.heading(16, top, title)
    for row, (y, height) in rows.items():
        picture.text(16, y + height / 2 + 4.5, row if row == "link" else f"replica {row}")
    for row, color, begin, end in spans:
        end = min(end, horizon_s)
        if begin < end:
            y, height = rows[row]
            width = (end - begin) * scale
            picture.rect(left + begin * scale, y, width, height, color, stroke=WHITE)
    for i, count in enumerate(counts):
        picture.text(right + 10, rows[i][0] + 17, f"{count} steps")


def local_sgd():
    picture = Picture(290, "Averaged gradients and local SGD as timelines")
    picture.legend(24, KINDS)
    step_s = [[1.0], [1.2, 0.9, 1.1, 1.0]]
    cases = {
        "Averaged gradients: a wait after each step": 1,
        "Local SGD: average the models after each round of tau = 4 steps": 4,
    }
    for row, (title, tau) in enumerate(cases.items()):
        spans, counts = simulate(step_s, [tau, tau], 0.8, 15.0)
        draw_rounds(picture, 58 + 116 * row, title, spans, counts, 15.0)
    picture.arrow((90, 270), (610, 270), width=1.0)
    picture.text(620, 274, "time")
    return picture


def clock():
    picture = Picture(290, "Rounds that end by steps and rounds that end by the clock")
    picture.legend(24, KINDS)
    cases = {
        "EDiT: a round is tau = 4 steps; replica 1 is half as fast": (4, 4),
        "A-EDiT: a round is 8 seconds; nobody waits for the slow replica": (8, 4),
    }
    for row, (title, steps) in enumerate(cases.items()):
        spans, counts = simulate([[1.0], [2.0]], steps, 0.7, 17.4)
        draw_rounds(picture, 58 + 116 * row, title, spans, counts, 17.4)
    picture.arrow((90, 270), (610, 270), width=1.0)
    picture.text(620, 274, "time")
    return picture


# ---- the grid ----


def grid():
    picture = Picture(350, "Two replicas of two shards: shard groups and sync groups")
    left, width, height = [170, 440], 180, 76
    top = [62, 212]
    for n in range(2):
        x = left[n] - 18
        dashed = dict(stroke=LINK, stroke_width=2, rx=12, stroke_dasharray="7 5")
        picture.rect(x, 20, width + 36, 292, WHITE, **dashed)
        middle = left[n] + width / 2
        picture.text(middle, 334, f"sync group of shard {n}", anchor="middle", color=LINK)
    for i in range(2):
        x, y = left[0] - 40, top[i] - 16
        solid = dict(stroke=COMPUTES, stroke_width=2, rx=12, fill_opacity=0.5)
        picture.rect(x, y, 530, height + 32, PALE, **solid)
        picture.text(16, y + 40, f"replica {i}", color=COMPUTES, font_weight="bold")
        picture.text(16, y + 60, "(a shard group)", color=COMPUTES)
        for n in range(2):
            draw_rank(picture, left[n], top[i], width, height, rank=2 * i + n, shard=n)
        y = top[i] + height / 2
        picture.arrow((left[0] + width + 4, y), (left[1] - 4, y), COMPUTES, 3, both=True)
        picture.text(395, y - 26, "every", anchor="middle", color=COMPUTES)
        picture.text(395, y - 10, "step", anchor="middle", color=COMPUTES)
    for n in range(2):
        x = left[n] + width / 2
        picture.arrow((x, top[0] + height + 4), (x, top[1] - 4), LINK, 3, both=True)
        picture.text(x + 12, 172, "once per", color=LINK)
        picture.text(x + 12, 188, "round", color=LINK)
    return picture


def draw_rank(picture, x, y, width, height, rank, shard):
    picture.rect(x, y, width, height, WHITE, stroke=INK, rx=5)
    picture.text(x + 12, y + 24, f"rank {rank}", font_weight="bold")
    for n in range(2):
        own = n == shard
        words = f"shard {n}" if own else ""
        picture.box(x + 12 + 78 * n, y + 38, 78, 26, COMPUTES if own else "#eeeeee", words)


# ---- buffers A and B ----


def trace(L):
    """The slots of a step: L forwards, then L backwards. Returns the layer of each slot, the
    all-gathers as slot -> layer (-1: before the first slot), and for each buffer what it holds:
    (layer, first slot, last slot)."""
    order = [*range(L), *reversed(range(L))]
    gathers = {}
    held = {0: [], 1: []}
    for slot, l in enumerate(order[:-1]):  # layer 0's backward needs no parameters
        stays = held[l % 2] and held[l % 2][-1][0] == l
        if stays:
            held[l % 2][-1][2] = slot
        else:
            gathers[slot - 1] = l  # while the layer before computes
            held[l % 2].append([l, slot, slot])
    return order, gathers, held


def buffers():
    picture = Picture(306, "What the two buffers hold in the forward and in the backward")
    L = 4
    order, gathers, held = trace(L)
    left, slot_width = 122, 58
    x = [left + slot_width * (slot + 1) for slot in range(-1, 2 * L + 1)]  # x[slot + 1]
    rows = {
        "computes layer": 58,
        "buffer A": 98,
        "buffer B": 138,
        "all-gather": 188,
        "reduce-scatter": 222,
    }
    for words, y in rows.items():
        picture.text(14, y + 19, words)
    picture.measure(x[1] + 2, x[L + 1] - 2, 40, "forward")
    picture.measure(x[L + 1] + 2, x[2 * L + 1] - 2, 40, "backward")
    for slot, l in enumerate(order):
        color = FORWARD if slot < L else COMPUTES
        picture.box(x[slot + 1], rows["computes layer"], slot_width, 28, color, str(l))
        if slot >= L:
            picture.box(x[slot + 2], rows["reduce-scatter"], slot_width, 28, LINK, f"layer {l}")
    for slot, l in gathers.items():
        picture.box(x[slot + 1], rows["all-gather"], slot_width, 28, LINK, f"layer {l}")
        y = rows["buffer B" if l % 2 else "buffer A"]
        picture.box(x[slot + 1], y, slot_width, 28, OTHERS, f"gets {l}", INK)
    for buffer, name in enumerate(["buffer A", "buffer B"]):
        for l, first, last in held[buffer]:
            width = slot_width * (last - first + 1)
            picture.box(x[first + 1], rows[name], width, 28, PALE, f"holds {l}", INK)
    count = len(gathers)
    found = f"The backward finds layers {L - 1} and {L - 2} still there;"
    picture.text(14, 274, f"{L} layers, {count} all-gathers. {found}")
    picture.text(14, 292, "that of layer 0 needs no parameters.")
    return picture


# ---- the pseudo-gradient ----

# The loss of a replica is (x - best)' H (x - best) / 2.
H = torch.tensor([[0.55, 0.55], [0.55, 2.05]], dtype=torch.float64)
BEST = [(6.6, 1.6), (8.8, 1.9), (7.2, 0.5), (9.0, 0.4)]
START = (1.2, 5.2)


def walk(start, best, draw, steps=16, lr=0.06):
    """Steps of noisy gradient descent on a replica's quadratic: all points, the start first."""
    points = [start]
    for _ in range(steps):
        noise = torch.tensor([draw.uniform(-2, 2), draw.uniform(-2, 2)], dtype=torch.float64)
        gradient = H @ (points[-1] - best) + noise
        points.append(points[-1] - lr * gradient)
    return points


def outer_rounds(rounds, lr=0.7, mu=0.8):
    """DiLoCo on the four quadratics: (anchor, walks, mean of their ends, next anchor) each."""
    draw = random.Random(3)
    anchor = torch.tensor(START, dtype=torch.float64)
    momentum = torch.zeros_like(anchor)
    found = []
    for _ in range(rounds):
        before = anchor.clone()
        walks = [walk(before, best, draw) for best in torch.tensor(BEST, dtype=torch.float64)]
        mean = torch.stack([points[-1] for points in walks]).mean(dim=0)
        diloco.nesterov(anchor, momentum, before - mean, lr, mu)
        found.append((before, walks, mean, anchor.clone()))
    return found


def place(point):
    """Where a point of the plane is in the picture."""
    return 72 * float(point[0]), 460 - 72 * float(point[1])


def draw_contours(picture):
    """Ellipses on which the mean loss is 0.2, 0.8, 1.8, ... above its smallest value."""
    values, vectors = torch.linalg.eigh(H)
    best = torch.tensor(BEST, dtype=torch.float64).mean(dim=0)
    cx, cy = place(best)
    angle = -math.degrees(math.atan2(vectors[1, 0], vectors[0, 0]))  # y points down
    for size in range(1, 13):
        rx, ry = (72 * math.sqrt(2 * 0.2 / value) * size for value in values.tolist())
        turn = f"rotate({angle:.2f} {cx:.1f} {cy:.1f})"
        look = dict(fill="none", stroke=OTHERS, stroke_width=1.2)
        picture.add("ellipse", cx=cx, cy=cy, rx=rx, ry=ry, transform=turn, **look)
    picture.line([(cx - 5, cy - 5), (cx + 5, cy + 5)])
    picture.line([(cx - 5, cy + 5), (cx + 5, cy - 5)])
    picture.text(cx - 6, cy + 22, "smallest mean loss", size=12)


def pseudo_gradient():
    picture = Picture(450, "Anchor, four walks, their mean and the outer step, on a quadratic loss")
    draw_contours(picture)
    for number, (anchor, walks, mean, after) in enumerate(outer_rounds(2), start=1):
        for points in walks:
            picture.line([place(point) for point in points], COMPUTES, 1.3)
            picture.dot(*place(points[-1]), COMPUTES, radius=3)
        picture.arrow(place(mean), place(anchor), FLAGGED)
        picture.arrow(place(anchor), place(after), OUTER, 3)
        picture.dot(*place(mean), FLAGGED, radius=5)
        picture.dot(*place(anchor), INK, radius=6)
    picture.dot(*place(after), INK, radius=6)

    picture.rect(0, 0, WIDTH, 66, WHITE)
    picture.dot(22, 20, INK, radius=6)
    picture.text(36, 24, "anchor")
    picture.line([(100, 20), (128, 20)], COMPUTES, 1.3)
    picture.text(136, 24, "four replicas, 16 inner steps each")
    picture.dot(400, 20, FLAGGED, radius=5)
    picture.text(414, 24, "mean of the four ends")
    picture.arrow((14, 48), (42, 48), FLAGGED)
    picture.text(50, 52, "pseudo-gradient d = anchor - mean")
    picture.arrow((318, 48), (346, 48), OUTER, 3)
    picture.text(354, 52, "outer step: anchor <- anchor - lr (d + mu b)")
    return picture


# ---- the exchange by layer ----


def exchange_times(L, c, f):
    """Layer l arrives at (l + 1) c. Returns the begin of each layer's forward in EDiT, and what it
    waits before each: max(c, L c - (L-1) f) in all, if c > f."""
    begins = []
    waits = []
    now = 0.0
    for l in range(L):
        begin = max(now, (l + 1) * c)
        begins.append(begin)
        waits.append(begin - now)
        now = begin + f
    return begins, waits


def exchange():
    picture = Picture(330, "DiLoCo waits for all layers, EDiT for one layer at a time")
    L, c, f = 4, 1.4, 1.0
    begins, waits = exchange_times(L, c, f)
    left, scale = 150, 50

    def x(seconds):
        return left + scale * seconds

    cases = {
        "DiLoCo": ([L * c + l * f for l in range(L)], [(0, L * c)]),
        "EDiT": (begins, [(begin - wait, begin) for begin, wait in zip(begins, waits)]),
    }
    legend = [
        (FORWARD, "forward"),
        (COMPUTES, "backward"),
        ("url(#hatch)", "exposed: waits for the link"),
        (LINK, "the link is busy"),
    ]
    picture.legend(24, legend)
    for row, (name, (forwards, exposed)) in enumerate(cases.items()):
        y = 76 + 130 * row
        picture.heading(16, y + 4, name)
        picture.text(16, y + 27, "computes")
        picture.text(16, y + 60, "link: layer")
        picture.box(x(-0.9), y + 8, 0.9 * scale, 28, COMPUTES)
        for begin, end in exposed:
            picture.rect(x(begin), y + 8, (end - begin) * scale, 28, "url(#hatch)", stroke=WHITE)
        for l, begin in enumerate(forwards):
            picture.box(x(begin), y + 8, f * scale, 28, FORWARD, str(l))
            picture.box(x(l * c), y + 42, c * scale, 26, LINK, str(l))
        end = forwards[-1] + f
        picture.rect(x(end), y + 8, 700 - x(end), 28, COMPUTES, stroke=WHITE)
        total = sum(end - begin for begin, end in exposed)
        formula = "L c" if name == "DiLoCo" else "max(c, L c - (L-1) f)"
        picture.text(x(L * c) + 12, y + 61, f"exposed: {formula} = {total:.1f}")
        picture.arrow((x(0), y + 88), (x(c), y + 88), width=1.0, both=True)
        picture.text(x(c / 2), y + 104, f"c = {c}", anchor="middle")
        picture.measure(x(forwards[0]), x(forwards[0] + f), y - 2, f"f = {f:.0f}")
    return picture


# ---- the penalty ----

EARLIER = [  # ten norms of each replica
    [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 0.9, 1.1, 1.0, 1.1],
    [1.2, 1.0, 1.1, 1.3, 1.1, 1.0, 1.2, 1.1, 1.0, 1.2],
    [0.9, 1.0, 1.0, 0.8, 1.1, 0.9, 1.0, 0.9, 1.0, 0.9],
    [1.0, 1.6, 0.8, 1.3, 1.9, 1.1, 0.9, 1.5, 1.0, 1.4],
]


def judge(norms):
    """Limits, flags and weights of one layer, by edit.py."""
    config = edit.PenaltyConfig()
    limits = []
    for earlier in EARLIER:
        statistics = torch.zeros(3, 1)
        for norm in earlier:
            accepted = torch.tensor([True])
            statistics = edit.update_statistics(statistics, torch.tensor([norm]), accepted, config)
        limits.append(edit.anomaly_limits(statistics, config))
    limits = torch.stack(limits)  # (M, 1)
    G = torch.tensor(norms)[:, None]
    flagged = edit.is_anomaly(G, limits)
    weights = edit.replica_weights(G, flagged)
    return limits[:, 0].tolist(), flagged[:, 0].tolist(), weights[:, 0].tolist()


def penalty():
    picture = Picture(350, "Norms, their limits, and the weights that follow")
    cases = {
        "Far from the anchor: less weight": [1.0, 1.2, 0.9, 2.1],
        "Diverged: flagged, no weight": [1.0, 1.2, 0.9, 4.0],
    }
    picture.text(16, 140, "norm")
    picture.text(16, 280, "weight")
    for panel, (title, norms) in enumerate(cases.items()):
        left = 80 + 325 * panel
        picture.heading(left, 28, title)
        limits, flagged, weights = judge(norms)
        for i, norm in enumerate(norms):
            x = left + 74 * i
            color = FLAGGED if flagged[i] else COMPUTES
            picture.rect(x, 210 - 38 * norm, 44, 38 * norm, color)
            picture.text(x + 22, 204, f"{norm:.1f}", anchor="middle", color=WHITE)
            y = 210 - 38 * limits[i]
            picture.line([(x - 8, y), (x + 52, y)], INK, 2, stroke_dasharray="5 3")
            picture.rect(x, 300 - 130 * weights[i], 44, 130 * weights[i], OUTER)
            picture.text(x + 22, 294 - 130 * weights[i], f"{weights[i]:.2f}", anchor="middle")
            picture.text(x + 22, 318, f"replica {i}", anchor="middle", size=12)
        for y in (210, 300):
            picture.line([(left - 10, y), (left + 276, y)], LINK, 1)
    picture.line([(80, 338), (110, 338)], INK, 2, stroke_dasharray="5 3")
    picture.text(116, 342, "limit of the replica: mean of its earlier norms + 3 sigma")
    return picture


PICTURES = [local_sgd, grid, buffers, pseudo_gradient, exchange, penalty, clock]


def main(folder=Path(__file__).parent):
    for draw in PICTURES:
        Path(folder, f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
