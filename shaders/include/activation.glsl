// What joins the products of gate and up.
// Needs: ACTIVATION (constant), 0: silu, 1: that of gpt-oss, 2: geglu, as expert_gate_up.comp says.
const float OAI_LIMIT = 7.0, OAI_ALPHA = 1.702;
const float GELU_SLOPE = 1.5957691216, GELU_CURVE = 0.0713548163; // 2 sqrt(2 / pi), and that times 0.044715
const float GELU_END = 10.0;                                      // beyond it are x and 0, to the last bit but those of 1e-37

float silu(float v) {
    precise float result = v / (1.0 + exp(-v));
    return result;
}

// (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)). No power of 10 overflows, and nothing is cut from what x multiplies above.
float gelu(float x) {
    const float cut = clamp(x, -GELU_END, GELU_END);
    precise float result = max(x, -GELU_END) / (1.0 + exp(-cut * (GELU_SLOPE + GELU_CURVE * cut * cut)));
    return result;
}

float activated(float gate, float up) {
    precise float result;
    if (ACTIVATION == 0u) {
        result = silu(gate) * up;
    } else if (ACTIVATION == 1u) {
        const float g = min(gate, OAI_LIMIT);
        result = g / (1.0 + exp(-OAI_ALPHA * g)) * (clamp(up, -OAI_LIMIT, OAI_LIMIT) + 1.0);
    } else {
        result = gelu(gate) * up;
    }
    return result;
}
