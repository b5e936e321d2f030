// What 4 bytes of a KV cache hold: two dims of a row with KV_F16, one without.
// Needs: address.glsl.
#include "half.glsl"

layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer CacheWord { uint word; };

#ifdef KV_F16
const uint WORD_DIMS = 2u;
uint encode(const float values[WORD_DIMS]) { return pack_half2(values[0], values[1]); }
#else
const uint WORD_DIMS = 1u;
uint encode(const float values[WORD_DIMS]) { return floatBitsToUint(values[0]); }
#endif
