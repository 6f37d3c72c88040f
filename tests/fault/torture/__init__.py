"""Runs random schedules of saves, loads and faults on a cluster. Each schedule follows from a seed, and an oracle
checks it.
"""
