// The code book that IQ4_NL and IQ4_XS share: the polynomial that passes each value within 0.443 (at 0.5 it would be rounded
// to another), found by minimising the most. CPUs evaluate it, as they gather slowly; GPUs look up what it gave. Their table
// is in shared memory, where 16 words lie in as many banks: constant arrays that lanes index are memory on all of them.

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 for the bytes 0..15 of a word.
precise vec4 iq4_rounded(uint word) {
    const vec4 n = bytes_to_vec4(word);
    vec4 value = fma(n, vec4(0.0016), vec4(0.0309));
    value = fma(n, value, vec4(-1.373));
    value = fma(n, value, vec4(24.19));
    return roundEven(fma(n, value, vec4(-126.58)));
}

#ifdef SHARED_CODE_BOOK
#define HAS_CODE_BOOK
shared float code_book[16];

void fill_code_book() {
    for (uint i = gl_LocalInvocationIndex; i < 16u; i += gl_WorkGroupSize.x) code_book[i] = iq4_rounded(i).x;
    barrier();
}

// Whole bytes, though codes have four bits: some GPUs take a byte of a word as an operand.
vec4 iq4_values(uint word) {
    return vec4(code_book[word & 0xFFu], code_book[(word >> 8u) & 0xFFu], code_book[(word >> 16u) & 0xFFu], code_book[word >> 24u]);
}
#else
vec4 iq4_values(uint word) { return iq4_rounded(word); }
#endif
