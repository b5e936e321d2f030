// Stores through 64-bit addresses, for places to land in or to be brought to, and nothing else: an address that may be a home
// is never stored to (host memory is slow to write, and homes are what everything is compared with).
// Needs: address.glsl.
#ifdef LOAD_64BIT
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer StoredWords4 { u64vec2 halves; };

void store_words4(uvec2 landing, uvec4 words) {
    StoredWords4(landing).halves = u64vec2(packUint2x32(words.xy), packUint2x32(words.zw));
}
#else
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer StoredWords4 { uvec4 words; };

void store_words4(uvec2 landing, uvec4 words) { StoredWords4(landing).words = words; }
#endif
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer StoredWord { uint word; };

void store_word(uvec2 landing, uint word) { StoredWord(landing).word = word; }

#ifdef INT64
void store_words4(Address landing, uvec4 words) { StoredWords4(landing).words = words; }
void store_word(Address landing, uint word) { StoredWord(landing).word = word; }
#endif
