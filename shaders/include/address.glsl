// 64-bit buffer addresses. Buffers and push constants hold them as uvec2 (x = low word, y = high word), and so does an
// Address, so that shaderInt64 is not needed. INT64 makes it a uint64_t: GPUs that load from a base of all lanes plus 32 bits
// of each lane then see that form, and add nothing by hand.
// Needs: nothing in scope. Include it before any other code.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_control_flow_attributes : require

#if defined(LOAD_64BIT) || defined(INT64)
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif

// One 16-byte and one 8-byte load. The address must be a multiple of that. CPU drivers pay per lane and component whatever its
// width, so LOAD_64BIT takes 64-bit components (needs shaderInt64).
#ifdef LOAD_64BIT
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Words4 { u64vec2 halves; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Words2 { uint64_t both; };
#else
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Words4 { uvec4 words; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Words2 { uvec2 words; };
#endif
// One 4-byte load. The address must be a multiple of 4.
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Word { uint word; };
// One 8-byte load (an address in a table). The address must be a multiple of 8.
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer AddressEntry { uvec2 address; };

// base + bytes with carry into the high word.
uvec2 address_add(uvec2 base, uint bytes) {
    uint carry;
    const uint low = uaddCarry(base.x, bytes, carry);
    return uvec2(low, base.y + carry);
}

// base + count * stride, where the product may exceed 32 bits.
uvec2 address_add_product(uvec2 base, uint count, uint stride) {
    uint high, low, carry;
    umulExtended(count, stride, high, low);
    const uint sum = uaddCarry(base.x, low, carry);
    return uvec2(sum, base.y + high + carry);
}

#ifdef LOAD_64BIT
uvec4 load_words4(uvec2 address) {
    const u64vec2 halves = Words4(address).halves;
    return uvec4(unpackUint2x32(halves.x), unpackUint2x32(halves.y));
}
uvec2 load_words2(uvec2 address) { return unpackUint2x32(Words2(address).both); }
#else
uvec4 load_words4(uvec2 address) { return Words4(address).words; }
uvec2 load_words2(uvec2 address) { return Words2(address).words; }
#endif
// Four words of a bound buffer, loaded as 16 bytes by address are.
#ifdef LOAD_64BIT
#define Words4Bound u64vec2
vec4 bound_vec4(u64vec2 halves) { return uintBitsToFloat(uvec4(unpackUint2x32(halves.x), unpackUint2x32(halves.y))); }
#else
#define Words4Bound vec4
vec4 bound_vec4(vec4 words) { return words; }
#endif
vec4 load_vec4(uvec2 address) { return uintBitsToFloat(load_words4(address)); }
uint load_word(uvec2 address) { return Word(address).word; }
float load_float(uvec2 address) { return uintBitsToFloat(Word(address).word); }
bool is_null(uvec2 address) { return (address.x | address.y) == 0u; }

#ifdef INT64
#define Address uint64_t
Address to_address(uvec2 words) { return packUint2x32(words); }
Address address_add(Address base, uint bytes) { return base + bytes; }
Address address_add_product(Address base, uint count, uint stride) { return base + uint64_t(count) * stride; }
uvec4 load_words4(Address address) { return Words4(address).words; }
uint load_word(Address address) { return Word(address).word; }
bool is_null(Address address) { return address == 0ul; }
#else
#define Address uvec2
Address to_address(uvec2 words) { return words; }
#endif
