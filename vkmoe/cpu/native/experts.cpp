// The feed-forward of experts, as expert_gate_up.comp and expert_down.comp do it. Here the address
// of an expert leads to addresses: those of its matrices and biases, which lie apart in a file.
// Offsets "in the span" say which of them.
#include "kernels.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "experts.hpp"
#include "inputs.hpp"
#include "vectors.hpp"

namespace vkmoe {

namespace {

constexpr size_t kRowsAtOnce = 64;  // whose products are joined together
constexpr uint32_t kNoWord = 0xFFFFFFFF;

/// The experts of a dispatch: those that the routing of a row names, or a fixed one.
class Experts {
public:
    Experts(const Call& call, size_t n_rows)
        : fixed_(call.bytes("span", 3 * sizeof(uint64_t))),
          n_slots_(call.count("n_slots")),
          pitch_(call.count("routing_pitch")) {
        require(n_slots_ > 0, call, "there are no experts");
        const size_t n_words = fixed_ != nullptr ? 1 : 6 * n_slots_;
        words_ = call.words<const uint32_t>("routing", reach(n_rows, pitch_, n_words));
    }

    size_t n_slots() const { return n_slots_; }
    bool is_fixed() const { return fixed_ != nullptr; }

    /// The expert of a slot; null in an inert row.
    const uint8_t* expert(size_t row, size_t slot) const {
        if (fixed_ != nullptr) return fixed_;
        const uint32_t* const words = words_ + row * pitch_ + 2 * n_slots_ + 2 * slot;
        const uint64_t address = words[0] | static_cast<uint64_t>(words[1]) << 32;
        return reinterpret_cast<const uint8_t*>(address);
    }

    float word(size_t row, size_t index) const {
        float value;
        std::memcpy(&value, words_ + row * pitch_ + index, sizeof value);
        return value;
    }

private:
    const uint8_t* fixed_;
    size_t n_slots_, pitch_;
    const uint32_t* words_;
};

/// Whether an expert is in a file that memory does not hold as a whole.
bool is_in_file(const uint8_t* expert) {
    uint64_t n_bytes;
    std::memcpy(&n_bytes, expert + kSizesAt, sizeof n_bytes);
    return n_bytes != 0;
}

/// Follows how much layers of tokens read from disks. Asking for experts costs a tenth of a token
/// where all of them are in memory; the few that lack are left to page faults then.
class Reading {
public:
    /// Take reading for much until it is known.
    void begin_anew() {
        average_ = kMost;
        is_much_ = true;
    }

    /// Note a layer, once for each.
    void note() {
        rusage usage{};
        if (getrusage(RUSAGE_SELF, &usage) != 0) return;
        const double read = kBlockBytes * static_cast<double>(usage.ru_inblock - n_blocks_);
        n_blocks_ = usage.ru_inblock;
        average_ += (std::min(read, kMost) - average_) / kLayers;
        if (average_ >= kMuch) is_much_ = true;
        if (average_ < kLittle) is_much_ = false;
    }

    bool is_much() const { return is_much_; }

private:
    static constexpr double kBlockBytes = 512, kLayers = 64;  // of the average
    static constexpr double kMuch = 60e3, kLittle = 20e3, kMost = 1e6;  // bytes that a layer reads

