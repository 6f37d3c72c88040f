"""`replicated-ckpt agent`: this node's agent in the foreground, for systemd, Slurm or a DaemonSet."""

from replicated_ckpt.agent.command import HELP, add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]
