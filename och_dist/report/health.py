"""What 'och doctor' found, as lines: verdict, what, found; below it what to change."""

from __future__ import annotations

from och_dist.stage import Report


def render_health(report: Report) -> str:
    """One line per check, and a sentence at the end."""
    checks = report.facts["checks"]
    width = max(len(check["what"]) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"  {check['verdict']:<4}  {check['what']:<{width}}  {check['found']}")
        if check["change"]:
            lines.append(f"  {'':<4}  {'':<{width}}  -> {check['change']}")
    bad = sum(check["verdict"] == "bad" for check in checks)
    end = "all is fit for a job" if not bad else f"{bad} of {len(checks)} checks failed; change what is said there"
    return "\n".join([f"doctor: {end}", *lines])