    std::atomic<bool> is_much_{true};
    double average_ = kMost;
    long n_blocks_ = 0;
};

Reading reading;  // the system counts it for the process
std::atomic<uint64_t> n_asked{0};

}  // namespace

uint64_t n_read_ahead() { return n_asked; }

void read_ahead(const uint8_t* expert) {
    ++n_asked;
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (size_t matrix = 0; matrix < 3; ++matrix) {
        uint64_t n_bytes;
        std::memcpy(&n_bytes, expert + kSizesAt + matrix * sizeof n_bytes, sizeof n_bytes);
        if (n_bytes == 0) continue;
        const uint8_t* const begin = part<uint8_t>(expert, matrix * sizeof(uint64_t));
        const size_t before = reinterpret_cast<uintptr_t>(begin) % page;
        // Where it fails, faults read them.
        madvise(const_cast<uint8_t*>(begin - before), before + n_bytes, MADV_WILLNEED);
    }
}

std::vector<Step> expert_gate_up(const Call& call) {
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format), row_bytes = call.count("row_bytes");
    const size_t n_rows = call.count("n_rows"), rows = call.count("rows");
    const size_t pass = call.count("pass"), activation = call.count("activation");
    const bool is_biased = call.count("biased") != 0;
    const size_t gate_at = call.count("gate_offset"), up_at = call.count("up_offset");
    const size_t gate_bias_at = call.count("gate_bias"), up_bias_at = call.count("up_bias");
    const size_t n_vectors = call.groups[2], act_pitch = call.count("act_pitch");
    const size_t x_pitch = 4 * call.count("x_pitch");
    require(rows > 0 && n_vectors > 0 && n_rows > 0, call, "there is nothing to do");
    require(pass <= kUpOnly && activation < kActivations, call, "no such pass or activation");
    const Experts experts(call, n_vectors);
    if (!experts.is_fixed()) reading.begin_anew();
    const size_t n_slots = experts.n_slots();
    const auto* const x = call.words<const float>("x", reach(n_vectors, x_pitch, n_columns));
    auto* const act = call.words<float>("act", reach(n_vectors, act_pitch, n_slots * n_rows));
    const Norm norm(call, n_vectors);

    const Inputs inputs(call, format, n_columns, n_vectors);
    const auto scales = std::make_shared<std::vector<float>>(n_vectors);
    const size_t n_parts = inputs.n_parts();
    const auto bring = [=](size_t item, size_t) {
        const size_t vector = item / n_parts, part = item % n_parts;
        inputs.take_part(vector, part, x + vector * x_pitch);
        if (part == 0) (*scales)[vector] = norm.scale(vector);
    };
    const auto ahead = [=](size_t item, size_t) {
        const uint8_t* const expert = experts.expert(item / n_slots, item % n_slots);
        if (expert == nullptr || experts.is_fixed() || !is_in_file(expert)) return;
        if (item == 0) reading.note();
        if (reading.is_much()) read_ahead(expert);
    };
    const size_t n_groups = ceil_divide(n_rows, rows);
    const auto multiply = [=](size_t item, size_t) {
        const size_t vector = item / (n_slots * n_groups), slot = item / n_groups % n_slots;
        const uint8_t* const expert = experts.expert(vector, slot);
        if (expert == nullptr) return;
        const size_t begin = item % n_groups * rows, behind = std::min(begin + rows, n_rows);
        float* const found = act + vector * act_pitch + slot * n_rows;
        for (size_t first = begin; first < behind; first += kRowsAtOnce) {
            const size_t end = std::min(first + kRowsAtOnce, behind);
            const auto project = [&](size_t matrix_at, size_t bias_at, float* products) {
                const uint8_t* const matrix = part<uint8_t>(expert, matrix_at);
                const float* const biases = part<float>(expert, bias_at);
                const float scale = scale_of(expert, matrix_at);
                for (size_t row = first; row < end; ++row) {
                    const float product = inputs.dot(matrix + row * row_bytes, vector);
                    const float scaled = product * scale * (*scales)[vector];
                    products[row - first] = is_biased ? scaled + biases[row] : scaled;
                }
            };
            if (pass != kUpOnly) project(gate_at, gate_bias_at, found + first);
            if (pass == kGateOnly) continue;
            float ups[kRowsAtOnce];
            project(up_at, up_bias_at, ups);
            activate(found + first, ups, end - first, static_cast<Activation>(activation));
        }
    };
    static_assert(kBoth == 0, "both are multiplied where no pass is one of them alone");
    return {{n_vectors * n_slots, ahead, false},
            {n_vectors * n_parts, bring, false},
            {n_vectors * n_slots * n_groups, multiply, true}};
}

