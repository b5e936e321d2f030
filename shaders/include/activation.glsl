// What joins the products of gate and up.
// Needs: ACTIVATION (constant), 0: silu, 1: that of gpt-oss, as expert_gate_up.comp says.
const float OAI_LIMIT = 7.0, OAI_ALPHA = 1.702;

float silu(float v) {
    precise float result = v / (1.0 + exp(-v));
    return result;
}

float activated(float gate, float up) {
    precise float result;
    if (ACTIVATION == 0u) {
        result = silu(gate) * up;
    } else {
        const float g = min(gate, OAI_LIMIT);
        result = g / (1.0 + exp(-OAI_ALPHA * g)) * (clamp(up, -OAI_LIMIT, OAI_LIMIT) + 1.0);
    }
    return result;
}
