"""A corpus-driven mutator: bytes that were right once, changed as disks, networks and strangers change them."""

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)


def mutated(data, rng, corpus=()):
    """Up to four changes: bits, numbers, blocks that are lost, doubled, zeroed or taken from elsewhere, and cuts.

    Half of the changes are within the first kilobyte, where headers are.
    """
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        end = len(found) if rng.random() < 0.5 else min(len(found), 1024)
        place = rng.randrange(end) if end else 0
        size = min(rng.choice((1, 4, 16, 256, 4096)), max(len(found) - place, 1))
        kind = rng.randrange(8)
        if kind == 0 and found:
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and found:
            found[place] = rng.randrange(256)
        elif kind == 2:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(INTERESTING) % (1 << 8 * width)
            found[place : place + width] = value.to_bytes(width, rng.choice(("little", "big")))
        elif kind == 3:
            del found[place : place + size]
        elif kind == 4:
            found[place:place] = found[place : place + size]
        elif kind == 5:
            found[place : place + size] = bytes(size)
        elif kind == 6:
            other = rng.choice(corpus) if corpus else data
            start = rng.randrange(len(other)) if other else 0
            found[place : place + size] = other[start : start + size]
        else:
            del found[place:]
    return bytes(found)
