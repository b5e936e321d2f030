// Computes  for each place that this round brings an expert to: copies n_units of the expert's span there from its home.
// Inputs    brought uvec4 [ranks]: address of the home and of the place, as expert_tiles.comp leaves them, zeros where there is
//           no expert; this round's begin at first_rank. Spans by address. Outputs: places by address.
// Who       workgroup -> its part of one place's span (z), see include/copy_span.glsl.
// Assumes   spans are 16-byte aligned.
// Dispatch  (..., ..., places of a round)
#version 460
#extension GL_GOOGLE_include_directive : require
#include "address.glsl"
#include "store.glsl"

layout(local_size_x_id = 0) in;

layout(set = 0, binding = 0, std430) readonly buffer Brought { uvec4 brought[]; };
layout(push_constant, std430) uniform Push {
    uint first_rank;
    uint skipped_units;     // of 16 bytes, before them in a span
    uint n_units;
};

#include "copy_span.glsl"

void main() {
    const uvec4 way = brought[first_rank + gl_WorkGroupID.z];
    const uvec2 home = address_add(way.xy, skipped_units * 16u), place = address_add(way.zw, skipped_units * 16u);
    if (!is_null(way.xy)) copy_span(home, place, n_units);
}
