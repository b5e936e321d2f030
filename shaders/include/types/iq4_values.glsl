// The code book that IQ4_NL and IQ4_XS share. Tables that lanes index spill on some GPUs and are gathered on CPUs; this is
// the polynomial that passes each value within 0.443 (at 0.5 it would be rounded to another), found by minimising the most.

// -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 for the bytes 0..15 of a word.
precise vec4 iq4_values(uint word) {
    const vec4 n = bytes_to_vec4(word);
    vec4 value = fma(n, vec4(0.0016), vec4(0.0309));
    value = fma(n, value, vec4(-1.373));
    value = fma(n, value, vec4(24.19));
    return roundEven(fma(n, value, vec4(-126.58)));
}