std::vector<Step> expert_down(const Call& call) {
    const Format& format = call.format();
    const size_t n_columns = columns_of(call, format), row_bytes = call.count("row_bytes");
    const size_t n_rows = call.count("n_rows"), rows = call.count("rows");
    const size_t down_at = call.count("down_offset"), bias_at = call.count("down_bias");
    const bool is_biased = call.count("biased") != 0;
    const auto weight_word = static_cast<uint32_t>(call.count("weight_word"));
    const size_t n_vectors = call.groups[2], slot_words = 4 * call.count("slot_vec4s");
    const size_t act_pitch = 4 * call.count("act_pitch");
    const size_t hidden_pitch = call.count("hidden_pitch");
    const size_t partials_pitch = call.count("partials_pitch");
    const bool is_sparse = call.count("sparse") != 0, adds = call.count("adds") != 0;
    require(rows > 0 && n_vectors > 0 && n_rows > 0, call, "there is nothing to do");
    require(slot_words >= n_columns, call, "slots overlap");
    const Experts experts(call, n_vectors);
    const size_t n_slots = experts.n_slots(), n_groups = ceil_divide(n_rows, rows);
    if (experts.is_fixed() && weight_word != kNoWord) {
        call.words<const uint32_t>(
            "routing", reach(n_vectors, call.count("routing_pitch"), weight_word + size_t{1}));
    }
    const float* const gain = floats(call, "gain", n_rows);
    require(gain != nullptr, call, "the gain has no address");
    const auto* const act = call.words<const float>(
        "act", reach(n_vectors, act_pitch, (n_slots - 1) * slot_words + n_columns));
    auto* const hidden = call.words<float>("hidden", reach(n_vectors, hidden_pitch, n_rows));
    auto* const gained = call.words<float>("gained", reach(n_vectors, hidden_pitch, n_rows));
    auto* const partials =
        call.words<float>("partials", reach(n_vectors, partials_pitch, n_groups));

    const Inputs inputs(call, format, n_columns, n_vectors * n_slots);
    const auto bring = [=](size_t item, size_t) {
        const size_t vector = item / n_slots, slot = item % n_slots;
        if (experts.expert(vector, slot) == nullptr) return;
        inputs.take(item, act + vector * act_pitch + slot * slot_words);
    };
    // First the products of each expert, whose rows lie behind one another: where some of each are
    // read in turns, to be added up at once, the processor begins to prefetch anew each time.
    const size_t first_product = call.scratch->take(n_vectors * n_slots * n_rows * sizeof(float));
    const auto products = [scratch = call.scratch, first_product] {
        return reinterpret_cast<float*>(scratch->data() + first_product);
    };
    const auto multiply = [=](size_t item, size_t) {
        const size_t index = item / n_groups, first = item % n_groups * rows;
        const uint8_t* const expert = experts.expert(index / n_slots, index % n_slots);
        if (expert == nullptr) return;
        const uint8_t* const matrix = part<uint8_t>(expert, down_at);
        const float scale = scale_of(expert, down_at);
        for (size_t row = first; row < std::min(first + rows, n_rows); ++row) {
            products()[index * n_rows + row] = inputs.dot(matrix + row * row_bytes, index) * scale;
        }
    };
    const auto add = [=](size_t item, size_t) {
        const size_t vector = item / n_groups, group = item % n_groups;
        const bool is_cleared = is_sparse && !adds;  // a row whose experts are all elsewhere
        if (experts.expert(vector, 0) == nullptr && !is_cleared) return;
        const size_t first = group * rows, end = std::min(first + rows, n_rows);
        std::vector<float> sums(end - first), biases(end - first);
        for (size_t slot = 0; slot < n_slots; ++slot) {  // always in this order
            const uint8_t* const expert = experts.expert(vector, slot);
            if (expert == nullptr) break;  // those without an address come last
            const float* const found = products() + (vector * n_slots + slot) * n_rows;
            float weight = 1.0F;
            if (!experts.is_fixed()) {
                weight = experts.word(vector, n_slots + slot);
            } else if (weight_word != kNoWord) {
                weight = experts.word(vector, weight_word);
            }
            for (size_t row = first; row < end; ++row) {
                sums[row - first] += weight * found[row];
                if (is_biased) biases[row - first] += weight * part<float>(expert, bias_at)[row];
            }
        }
        float squares = 0.0F;
        for (size_t row = first; row < end; ++row) {
            const size_t at = vector * hidden_pitch + row;
            const float added = sums[row - first] + biases[row - first];
            const float updated = adds ? hidden[at] + added : added;
            hidden[at] = updated;
            gained[at] = updated * gain[row];
            squares += updated * updated;
        }
        partials[vector * partials_pitch + group] = squares;
    };
    return {{n_vectors * n_slots, bring, false},
            {n_vectors * n_slots * n_groups, multiply, true},
            {n_vectors * n_groups, add, true}};
}

}  // namespace vkmoe
