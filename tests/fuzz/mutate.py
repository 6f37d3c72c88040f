"""Mutations of pickles: other frames, another memo, opcodes moved, and bytes changed."""

import contextlib
import pickletools
import struct
from random import Random

_FRAME, _MEMOIZE, _PUTS = b"\x95", b"\x94", (b"q", b"r")
_OPCODES = bytes(ord(info.code) for info in pickletools.opcodes)


def changed(raw: bytes, random: Random) -> bytes:
    """One to four mutations."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        raw = random.choice((framed, framed, memoized, shuffled, flipped, spliced))(raw, random)
    return raw


def opcodes(raw: bytes) -> list[bytes]:
    """Each opcode with its argument. The rest after an invalid opcode is one part."""
    starts = [0]
    with contextlib.suppress(ValueError, IndexError, struct.error):
        for _, _, position in pickletools.genops(raw):
            starts += [position] if position else []
    return [raw[start:end] for start, end in zip(starts, [*starts[1:], len(raw)], strict=True)]


def framed(raw: bytes, random: Random) -> bytes:
    """Adds frames that begin and end at opcodes or anywhere, with right or wrong sizes."""
    parts = [part for part in opcodes(raw) if part[:1] != _FRAME]
    begin = random.randrange(len(parts) + 1)
    end = random.randrange(begin, len(parts) + 1)
    inside = b"".join(parts[begin:end])
    size = len(inside) if random.random() < 0.6 else max(0, len(inside) + random.randrange(-6, 7))
    if random.random() < 0.3:
        inner = random.randrange(len(inside) + 1)
        inside = inside[:inner] + _FRAME + struct.pack("<Q", len(inside) - inner) + inside[inner:]
    return b"".join(parts[:begin]) + _FRAME + struct.pack("<Q", size) + inside + b"".join(parts[end:])


def memoized(raw: bytes, random: Random) -> bytes:
    """Replaces PUT by MEMOIZE and the reverse, with right or wrong indices."""
    parts, count = [], 0
    for part in opcodes(raw):
        if part[:1] == _MEMOIZE or part[:1] in _PUTS:
            index = count if random.random() < 0.97 else random.randrange(count + 3)
            short = b"q" + bytes([index]) if index < 256 and random.random() < 0.7 else b"r" + struct.pack("<I", index)
            parts.append(_MEMOIZE if random.random() < 0.5 else short)
            count += 1
        else:
            parts.append(part)
    return b"".join(parts)


def shuffled(raw: bytes, random: Random) -> bytes:
    """Repeats, removes or swaps an opcode, or adds a random one."""
    parts = opcodes(raw)
    at, other = random.randrange(len(parts)), random.randrange(len(parts))
    way = random.randrange(4)
    if way == 0:
        parts.insert(at, parts[other])
    elif way == 1:
        del parts[at]
    elif way == 2:
        parts[at], parts[other] = parts[other], parts[at]
    else:
        parts.insert(at, bytes([random.choice(_OPCODES)]) + random.randbytes(random.choice((0, 1, 4))))
    return b"".join(parts)


def flipped(raw: bytes, random: Random) -> bytes:
    """Changes one byte."""
    found = bytearray(raw or b"\0")
    found[random.randrange(len(found))] = random.choice((random.randrange(256), random.choice(_OPCODES), 0, 255))
    return bytes(found)


def spliced(raw: bytes, random: Random) -> bytes:
    """Moves or removes a piece."""
    start = random.randrange(len(raw) + 1)
    end = random.randrange(start, min(len(raw), start + 40) + 1)
    piece, rest = raw[start:end], raw[:start] + raw[end:]
    if random.random() < 0.4:
        return rest
    at = random.randrange(len(rest) + 1)
    return rest[:at] + piece + rest[at:]
