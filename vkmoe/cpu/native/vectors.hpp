// Loops over vectors of floats, compiled for what the processor has. Sums have a fixed order.
#pragma once

#include <cstddef>

namespace vkmoe {

/// sum += factor * values.
void add_scaled(float* sum, float factor, const float* values, size_t n);

/// The product of two vectors.
float dot(const float* one, const float* other, size_t n);

/// The largest of values, at least `least`.
float largest(const float* values, size_t n, float least);

/// Replace values by e^(value - top); returns their sum. Must hold: no value is above `top`, or NaN.
float exponentials(float* values, size_t n, float top);

}  // namespace vkmoe
