// The lower four bits of a word, each in a byte.
uint spread_bits(uint word) { return ((word & 0xFu) * 0x00204081u) & 0x01010101u; }
