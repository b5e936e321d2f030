// Word offsets in one list of candidates_partial, and in the output of candidates_merge.
// Needs: nothing in scope.
const uint LIST_MAXIMUM = 0u, LIST_SUM = 1u, LIST_COUNT = 2u, LIST_NAN = 3u, LIST_IDS = 4u, LIST_LOGITS = 68u, LIST_WORDS = 132u;
const uint OUT_COUNT = 0u, OUT_NAN = 1u, OUT_LOG_SUM_EXP = 2u, OUT_IDS = 4u, OUT_LOGITS = 68u;
const float LOWEST_FLOAT = -3.4028234e38;
