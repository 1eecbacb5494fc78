"""Draw the pictures of the pages: a round, FA-LD and its law, local steps, what R-hat does not see, rooms.

python docs/make_diagrams.py
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Ellipse

import fald
from fald import gaussian

IMAGES = Path(__file__).parent / "images"
COLOURS = ("#0072b2", "#a8510f", "#1c6b3a")  # apart for every kind of colour vision on white
INK, SOFT = "#1a1a1a", "#5a5a5a"
STYLE = {
    "svg.hashsalt": "fald",  # the same picture twice is the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "figure.facecolor": "white",
}
WEIGHTS = np.array([0.5, 0.3, 0.2])
CENTERS = np.array([[-1.6, 0.2], [1.8, 1.3], [1.0, -1.9]])
SAME = np.stack([np.diag([1.0, 1.0])] * 3)
STEP = 0.004
DIFFERENT = np.array([[[0.7, 0.2], [0.2, 0.5]], [[2.6, -0.8], [-0.8, 1.0]], [[0.6, 0.0], [0.0, 3.0]]])
SHARP = 6 * DIFFERENT


def ellipse(axis, mean, covariance, **style) -> None:
    """Where a Gaussian has 68% of its mass."""
    values, vectors = np.linalg.eigh(covariance)
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    width, height = 2 * 1.515 * np.sqrt(values[::-1])
    axis.add_patch(Ellipse(mean, width, height, angle=angle, **style))


def plain(axis, title: str) -> None:
    """A panel in the plane of two parameters, without numbers."""
    axis.set_title(title, loc="left", fontsize=12)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("first parameter")
    axis.set_ylabel("second parameter")


def walk(rng, start, hessian, center, weight, *, step=0.04, count=12, temperature=0.06):
    """Local steps of one site from the position that the server sent."""
    path = [start]
    for _ in range(count):
        noise = np.sqrt(2 * step * temperature / weight) * rng.standard_normal(2)
        path.append(path[-1] - step * hessian @ (path[-1] - center) + noise)
    return np.array(path)


def draw_round() -> plt.Figure:
    """Broadcast, local steps, average."""
    figure, axes = plt.subplots(1, 3, figsize=(9.4, 3.3), sharex=True, sharey=True)
    start = np.array([-0.9, 1.9])
    rng = np.random.default_rng(4)
    paths = [walk(rng, start, h, x, w) for h, x, w in zip(DIFFERENT, CENTERS, WEIGHTS)]
    average = WEIGHTS @ [path[-1] for path in paths]
    titles = ("1. The server sends θ", "2. Sites take K noisy steps", "3. The server averages")
    for axis, title in zip(axes, titles):
        plain(axis, title)
        for hessian, center, colour in zip(DIFFERENT, CENTERS, COLOURS):
            ellipse(axis, center, 0.35 * np.linalg.inv(hessian), fill=False, ec=colour, ls=":", lw=1.2)
            axis.plot(*center, "+", color=colour, ms=9, mew=2)
    axes[0].plot(*start, "o", color=INK, ms=9)
    axes[0].annotate("θ", start, (6, 6), textcoords="offset points", fontsize=13)
    names = ("north, 50%", "south, 30%", "west, 20%")
    for axis in axes[1:]:
        for path, colour in zip(paths, COLOURS):
            axis.plot(*path.T, "-", color=colour, lw=1.6, alpha=1 if axis is axes[1] else 0.35)
            axis.plot(*path[-1], "s", color=colour, ms=7)
    for center, colour, name in zip(CENTERS, COLOURS, names):
        axes[0].annotate(name, center, (0, -46), textcoords="offset points", color=colour, ha="center")
    for path, weight in zip(paths, WEIGHTS):
        ends = np.array([path[-1], average])
        axes[2].plot(*ends.T, "-", color=SOFT, lw=1 + 3 * weight)
    axes[2].plot(*average, "o", color=INK, ms=9)
    axes[2].annotate("new θ", average, (8, 4), textcoords="offset points", fontsize=12)
    axes[0].set(xlim=(-3.2, 3.4), ylim=(-4.0, 2.9))
    return figure


def draw_local_steps() -> plt.Figure:
    """The law of the draws against the posterior, for alike and for different sites."""
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.7), sharex=True, sharey=True)
    titles = ("Sites of the same curvature", "Sites of different curvature")
    for axis, hessians, title in zip(axes, (6 * SAME, SHARP), titles):
        plain(axis, title)
        target = gaussian.target(hessians, CENTERS, WEIGHTS)
        ellipse(axis, target.mean, target.covariance, fc="#e2e2e2", ec=SOFT, lw=1, label="posterior")
        for steps, colour in zip((1, 10, 60), COLOURS):
            law = gaussian.stationary(hessians, CENTERS, WEIGHTS, step_size=STEP, local_steps=steps)
            ellipse(axis, law.mean, law.covariance, fill=False, ec=colour, lw=2, label=f"draws, K = {steps}")
            axis.plot(*law.mean, "o", color=colour, ms=6)
        axis.plot(*target.mean, "x", color=INK, ms=9, mew=2)
    axes[0].set(xlim=(-1.1, 1.6), ylim=(-1.9, 0.8))
    axes[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def draw_fa_ld() -> plt.Figure:
    """Distance of the sampler's draws from the posterior as K grows, and of their exact law."""
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.4), sharey=True)
    some = fald.without_replacement(5)
    ways = {
        "all 10 sites": {},
        "5 sites a round, noise by realised weights": {"participation": some},
        "5 sites a round, noise as published": {"participation": some, "noise": "paper"},
    }
    model = fald.Model(
        logprior_fn=lambda theta: 0.0 * theta.sum(),
        loglikelihood_fn=lambda theta, row: -0.5 * (row[1] - row[0] @ theta) ** 2,
        initial_position=np.zeros(2),
    )
    steps = (1, 3, 10, 30, 100)
    for axis, differ in zip(axes, (0.0, 0.9)):
        data, energies = linear_sites(differ)
        target = gaussian.target(*energies)
        size = np.sqrt(np.trace(target.covariance))
        for (name, way), colour, mark in zip(ways.items(), COLOURS, "osD"):
            found, laws = [], []
            for k in steps:
                settings = {"local_steps": k, "step_size": 1e-4, **way}
                law = gaussian.stationary(*energies, **settings)
                laws.append(gaussian.wasserstein2(*law, *target) / size)
                rounds = 40 + 400 // k
                tree = fald.sample(
                    0,
                    model,
                    data,
                    num_rounds=rounds,
                    num_warmup=rounds - 1,
                    num_chains=4000,
                    progress=False,
                    **settings,
                )
                found.append(fald.diagnostics.distance(tree, target)["w2"].iloc[-1] / size)
            axis.plot(steps, laws, "-", color=colour, lw=1.6)
            axis.plot(steps, found, mark, color=colour, ms=6, label=name)
        title = "Sites that differ in curvature" if differ else "Sites of the same curvature"
        axis.set_title(title, loc="left", fontsize=12)
        axis.set_xscale("log")
        axis.set_xticks(steps, [f"{k}" for k in steps])
        axis.minorticks_off()
        axis.set_xlabel("local steps K")
    axes[0].set_ylabel("W2 to the posterior,\nin units of its size")
    axes[0].set_ylim(0)
    axes[0].legend(loc="upper left", frameon=False, fontsize=9.5, title="marks: draws, lines: exact law")
    return figure


