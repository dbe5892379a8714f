#pragma once

// A llama_batch over buffers that are made once: a decode step allocates nothing.

#include <cstdint>
#include <vector>

#include "llama.h"

namespace pyssd {

class batch {
public:
    explicit batch(int32_t capacity)
        : tokens(capacity), positions(capacity), n_seqs(capacity, 1), seqs(capacity), seq_lists(capacity),
          outputs(capacity) {
        for (int32_t i = 0; i < capacity; i++) {
            seq_lists[i] = &seqs[i];
        }
    }

    batch(const batch &) = delete;
    batch & operator=(const batch &) = delete;

    void clear() {
        n = 0;
    }

    void add(llama_token id, llama_pos pos, llama_seq_id seq, bool output) {
        tokens[n] = id;
        positions[n] = pos;
        seqs[n] = seq;
        outputs[n] = output ? 1 : 0;
        n++;
    }

    int32_t size() const {
        return n;
    }

    int32_t capacity() const {
        return (int32_t) tokens.size();
    }

    bool has_output(int32_t i) const {
        return outputs[i] != 0;
    }

    llama_batch view() {
        return {n, tokens.data(), nullptr, positions.data(), n_seqs.data(), seq_lists.data(), outputs.data()};
    }

private:
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<int32_t> n_seqs;
    std::vector<llama_seq_id> seqs;
    std::vector<llama_seq_id *> seq_lists;
    std::vector<int8_t> outputs;
    int32_t n = 0;
};

} // namespace pyssd
