"""Tests, by kind: unit, contract, property, multiprocess, fault, style."""
