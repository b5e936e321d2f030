// What kernels on matrix units (VK_KHR_cooperative_matrix) share: barriers, and units of numbers that become f16.
// Needs: nothing in scope.
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require

// Barriers that make what was written to shared memory visible: in Vulkan's memory model, which cooperative matrices need, they
// do so only if asked, and tools/compile_shaders.py keeps single accesses from it.
const int SHARING = gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible;
void share() { controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsShared, SHARING); }
void share_in_subgroup() { controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared, SHARING); }

// The power of two that brings a number to 16 or more, below 32. Exponents of it and its inverse stay those of normal numbers.
float unit_of(float peak) { return uintBitsToFloat((max(floatBitsToUint(peak) >> 23u, 5u) - 4u) << 23u); }

float inverse_of(float unit) { return uintBitsToFloat(0x7F000000u - floatBitsToUint(unit)); }

float peak_of(vec4 numbers) {
    const vec4 sizes = abs(numbers);
    return max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
}

uint two_halves(vec2 numbers) { return packFloat2x16(f16vec2(numbers)); }

// Eight numbers, 16 bytes.
uvec4 slice_of(vec4 first, vec4 last, float inverse) {
    first *= inverse;
    last *= inverse;
    return uvec4(two_halves(first.xy), two_halves(first.zw), two_halves(last.xy), two_halves(last.zw));
}
