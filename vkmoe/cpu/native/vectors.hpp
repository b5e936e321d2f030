// Loops over vectors of floats, compiled for what the processor has. Sums have a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vkmoe {

/// sum += factor * values.
void add_scaled(float* sum, float factor, const float* values, size_t n);

/// found = factor * values; both may be the same.
void fade(const float* values, float factor, size_t n, float* found);

/// values *= the logistic function of gates, and of `is_silu` the gates themselves.
void gate(float* values, const float* gates, size_t n, bool is_silu);

/// found = factor * bytes: the numbers of a block that share a scale.
void scale_quants(const int8_t* bytes, float factor, size_t n, float* found);

/// found = factor * quant + offset: the numbers of a block of 4-bit quants, or of 5 bits where it has
/// `fifth_bits`. Of 8 quants in a row, byte i has quant i and, above it, quant 4 + i; the fifth bit
/// of quant 8u + 4h + i is bit 2u + h of byte i.
void scale_nibbles(const uint8_t* packed, const uint8_t* fifth_bits, float factor, float offset,
                   size_t n, float* found);

/// The product of two vectors.
float dot(const float* one, const float* other, size_t n);

/// found[k][i], rows of which are `pitch` apart, is the product of ones[k] and others[i], as `dot` has
/// it: ones [n_ones][n]. Where 4 does not divide `n_others`, some numbers behind have no meaning.
void products(const float* ones, size_t n_ones, const float* const* others, size_t n_others,
              size_t n, float* found, size_t pitch);

/// sums[k] += factors[k][i] * values[i] for each i, in order: sums [n_sums][n]; rows of factors are
/// `pitch` apart.
void add_all_scaled(float* sums, size_t n_sums, const float* factors, size_t pitch,
                    const float* const* values, size_t n_factors, size_t n);

/// values = cap * tanh(values / cap).
void soft_cap(float* values, size_t n, float cap);

/// Copy values, infinite ones as the largest numbers, NaN as the lowest; returns whether any was NaN.
bool make_finite(const float* values, size_t n, float* found);

/// The largest of values, at least `least`.
float largest(const float* values, size_t n, float least);

/// Replace values by e^(value - top); returns their sum. Must hold: no value is above `top`, or NaN.
float exponentials(float* values, size_t n, float top);

/// How gate and up are joined, as activation.glsl numbers it.
enum class Activation : size_t { silu, clamped, geglu };
constexpr size_t kActivations = 3;

/// Join the products of gate and up in place of the former, as silu(gate) * up or gelu(gate) * up;
/// clamped, as gpt-oss does: min(g, 7) * sigmoid(1.702 min(g, 7)) * (clamp(u, -7, 7) + 1).
void activate(float* gates, const float* ups, size_t n, Activation activation);

}  // namespace vkmoe
