// The parameters of a batch, written by the host before each submit and copied device-local at the head of the program; as
// pack_params in vkmoe/gpu/token_io.py writes them. Needs: PARAMS_BINDING defined.
const uint PARAM_WORDS = 16u, HEADER_WORDS = 4u, ROW_WORDS = 2u, MAX_TOKENS = 1u;

struct TokenRow {
    uint token;            // id of the token
    uint position;         // its position in the context, counted from 0
};

layout(set = 0, binding = PARAMS_BINDING, std430) readonly buffer ParamsBuffer {
    uvec2 expert_table;    // address of the expert table version in force, uvec2 [n_layers][n_experts]
    uint serial;           // number of this submit; the last dispatch writes it into the log
    uint n_tokens;         // rows in use
    TokenRow rows[MAX_TOKENS];
    uint reserved[PARAM_WORDS - HEADER_WORDS - ROW_WORDS * MAX_TOKENS];
} params;

const uint ROW = 0u;       // that a program processes: programs take batches of one token
