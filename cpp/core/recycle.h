#pragma once

// Drafts that follow what the target ranked highest the last time it stood behind the same tokens (Token Recycling, Luo
// et al. 2408.08696): the rows of logits of a verify pass tell it for every token and pair of tokens in it, also for
// rejected tokens, and are computed anyway. One id a key and a chain, where the paper has a tree of eight.
// The rows of a prompt are not computed; there, what followed in the text stands for what the target would have said.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bias.h"

namespace pyssd {

struct recycle_draft {
    std::vector<int32_t> tokens;
    std::vector<float> chances; // of each token to be emitted if those before it are
};

class recycle_table {
public:
    static constexpr int32_t N_PAIRS = 1 << 16; // pairs of tokens that are kept
    static constexpr int32_t N_WAYS = 4;        // places for a pair; the one that was learnt longest ago is given up

    // throws ARGUMENT if n_vocab is not positive
    explicit recycle_table(int32_t n_vocab);

    // a text begins with these tokens, which say what follows what in it; entries of other texts are trusted less
    void begin(const int32_t * tokens, int32_t n);

    // tops[i] is the id that the target ranks highest behind before, tokens[0 .. i]; ids that are no tokens are passed
    // over (before = -1: none, or not known). Behind the first n_right tokens, which were emitted, the target has rejected
    // them: such rows stand in a text that is wrong. Measured on 35 prompts, what they tell of single tokens makes drafts
    // better, and what they tell of pairs, which go first, makes them worse.
    void learn(int32_t before, const int32_t * tokens, const int32_t * tops, int32_t n, int32_t n_right);

    // up to max_len tokens behind (before, token): each is the entry of the pair before it, or of the single token
    const recycle_draft & draft(int32_t before, int32_t token, int32_t max_len);

    // tokens that the target emitted: they say which tokens of the last draft were right, proposed or not
    void extend(const int32_t * ids, int32_t n);

    // forget all entries; how often drafts were right is kept
    void clear();

    size_t nbytes() const;

private:
    struct entry {
        int32_t id = -1;        // -1: nothing is known
        uint16_t text = 0;      // number of the text that it was learnt from last
        uint8_t streak = 0;     // times in a row that the id was found again, at most N_STREAKS - 1
        bool is_copied = false; // from the tokens of a text, not from a row
    };

    struct pair_entry {
        int32_t before = -1;
        int32_t token = -1;
        entry top;
    };

    // of drafted tokens of one kind: decayed counts of what came true. A kind counts the tokens before that the table had right,
    // drafted ones among them: to go on copying is likelier than to begin.
    struct outcome {
        double hits = 0.0;
        double trials = 0.0;
    };

    static constexpr int32_t N_STREAKS = 3;
    static constexpr int32_t N_RUNS = 3;
    static constexpr int32_t N_CELLS = 2 * 2 * 2 * 2 * N_STREAKS * N_RUNS;

    bool is_token(int32_t id) const {
        return id >= 0 && id < n_vocab;
    }

    void drop_draft();
    void renew(entry & e, int32_t top, bool is_copied) const;
    void learn_one(int32_t before, int32_t token, int32_t top, bool is_copied);
    size_t bucket_of(int32_t before, int32_t token) const;
    const entry * find_pair(int32_t before, int32_t token) const;
    int32_t cell_of(const entry & single, const entry * pair, int32_t run) const;
    float chance_of(int32_t cell) const;

    int32_t n_vocab;
    uint16_t n_texts = 0;          // modulo 2^16: an entry that seems fresh by mistake is only overrated
    std::vector<entry> singles;    // [n_vocab]
    std::vector<pair_entry> pairs; // [N_PAIRS / N_WAYS, N_WAYS], the latest first
    int32_t run = 0;               // tokens in a row up to here that the table had
    recycle_draft last;
    std::vector<int32_t> last_cells; // of outcomes, one a token of the last draft
    std::vector<outcome> outcomes;   // [N_CELLS]
    chance_bias bias;
};

} // namespace pyssd
