"""`noshuffle audit`: a second opinion on a plan or a run, from what is emitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.errors import InvalidInput, whole

if TYPE_CHECKING:
    from noshuffle.auditing.answers import Finding
    from noshuffle.plan import Plan


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What `noshuffle audit` can be asked."""

    target: Path = argument("a plan.json, or a run folder")
    page: Path | None = setting(None, "write the pictures to this page (audit.html)")
    save: bool = setting(
        False, "keep audit.json and audit.html in the run folder; its report shows them", "--save"
    )
    most_steps: int = setting(1024, "stopping points that are looked at, from the first step on")

    def __post_init__(self) -> None:
        whole(most_steps=self.most_steps)
        if self.page is not None and not self.page.parent.is_dir():
            raise InvalidInput(f"--page needs an existing folder, got {str(self.page.parent)!r}")

        if self.save and not (self.target / "plan.json").is_file():
            raise InvalidInput(f"--save needs a run folder, got {str(self.target)!r}")
        if self.save and (self.target / "signature.json").exists():
            raise InvalidInput(f"{self.target} is signed as it is; use --page FILE elsewhere")

    def plan(self) -> Plan:
        """The plan that is audited."""
        from noshuffle.plan import Plan

        path = self.target / "plan.json" if self.target.is_dir() else self.target
        if not path.is_file():
            raise InvalidInput(f"{path} is not there; give a plan.json or a run folder")
        return Plan.from_json(path.read_text(encoding="utf8"))


@takes(AuditSettings, Output)
def audit(asked: AuditSettings, output: Output) -> int:
    """Check a guarantee without the formulas that made it.

    The noise stream of training is driven with unit draws; ε of every stopping point comes from the
    covariance of its rows, and noise that leaves by the door is compared with it. HOLDS (exit
    status 0): the stated ε covers it everywhere. REFUTED (1): an attack exceeds it. NOT DECIDED
    (3): neither was shown; what was left out is named.
    """
    from noshuffle.auditing.answers import EXIT_CODES, record_of
    from noshuffle.auditing.covariance import audit_noise, released_noise
    from noshuffle.auditing.prefixes import audit_plan

    plan = asked.plan()
    findings: list[Finding] = [audit_plan(plan, most_steps=asked.most_steps)]
    if plan.noise_multiplier and not plan.participation.is_sampled:
        steps = min(plan.steps, asked.most_steps, 256)
        noise = released_noise(plan, coordinates=max(4096, 16 * steps), steps=steps)
        findings.append(audit_noise(noise, plan))
    record = record_of(findings)
    for path in _written(asked, record):
        if not output.json:
            print(f"page: {path}")
    if output.json:
        print_json(record)
    else:
        print("\n\n".join(finding.words() for finding in findings))
    return EXIT_CODES[str(record["answer"])]


def _written(asked: AuditSettings, record: dict[str, Any]) -> list[Path]:
    """Write the pages that were asked for; the ledger of a run learns of those in its folder."""
    from noshuffle.cli.evidence import note_page
    from noshuffle.release.files import write_json
    from noshuffle.release.folder import RunFolder
    from noshuffle.report import write_report
    from noshuffle.report.html import write_audit

    title, pages = f"Audit of {asked.target.resolve().name}", []
    if asked.page is not None:
        write_audit(record, asked.page, title=title)
        pages.append(asked.page)
    if asked.save:
        write_json(asked.target / "audit.json", record)
        write_audit(record, asked.target / "audit.html", title=title)
        files = [asked.target / "audit.json", asked.target / "audit.html"]
        if (asked.target / "report.html").is_file():
            files.append(write_report(asked.target))
        for file in files:
            note_page(RunFolder(asked.target), file)
        pages.append(asked.target / "audit.html")
    return pages
