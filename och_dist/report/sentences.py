"""What a comparison found, in plain sentences: the same in the tables, in the page and on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from och_dist.report.results import METRICS, OURS, Figure, Lead, Results

NAMED = 2  # losses that the headline names; more are counted


def signed(figure: Figure) -> str:
    """+39.6 %, or +39.6 ± 0.4 %; a true minus sign, and no line break before the sign of percent."""
    text = f"{figure.mean:+.1f}"
    text = "±0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")
    return text + ("" if figure.std is None else f"\u00a0±\u00a0{figure.std:.1f}") + "\u00a0%"


def level(figure: Figure) -> str:
    """The same without its spread."""
    return signed(figure._replace(std=None))


def joined(parts: Iterable[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    listed = list(parts)
    return listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + " and " + listed[-1]


def values(lead: Lead) -> str:
    return f"{lead.ours.mean:.4f} against {lead.theirs.mean:.4f}"


def lost(results: Results) -> list[Lead]:
    """Where a baseline wins or draws."""
    return [lead for lead in results.leads() if lead.percent.mean <= 0]


def headline(results: Results) -> str:
    """The result in one sentence."""
    leads = results.leads()
    if OURS not in results.series or not any(results.figure(OURS, r, "map") for r in results.bits):
        best = [
            f"{series.label} at {bits} bits"
            for bits in results.bits
            if (series := results.best_baseline(bits, METRICS[0]))
        ]
        return f"OCH was not part of this comparison; the highest mAP has {joined(best or ['nobody'])}."
    if not leads:
        return "OCH was compared with no baseline."
    maps = [lead for lead in leads if lead.metric == METRICS[0]]
    gains = f"mAP {joined(level(lead.percent) for lead in maps)} at {joined(str(m.bits) for m in maps)} bits"
    losses = lost(results)
    if not losses:
        against = "every baseline" if len(results.baselines) > 1 else results.baselines[0].label
        return f"OCH is ahead of {against} on every measure and at every code length: {gains}."
    won = len(leads) - len(losses)
    if not won:
        return f"OCH is not ahead of the best baseline on any measure at any code length: {gains}."
    rest = (
        joined(f"at {lead.bits} bits on {lead.metric.name}, where {_winner(lead)}" for lead in losses)
        if len(losses) <= NAMED
        else f"in the other {len(losses)} (Table 1)"
    )
    return f"OCH is ahead of the best baseline in {won} of {len(leads)} comparisons ({gains}); it is not {rest}."


def _winner(lead: Lead) -> str:
    verb = "draws" if lead.percent.mean == 0 else "wins"
    return f"{lead.rival.label} {verb} ({lead.theirs.mean:.4f}, OCH {lead.ours.mean:.4f})"


def verdicts(results: Results) -> list[str]:
    """Lines under Table 1: the lead per measure, and with half the bits."""
    lines = []
    for metric in METRICS:
        leads = [lead for lead in results.leads() if lead.metric == metric]
        parts = [f"{signed(lead.percent)} at {lead.bits} bits ({lead.rival.label}, {values(lead)})" for lead in leads]
        if parts:
            lines.append(f"{metric.name}: OCH against the best baseline: {', '.join(parts)}.")
    for metric in METRICS:
        parts = [
            f"OCH at {m.bits} against {m.rival.label} at {m.rival_bits} bits: {signed(m.percent)} ({values(m)})"
            for m in results.half_leads()
            if m.metric == metric
        ]
        if parts:
            lines.append(f"Half the bits, {metric.name}: {'; '.join(parts)}.")
    return lines


def winners(results: Results) -> list[str]:
    """Who else wins: a baseline, or something outside the baselines."""
    if not results.leads():
        return [headline(results)]
    losses = [f"{lead.metric.name} at {lead.bits} bits, {_winner(lead)}" for lead in lost(results)]
    first = (
        f"A baseline wins or draws: {'; '.join(losses)}."
        if losses
        else "No baseline wins or draws on any of these measures at any code length."
    )
    return [first, *([outside(results)] if outside(results) else [])]


def outside(results: Results) -> str:
    """What is ahead of OCH without being one of the baselines; empty if nothing is."""
    rivals = results.outdone_apart()
    parts = [
        f"{m.rival.label} on {m.metric.name} at {m.bits} bits ({m.theirs.mean:.4f}, OCH {m.ours.mean:.4f})"
        for m in rivals
    ]
    return f"Outside the baselines, ahead of OCH: {'; '.join(parts)}." if parts else ""


def protocol_lines(results: Results) -> list[tuple[str, str]]:
    """(name, value) of everything that the figures depend on."""
    p, m = results.protocol, results.machine
    share = 100 * p["truth_k"] / p["database"]
    return [
        ("Data", f"{p['rows']:,} rows of {p['dim']:,} dimensions, fingerprint {p['corpus']}"),
        ("Splits", f"{results.repeats} random, the same for all methods, seed {p['seed']}"),
        ("Rows of a split", f"{p['queries']:,} queries, {p['database']:,} in the database, {p['train_rows']:,} of them "
                            "for training"),
        ("Truth", f"the {p['truth_k']:,} nearest rows by Euclidean distance ({share:.3g} % of the database)"),
        ("Machine", f"{m['processor']}, {m['cores']} cores, Python {m['python']}"),
    ]  # fmt: skip


def caveats(results: Results) -> list[str]:
    """How to read the figures."""
    lines = [
        "mAP, precision@100 and recall@K are expectations over all orders of rows at equal distance; the PR area is "
        "pooled over all queries, without the largest distance.",
        "Training time is the CPU time of one thread; statistics are moments, sampling and, where a method needs "
        "centres, k-means.",
    ]
    if results.repeats > 1:
        lines.append(
            "± is the sample standard deviation over the splits; that of a lead is taken over differences on the same "
            "split."
        )
    else:
        lines.append("There is one split only, so no spread is known.")
    spherical = [c["rankings"]["spherical"]["queries"] for c in results.table_cells if "spherical" in c["rankings"]]
    if spherical and min(spherical) < results.protocol["queries"]:
        lines.append(
            f"SpH spherical ranks the same codes by SpH's own distance, over the first {min(spherical):,} queries; "
            "all others rank by Hamming distance."
        )
    return lines