def linear_sites(differ: float) -> tuple[fald.FederatedData, tuple]:
    """Ten sites with 20 rows (a, y) each, and their energies; ``differ`` spreads the sizes of a."""
    rng = np.random.default_rng(3)
    design, clients, hessians, centers = rng.normal(size=(20, 2)), {}, [], []
    for c, scale in enumerate(np.exp(differ * np.linspace(-1, 1, 10))):
        a = scale * design if not differ else scale * rng.normal(size=(20, 2))
        y = a @ rng.normal(0, 0.4, 2) + rng.normal(size=20)
        clients[f"site {c}"] = (a, y)
        hessians.append(10 * a.T @ a)
        centers.append(np.linalg.solve(a.T @ a, a.T @ y))
    data = fald.FederatedData.from_arrays(clients)
    return data, (np.array(hessians), np.array(centers), data.weights)


def chains(local_steps: int, num_draws: int, rng, every: int) -> np.ndarray:
    """Second parameter of four chains of FA-LD, one draw in so many rounds."""
    start = gaussian.target(SHARP, CENTERS, WEIGHTS).mean
    theta, draws = np.tile(start, (4, 1)), []
    for number in range(num_draws * every):
        local = np.repeat(theta[:, None], len(WEIGHTS), axis=1)  # chain, site, parameter
        for _ in range(local_steps):
            slope = np.einsum("cij,kcj->kci", SHARP, local - CENTERS)
            noise = np.sqrt(2 * STEP / WEIGHTS)[:, None] * rng.standard_normal(local.shape)
            local = local - STEP * slope + noise
        theta = np.einsum("c,kci->ki", WEIGHTS, local)
        if (number + 1) % every == 0:
            draws.append(theta[:, 1])
    return np.array(draws).T


