"""The mutants: each a textual patch of one file, and the rule that it breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` must occur exactly once in ``file`` (below ``syncline/protocol``)."""

    name: str
    breaks: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "boot-fence-dropped",
        "a fence of an earlier boot is void",
        "core.py",
        'pairs = (("job", self.job, fence.job), ("boot", self.boot, fence.boot))',
        'pairs = (("job", self.job, fence.job),)',
    ),
    Mutant(
        "epoch-fence-dropped",
        "a newer incarnation of the trainer fences the older one's writers",
        "membership.py",
        "    for member in list(group.slots.values()):\n        end(core, member, reason)\n",
        "",
    ),
    Mutant(
        "attempt-fence-dropped",
        "a superseded attempt changes nothing",
        "instance.py",
        "if attempt is None or attempt.number != number:",
        "if attempt is None:",
    ),
    Mutant(
        "write-before-all-are-bound",
        "no rank writes before every rank knows that it can take part",
        "steps.py",
        '    if absent:\n        return Waiting(f"ranks {absent} of instance {instance.name} to b',
        '    if len(absent) > 1:\n        return Waiting(f"ranks {absent} of instance {instance.name} to b',
    ),
    Mutant(
        "commit-before-verify",
        "every rank has verified before the commit",
        "instance.py",
        "        if absent:\n",
        "        if len(absent) == self.world:\n",
    ),
    Mutant(
        "commit-without-digests",
        "the writers' digests are there before the commit",
        "update.py",
        "    if not missing:\n        return\n",
        "    if missing is not None:\n        return\n",
    ),
    Mutant(
        "commit-from-revoked-pin",
        "a torn pull can never commit",
        "instance.py",
        "        if attempt.failure:\n            kind",
        "        if attempt.failure and not attempt.revoked:\n            kind",
    ),
    Mutant(
        "from-ignored",
        "the commit is a compare-and-set",
        "instance.py",
        "if from_ != self.committed:",
        "if from_ is not None and self.committed is None:",
    ),
    Mutant(
        "drain-skipped",
        "a window closes only when its readers are gone",
        "publish.py",
        "pins = [(one, holder) for one in affected for holder in one.pins]",
        "pins = []",
    ),
    Mutant(
        "drain-of-one-version-only",
        "live memory is one: older versions' readers read it too",
        "publish.py",
        'one.source == "live" and one.key <= request.key]',
        'one.source == "live" and one.key == request.key]',
    ),
    Mutant(
        "lease-by-heartbeat-only",
        "a pin is kept by bytes, not by a beating heart",
        "membership.py",
        "if request.progress > core.progress.get(member.number, 0):",
        "if request.progress >= 0:",
    ),
    Mutant(
        "stall-ignored",
        "a pin whose bytes do not move is revoked",
        "lease.py",
        "return min(self.until, self.moved + stall) if stalls else self.until",
        "return self.until",
    ),
    Mutant(
        "asking-keeps-a-pin",
        "waiting for digests excuses a rank once, and only while it waits",
        "publish.py",
        "            pin.answered, pin.moved = not pin.awaiting, core.now\n",
        "            pin.moved = core.now\n",
    ),
    Mutant(
        "pin-after-close",
        "a closed window takes no new pin",
        "version.py",
        "return self.state is VersionState.SEALED and not self.closed",
        "return self.state is VersionState.SEALED",
    ),
    Mutant(
        "retired-while-pinned",
        "a version retires when its last pin goes",
        "version.py",
        "or not self.closed or self.pins:",
        "or not self.closed:",
    ),
    Mutant(
        "sealed-with-a-missing-rank",
        "every rank has put before the seal",
        "version.py",
        "if self.state is not VersionState.OPEN or self.missing:",
        "if self.state is not VersionState.OPEN or len(self.missing) > 1:",
    ),
    Mutant(
        "order-by-number",
        "versions are ordered by epoch first",
        "update.py",
        "return committed is None or key > committed or",
        "return committed is None or key.number > committed.number or",
    ),
    Mutant(
        "number-used-twice",
        "numbers grow within an epoch",
        "publish.py",
        "if request.number < 0 or (request.number <= high and not (request.refill and core.restarted)):",
        "if request.number < 0:",
    ),
    Mutant(
        "dirty-forgotten",
        "DIRTY is written down before the first byte",
        "instance.py",
        '        if attempt.mode == "in_place":\n            self.dirty = True\n',
        "",
    ),
    Mutant(
        "newcomer-taken-for-clean",
        "a process with unknown weights makes its instance DIRTY",
        "instance.py",
        "if present - {self.committed}:",
        "if len(present) > 1 and not self.slots:",
    ),
    Mutant(
        "resume-before-all-acks",
        "an instance serves when every rank has acknowledged",
        "instance.py",
        "        if self.applying:\n            return False\n        self.dirty = False\n",
        "        self.applying.clear()\n        self.dirty = False\n",
    ),
    Mutant(
        "successor-acks-for-the-dead",
        "a rank that died while applying leaves its instance DIRTY",
        "instance.py",
        "        self.applying.clear()  # what the others apply from now on does not make the instance whole\n",  # noqa: E501 - as it stands there
        "",
    ),
    Mutant(
        "verified-without-bytes",
        "a rank has received every planned byte",
        "update.py",
        "if request.nbytes != request.planned:",
        "if request.nbytes > request.planned:",
    ),
    Mutant(
        "pins-of-the-dead",
        "a dead reader's pins drop",
        "membership.py",
        "            version.release(*holder)\n",
        "            version.pins[holder].until += 1e9\n",
    ),
    Mutant(
        "no-deadline-on-deferred",
        "every wait ends by its deadline and names whom it waited for",
        "job.py",
        "                if core.now < wait.until:\n                    return False\n",
        "                if core.now >= wait.since:\n                    return False\n",
    ),
    Mutant(
        "waiting-counts-as-living",
        "a lease is renewed by requests, not by waiting",
        "job.py",
        "            answer = _examine(core, wait, member)\n            if isinstance",
        "            core.leases.renew(wait.member or 0, core.now)\n"
        "            answer = _examine(core, wait, member)\n            if isinstance",
    ),
    Mutant(
        "restart-without-waiting",
        "a restarted server waits for the writers of the newest epoch",
        "job.py",
        "if table.recovering and core.recovery_left <= 0:",
        "if table.recovering:",
    ),
    Mutant(
        "claims-ignored",
        "what a reader committed bounds the newest epoch from below",
        "membership.py",
        "    raise_epoch(core, table, key.epoch)\n",
        "",
    ),
)
