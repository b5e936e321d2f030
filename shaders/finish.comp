// Computes  nothing: leaves proof in the log that this part of a program ran to its end: word 0 is the serial number of the run,
//           word 1 counts the parts that have left it.
// Inputs    params. In and out: log words 0 and 1.
// Who       one invocation.
// Assumes   it is the last dispatch of its program, behind a barrier.
// Dispatch  (1, 1, 1).
#version 460
#extension GL_GOOGLE_include_directive : require
#define PARAMS_BINDING 0
#include "params.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 1, std430) buffer Log { uint proof[]; };

void main() {
    if (gl_LocalInvocationIndex != 0u) return;
    proof[1] = proof[0] == params.serial ? proof[1] + 1u : 1u;
    proof[0] = params.serial;
}
