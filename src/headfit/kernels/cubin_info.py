"""What a compiled kernel takes, read off the cubin itself: an ELF file whose ``.nv.info`` sections list attributes.

Belongs here: parsing. Does not belong here: loading (``cubin.py``), compiling (``hopper_build.py``). The attribute
numbers are those that ``cuobjdump -elf`` prints names for (EIATTR_*); the tests compare the two.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

KPARAM_INFO: Final = 0x17  # index, ordinal, offset, size << 18
REQNTID: Final = 0x10  # threads a CTA has to have, in three dimensions
FRAME_SIZE: Final = 0x11  # symbol, bytes of stack
REGCOUNT: Final = 0x2F  # symbol, registers a thread
VALUE: Final = 4  # the format of an attribute that is followed by a size and a value; the others are 4 bytes in all
HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION: Final = struct.Struct("<IIQQQQIIQQ")
NOBITS: Final = 8


@dataclass(frozen=True)
class CubinInfo:
    """One kernel of a cubin. ``stack`` above 0 means that registers are spilled, or an array is indexed at run time.

    ``parameters``: (offset, size) in bytes of each, in order. ``threads`` 0: any number. ``shared``: static bytes.
    """

    symbol: str
    registers: int
    stack: int
    shared: int
    threads: int
    parameters: tuple[tuple[int, int], ...]


def read(image: bytes) -> CubinInfo:
    """The facts of the one kernel in ``image``.

    Raises:
        ValueError: it is no cubin, or holds another number of kernels than one.
    """
    try:
        sections = dict(_sections(image))
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"image: {len(image)} bytes that are no cubin: {error}") from None
    kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(kernels) != 1:
        raise ValueError(f"image: holds {len(kernels)} kernels {kernels}, need one")
    (symbol,) = kernels
    whole = dict(_attributes(sections.get(".nv.info", (b"", 0))[0]))
    own = list(_attributes(sections.get(f".nv.info.{symbol}", (b"", 0))[0]))
    if REGCOUNT not in whole:
        raise ValueError(f"image: kernel {symbol} has no register count")
    parameters = {}
    threads = 0
    for attribute, value in own:
        if attribute == KPARAM_INFO:
            _, ordinal, offset, bits = struct.unpack("<IHHI", value)
            parameters[ordinal] = (offset, bits >> 18)
        if attribute == REQNTID:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
    return CubinInfo(
        symbol,
        struct.unpack("<II", whole[REGCOUNT])[1],
        struct.unpack("<II", whole.get(FRAME_SIZE, bytes(8)))[1],
        sections.get(f".nv.shared.{symbol}", (b"", 0))[1],
        threads,
        tuple(parameters[i] for i in sorted(parameters)),
    )


def _sections(image: bytes) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """(name, (bytes, size)) of every section; those that take no room in the file have no bytes."""
    ident, *_, start, _, _, _, _, size, count, names = HEADER.unpack_from(image)
    if ident[:5] != b"\x7fELF\x02" or size != SECTION.size:
        raise ValueError("not an ELF file of 64 bits")
    headers = [SECTION.unpack_from(image, start + i * size) for i in range(count)]
    table = headers[names]
    text = image[table[4] : table[4] + table[5]]
    for header in headers:
        name = text[header[0] : text.index(b"\0", header[0])].decode()
        kind, offset, length = header[1], header[4], header[5]
        yield name, (b"" if kind == NOBITS else image[offset : offset + length], length)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of a ``.nv.info`` section."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == VALUE:
            yield attribute, data[at : at + size]
            at += size
