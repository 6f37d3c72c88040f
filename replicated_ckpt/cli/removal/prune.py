"""`replicated-ckpt prune --keep-last N`: removes the older checkpoints of each run, by the same rules as retention."""

import argparse
import json
from dataclasses import asdict

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.given_root import open_store
from replicated_ckpt.cli.removal.remover import Removed, Remover, add_removal_arguments
from replicated_ckpt.config import Retention
from replicated_ckpt.core.upkeep.retention import plan_prune
from replicated_ckpt.wording import plural

HELP = (
    "Remove all but the newest checkpoints of each run from this node, from each node whose agent has the same key file, "
    "and from the bucket once no node has them. Without a common key file, run it on every node. Checkpoints that the "
    "job's own keep_every, keep_period and keep_best select are kept, too. If the job has a policy for a bucket, prune "
    "leaves that bucket alone, unless --object-store names it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-last",
        type=_number,
        required=True,
        metavar="N",
        help="how many complete checkpoints to keep, at least 1",
    )
    parser.add_argument(
        "--keep-every",
        type=_number,
        metavar="N",
        help="also keep each N-th save of a run",
    )
    parser.add_argument(
        "--keep-period",
        type=_number,
        metavar="N",
        help="also keep steps that are multiples of N: of step-2000 the step is 2000",
    )
    add_removal_arguments(parser)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {text!r}; `rm ID` removes one checkpoint")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if all chosen checkpoints were removed everywhere. FAILED if a removal was refused, or copies are left.

    UNREACHABLE if nodes that may have copies did not answer.
    """
    retention = Retention(
        keep_last=arguments.keep_last, keep_every=arguments.keep_every, keep_period=arguments.keep_period
    )
    remover = Remover.look(open_store(arguments.root), arguments)
    remover.leaves_to_policies = True
    # Clusters may share a prefix: runs of which no node here has a save may be another cluster's.
    others = set() if arguments.force else remover.find_others()
    removables = [one for one in remover.list_removable() if one.candidate.save_id not in others]
    verdicts = plan_prune(removables, retention, remover.wanted_by)
    going = {(verdict.checkpoint_id, verdict.save_id) for verdict in verdicts if not verdict.is_kept}
    chosen = [row for row in remover.rows if (row.checkpoint_id, row.save_id) in going]
    if not arguments.json:
        for line in (*map(str, verdicts), *remover.seen.describe_unreached()):
            print(line)
        if others:
            print(f"left alone: {plural(len(others), 'save')} of runs that only the bucket has")
    outcome = Removed() if arguments.dry_run else remover.carry_out(chosen)
    if arguments.json:
        plan = [
            {"checkpoint_id": verdict.checkpoint_id, "save_id": verdict.save_id, "is_kept": verdict.is_kept}
            for verdict in verdicts
        ]
        print(json.dumps({"plan": plan, "dry_run": arguments.dry_run, **asdict(outcome)}, indent=2))
    elif not going:
        print("nothing to remove")
    elif arguments.dry_run:
        for line in remover.describe_reach(chosen):
            print(line)
    else:
        print("\n".join(remover.describe(outcome)))
    return ExitCode.OK if arguments.dry_run else outcome.code
