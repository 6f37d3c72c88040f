"""Rules for names of entries: selection, renaming, and their place in the nested state dict."""

from dataclasses import replace

import pytest

from replicated_ckpt.core.key_rules import KeyRules, Path, nest, rename_path
from replicated_ckpt.errors import ConfigInvalid

KEYS = ["model.h.0.w", "model.h.1.w", "model.norm", "optim.h.0.w", "step", ""]


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        (KeyRules(), {key: key for key in KEYS}),
        (
            KeyRules(include=["model.*"], exclude=["*.norm"]),
            {"model.h.0.w": "model.h.0.w", "model.h.1.w": "model.h.1.w"},
        ),
        (KeyRules(include=["step", "model.norm"]), {"model.norm": "model.norm", "step": "step"}),
        (KeyRules(include=["model.norm", "step"], strip_prefix="model."), {"model.norm": "norm", "step": "step"}),
        (
            KeyRules(
                include=["model.h.*"], strip_prefix="model.", rename=[(r"^h\.(\d+)", r"layers.\1"), ("w$", "weight")]
            ),
            {"model.h.0.w": "layers.0.weight", "model.h.1.w": "layers.1.weight"},
        ),
        (KeyRules(include=["step"], add_prefix="train."), {"step": "train.step"}),
        (KeyRules(include=[""]), {"": ""}),
    ],
)
def test_rules_choose_and_rename(rules: KeyRules, wanted: dict[str, str]) -> None:
    """Globs apply first, then the prefix, then each expression in order."""
    assert rules.new_names(KEYS) == wanted


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (KeyRules(include=["modle.*"]), "glob 'modle"),
        (KeyRules(strip_prefix="module."), "prefix 'module."),
        (KeyRules(rename=[("^decoder", "x")]), "'\\^decoder'"),
        (KeyRules(rename=[("(", "x")]), "is not a valid renaming"),
        (KeyRules(rename=[("h", r"\1")]), "is not a valid renaming"),
        (KeyRules(exclude=["*"]), "No key is left"),
        (KeyRules(rename=[(r"h\.\d", "h")]), "would become 'model.h.w'"),
        (KeyRules(include=["step"], strip_prefix="step"), "no name left"),
    ],
)
def test_a_rule_without_effect_is_refused(rules: KeyRules, said: str) -> None:
    """A rule that matches no key, is invalid, or leaves no name is refused, as after a typo."""
    with pytest.raises(ConfigInvalid, match=said):
        rules.new_names(KEYS)


def test_the_hint_resolves_colliding_names() -> None:
    """If a stripped prefix makes two names equal, renaming cannot help. The hint is to exclude one, which works."""
    keys, rules = ["model.w", "w"], KeyRules(strip_prefix="model.")
    with pytest.raises(ConfigInvalid, match=r"Both 'model\.w' and 'w' would become 'w'") as refused:
        rules.new_names(keys)
    assert "Exclude one of them" in refused.value.hint
    with pytest.raises(ConfigInvalid, match="would become 'v'"):
        replace(rules, rename=[("^w$", "v")]).new_names(keys)
    assert replace(rules, exclude=["w"]).new_names(keys) == {"model.w": "w"}


@pytest.mark.parametrize(
    ("path", "name", "wanted"),
    [
        (("model", "h.0.w"), "model.h.0.w", ("model", "h.0.w")),
        (("model", "h.0.w"), "h.0.w", ("h.0.w",)),
        (("model", "h.0.w"), "net.h.0.w", ("net", "h.0.w")),
        (("model", "h.0.w"), "model.layers.0.w", ("model", "layers.0.w")),
        (("h.0.w",), "model.h.0.w", ("model", "h.0.w")),
        (("opt", "groups", 0, "lr"), "optim.groups.0.lr", ("optim", "groups", 0, "lr")),
        (("opt", "groups", 0, "lr"), "opt.groups.0.rate", ("opt", "groups", 0, "rate")),
        (("opt", "groups", 0, "lr"), "rate", ("rate",)),
        (("layers", 0, "w"), "0.w", ("0", "w")),
    ],
)
def test_levels_that_keep_their_names_stay(path: Path, name: str, wanted: Path) -> None:
    """Only the renamed part of a path becomes a new level."""
    assert rename_path(path, name) == wanted


def test_nesting_is_rebuilt() -> None:
    """String keys become dictionaries and numbers lists. A value inside another value is refused."""
    assert nest({("a", "b"): 1, ("c", 1): 2, ("c", 0, "d"): 3}) == {"a": {"b": 1}, "c": [{"d": 3}, 2]}
    conflicts: list[list[Path]] = [[("a",), ("a", "b")], [("a", "b"), ("a",)], [("a", 0), ("a", "b")]]
    for paths in conflicts:
        with pytest.raises(ConfigInvalid, match="inside or replace another"):
            nest(dict.fromkeys(paths, 7))
