// The lower four pairs of bits of a word, each in a byte.
uint spread_pairs(uint word) {
    const uint halves = (word & 0xFu) | ((word & 0xF0u) << 12u);
    return (halves | (halves << 6u)) & 0x03030303u;
}
