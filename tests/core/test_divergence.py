"""Divergence of replicas: comparing reports and naming differences, without processes."""

import json
from dataclasses import replace

import pytest

from replicated_ckpt.core.divergence import (
    DIVERGENCES_MAX,
    Divergence,
    describe_divergences,
    find_differing,
    pack_units,
    without_allowed,
)
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.errors import ManifestInvalid
from tests.core.formats.test_manifest import manifest

ONE = Divergence("layer.weight", (8, 0), 0, False, 1, ((1, 2), (0,), (3,)))


def test_units_with_several_values_are_found_with_the_ranks_of_each() -> None:
    """Units with different values are returned with the ranks of each value. A unit of a single rank is not compared."""
    reports = {0: pack_units({1: 5, 2: 6}), 1: pack_units({2: 6, 1: 5}), 2: pack_units({2: 7, 9: 1}), 3: b""}
    assert reports[0] == reports[1]
    assert find_differing(reports) == {2: ((0, 1), (2,))}
    assert find_differing({}) == {}


def test_a_report_of_another_length_is_refused() -> None:
    """A report of an invalid length is refused."""
    with pytest.raises(ValueError, match="has 13 bytes"):
        find_differing({0: pack_units({1: 5}) + b"x"})


def test_a_finding_names_place_and_ranks() -> None:
    """A finding names the rank whose bytes are saved, those that agree with it, and the others."""
    said = ONE.describe({0: "a", 1: "a", 2: "b", 3: "b"})
    assert said == (
        "layer.weight at (8, 0): saved from rank 1 on a; the same bytes on rank 2 on b; "
        "other bytes on rank 0 on a, rank 3 on b"
    )
    assert describe_divergences([ONE] * 6, {}).endswith("| and 2 more values")


def test_allowed_names_are_patterns() -> None:
    """Allowed names are fnmatch patterns of the whole name."""
    assert without_allowed([ONE], ["layer"]) == [ONE]
    assert without_allowed([ONE], ["other", "layer.*"]) == []


def test_the_manifest_keeps_findings() -> None:
    """The manifest has at most `DIVERGENCES_MAX` findings, and an invalid one is refused."""
    kept = replace(manifest(), divergences=(ONE,))
    assert decode_manifest(kept.encode(), "here") == kept
    many = replace(manifest(), divergences=(ONE,) * 100)
    assert len(decode_manifest(many.encode(), "here").divergences) == DIVERGENCES_MAX
    head, body = kept.encode().decode().split("\n", 1)
    forged = body.replace('"groups":[[1,2],[0],[3]]', '"groups":[[1,2]]')
    assert forged != body
    text = forged.removeprefix('"manifest":').rstrip("\n").removesuffix("}")
    with pytest.raises(ManifestInvalid, match="not a divergence"):
        decode_manifest(f'{{"crc32c":{crc32c(text.encode())},\n{forged}'.encode(), "here")
    assert json.loads(head + body)["manifest"]["divergences"][0]["fqn"] == "layer.weight"
