// A program as a CPU runs it: all dispatches resolved and checked, ready to be run again and again.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "call.hpp"
#include "pool.hpp"

namespace vkmoe {

class Program {
public:
    /// Append a dispatch; `waits`: for all commands before it. Throws std::invalid_argument.
    void dispatch(const std::string& kernel, const Call& call, bool waits);

    /// Append a copy of so many bytes; they must not overlap.
    void copy(const void* source, void* target, size_t n_bytes, bool waits);

    /// Append the filling of so many words with one.
    void fill(uint32_t* target, size_t n_words, uint32_t word, bool waits);

    size_t n_steps() const { return steps_.size(); }

    void run(Pool& pool) const { pool.run(steps_); }

private:
    void append(Step step);

    std::vector<Step> steps_;
};

}  // namespace vkmoe
