// The per-token parameters, written by the host before each submit and copied device-local at the head of the program.
// Must be kept in sync with vkmoe/gpu/token_io.py. Needs: PARAMS_BINDING defined.
layout(set = 0, binding = PARAMS_BINDING, std430) readonly buffer ParamsBuffer {
    uint token;            // id of the token this program processes
    uint position;         // its position in the context, counted from 0
    uvec2 expert_table;    // address of the expert table version in force, uvec2 [n_layers][n_experts]
    uint serial;           // number of this submit; the last dispatch writes it into the log
    uint reserved[11];
} params;
