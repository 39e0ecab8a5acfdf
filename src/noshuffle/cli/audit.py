"""`noshuffle audit`: a second opinion on a plan or a run, from what is emitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.cli.words import say
from noshuffle.errors import InvalidInput, whole

if TYPE_CHECKING:
    from noshuffle.auditing.answers import Finding
    from noshuffle.plan import Plan


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What `noshuffle audit` can be asked."""

    target: Path | None = argument(
        "a plan.json or a run folder; with --train it may be left out", None
    )
    train: bool = setting(False, "train with canaries, and measure what attackers see", "--train")
    canaries: int = setting(40_000, "with --train: how many canaries")
    examples: int = setting(1, "with --train: examples of one canary in a step (user level)")
    data: str = setting("digits", "with --train: data set by name")
    page: Path | None = setting(None, "write the pictures to this page (audit.html)")
    save: bool = setting(
        False, "keep audit.json and audit.html in the run folder; its report shows them", "--save"
    )
    most_steps: int | None = setting(None, "steps that are looked at, from the first on (1024)")

    def __post_init__(self) -> None:
        whole(canaries=self.canaries, examples=self.examples)
        if self.most_steps is not None:
            whole(most_steps=self.most_steps)
        if self.target is None and not self.train:
            raise InvalidInput("give a plan.json or a run folder, or --train")
        if self.page is not None and not self.page.parent.is_dir():
            raise InvalidInput(f"--page needs an existing folder, got {str(self.page.parent)!r}")
        if self.save and not self.is_folder:
            raise InvalidInput(f"--save needs a run folder, got {str(self.target)!r}")
        if self.save and self.target is not None and (self.target / "signature.json").exists():
            raise InvalidInput(f"{self.target} is signed as it is; use --page FILE elsewhere")

    @property
    def is_folder(self) -> bool:
        return self.target is not None and (self.target / "plan.json").is_file()

    @property
    def name(self) -> str:
        return "a training run with canaries" if self.target is None else self.target.resolve().name

    def plan(self) -> Plan:
        """The plan that is audited; without a target, four passes of 64 steps at ε = 8."""
        from noshuffle.participation import Epochs
        from noshuffle.plan import Plan

        if self.target is None:
            unit = "user" if self.examples > 1 else "example"
            return Plan.fit(Epochs(4, 64), mechanism="blt", epsilon=8.0, unit=unit)
        path = self.target / "plan.json" if self.target.is_dir() else self.target
        if not path.is_file():
            raise InvalidInput(f"{path} is not there; give a plan.json or a run folder")
        return Plan.from_json(path.read_text(encoding="utf8"))


@takes(AuditSettings, Output)
def audit(asked: AuditSettings, output: Output) -> int:
    """Check a guarantee without the formulas that made it.

    The noise stream of training is driven with unit draws; ε of every stopping point comes from the
    covariance of its rows. --train adds a real training run with canaries. HOLDS (exit status 0):
    the stated ε covers all that was found. REFUTED (1): an attack exceeds it. NOT DECIDED (3):
    neither was shown; what was left out is named. The ε of secret draws is not decided.
    """
    from noshuffle.auditing.answers import EXIT_CODES, record_of

    findings = _findings(asked, is_quiet=output.json)
    record = record_of(findings)
    for path in _written(asked, record):
        if not output.json:
            print(f"page: {path}")
    if output.json:
        print_json(record)
    else:
        say("\n\n".join(finding.words() for finding in findings))
    return EXIT_CODES[str(record["answer"])]


def _findings(asked: AuditSettings, *, is_quiet: bool) -> list[Finding]:
    from noshuffle.auditing.prefixes import audit_plan
    from noshuffle.auditing.run_folder import audit_run

    plan = asked.plan()
    findings: list[Finding] = []
    if asked.is_folder and asked.target is not None:
        findings.append(audit_run(asked.target, most_steps=asked.most_steps))
    else:
        findings.append(audit_plan(plan, most_steps=asked.most_steps))
    return findings + _trained(asked, plan, is_quiet=is_quiet) if asked.train else findings


def _trained(asked: AuditSettings, plan: Plan, *, is_quiet: bool) -> list[Finding]:
    import torch
    from rich.progress import Progress

    from noshuffle.auditing.training_run import audit_training
    from noshuffle.datasets import load
    from noshuffle.training.models import build, default_for

    data = load(asked.data)
    if data.y_train.is_floating_point():
        raise InvalidInput("audit --train takes data with classes; give --data digits, or such")
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    model = build(default_for(data.kind, data.shape), data.shape, data.classes)
    with Progress(disable=is_quiet, transient=True) as bar:
        task = bar.add_task("training with canaries", total=plan.steps)
        return audit_training(
            plan,
            model,
            x,
            y,
            canaries=asked.canaries,
            examples=asked.examples,
            progress=lambda done: bar.update(task, completed=done),
        )


def _written(asked: AuditSettings, record: dict[str, Any]) -> list[Path]:
    """Write the pages that were asked for."""
    from noshuffle.release.files import write_json
    from noshuffle.report import write_report
    from noshuffle.report.html import write_audit

    title, pages = f"Audit of {asked.name}", []
    if asked.page is not None:
        write_audit(record, asked.page, title=title)
        pages.append(asked.page)
    if asked.save and asked.target is not None:
        write_json(asked.target / "audit.json", record)
        write_audit(record, asked.target / "audit.html", title=title)
        if (asked.target / "report.html").is_file():
            write_report(asked.target)
        pages.append(asked.target / "audit.html")
    return pages
