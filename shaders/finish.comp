// Computes  nothing: writes the serial number of this submit into word 0 of the log, the proof that the program ran to its end.
// Inputs    params. Output: log word 0.
// Who       one invocation.
// Assumes   it is the last dispatch of its program, behind a barrier.
// Dispatch  (1, 1, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#define PARAMS_BINDING 0
#include "params.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 1, std430) writeonly buffer Log { uint serial_log[]; };

void main() {
    if (gl_LocalInvocationIndex == 0u) serial_log[0] = params.serial;
}
