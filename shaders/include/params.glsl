// The parameters of a batch, written by the host before each submit and copied device-local at the head of the program; as
// pack_params in vkmoe/gpu/token_io.py writes them. A program may have more rows than the batch: those from n_rows on are
// inert, and what stands in them is of no meaning.
// Needs: PARAMS_BINDING defined; ROW too where it is not the first row: the one that an invocation processes.
const uint HEADER_WORDS = 8u, ROW_WORDS = 4u;

struct TokenRow {
    uint token;            // id of the token
    uint position;         // its position in the context, counted from 0
    uint sequence;         // the region of the KV caches that its sequence has
    uint picked;           // not of this row: of row i, which row is the i-th picked one, which wants logits
};

layout(set = 0, binding = PARAMS_BINDING, std430) readonly buffer ParamsBuffer {
    uvec2 expert_table;    // address of the expert table version in force, uvec2 [n_layers][n_experts]
    uint serial;           // number of this submit; the last dispatch writes it into the log
    uint n_rows;           // in use
    uint landing_row;      // the row whose missed experts may land
    uint n_picked;         // rows that want logits
    uint first_picked;     // the first one that the head runs for: it takes only so many at once
    uint reserved[HEADER_WORDS - 7u];
    TokenRow rows[];
} params;

#ifndef ROW
#define ROW 0u
#endif