def draw_blind() -> plt.Figure:
    """Two runs that mix equally well; one of them is wrong."""
    from arviz_stats import base

    rng = np.random.default_rng(0)
    target = gaussian.target(SHARP, CENTERS, WEIGHTS)
    mean, sd = target.mean[1], np.sqrt(target.covariance[1, 1])
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.0), sharey=True)
    for axis, steps in zip(axes, (1, 60)):
        draws = chains(steps, 1500, rng, every=60 // steps)
        rhat = float(base.array_stats.rhat(draws, chain_axis=0, draw_axis=1))
        axis.axhspan(mean - sd, mean + sd, color="#e2e2e2")
        for chain, colour in zip(draws[:3], COLOURS):
            axis.plot(chain[:200], color=colour, lw=0.8)
        axis.axhline(mean, color=INK, lw=1.5)
        axis.set_title(f"K = {steps}: R-hat {rhat:.3f}", loc="left", fontsize=12)
        axis.set_xlabel("draw")
    axes[0].set_ylabel("second parameter")
    axes[0].annotate("line and band: posterior mean ± sd", (0.02, 0.04), xycoords="axes fraction", color=INK)
    return figure


def main() -> None:
    """Write all pictures."""
    with plt.rc_context(STYLE):
        pictures = {
            "round": draw_round,
            "fa-ld": draw_fa_ld,
            "local-steps": draw_local_steps,
            "blind": draw_blind,
        }
        for name, draw in pictures.items():
            figure = draw()
            figure.tight_layout()
            figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None, "Creator": None})
            print(f"wrote {IMAGES / name}.svg")
    (IMAGES / "rooms.svg").write_text(rooms(), encoding="utf-8")


ROOMS = (  # from top to bottom: a room imports only from rooms below it
    (("lab", "comparison methods, the paper, speed"),),
    (("cli", "the command"),),
    (("report", "the page of a run"), ("pages", "watch and explore in a browser")),
    (("federation", "wire · coordinator · site · secure sum · engines"),),
    (("study", "the study file, its run, its folder"),),
    (("planner", "settings before a run, checks after it"),),
    (
        ("fewround", "a posterior in a handful of rounds"),
        ("langevin", "FA-LD: client, server, method, engine"),
    ),
    (("results", "draws, summaries, checks, predictions"),),
    (("runtime", "checkpoint, journal, progress, compiler"),),
    (("privacy", "events, accountants, statement"), ("theory", "bounds, constants, the exact law")),
    (("settings", "FA-LD's settings, participation, schedules"),),
    (("calculus", "sums over rows, batches, clipping, the mode"),),
    (("problem", "model, families, data, encoding"),),
    (("core", "errors, types, keys, files, registry"),),
)


def rooms() -> str:
    """The rooms of the package, as text of an SVG file."""
    width, high, gap = 720, 38, 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(ROOMS) * (high + gap) + gap}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">'
    ]
    for i, floor in enumerate(ROOMS):
        each = (width - gap * (len(floor) + 1)) / len(floor)
        for j, (name, about) in enumerate(floor):
            x, y = gap + j * (each + gap), gap + i * (high + gap)
            lines += [
                f'<rect x="{x:g}" y="{y}" width="{each:g}" height="{high}" rx="5" fill="#eef4f9" '
                'stroke="#0072b2"/>',
                f'<text x="{x + 10:g}" y="{y + 24}" fill="{INK}"><tspan font-weight="700">{name}</tspan>'
                f'  <tspan fill="{SOFT}" font-size="12">{about}</tspan></text>',
            ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
