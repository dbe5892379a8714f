#pragma once

// Drafts copied from the sequence itself: look where its last tokens stood before, and propose what followed them there.
//
// Each position has, for n = N_MIN .. N_MAX, a link to an earlier position behind n tokens of the same hash (the hash
// chains of LZ77 coders). So a token costs a fixed number of steps to add and to take back, memory is fixed, and a match
// is told by comparing tokens, never by the hash.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bias.h"

namespace pyssd {

struct ngram_draft {
    std::vector<int32_t> tokens;
    std::vector<float> chances; // of each token to be accepted if those before it are
    int32_t match_len = 0;      // last tokens of the sequence that stood before the copied ones too; 0 = no match
};

class ngram_index {
public:
    static constexpr int32_t N_MIN = 2;
    static constexpr int32_t N_MAX = 6;       // longest n-gram with links of its own; longer matches extend it
    static constexpr int32_t MATCH_MAX = 32;  // longest match that is told from longer ones
    static constexpr int32_t OCCURRENCES = 8; // latest ones of an n-gram that have a vote

    // capacity: the latest positions that are looked at; throws ARGUMENT if it is not positive
    explicit ngram_index(int32_t capacity);

    int32_t size() const {
        return (int32_t) tokens.size();
    }

    // tokens that the target emitted: they say which tokens of the last draft were right, proposed or not
    void extend(const int32_t * ids, int32_t n);

    // forget all but the first n tokens
    void rewind(int32_t n);

    // make the sequence these tokens; returns how many of them were there already
    int32_t sync(const int32_t * ids, int32_t n);

    // up to max_len tokens behind the longest match. Occurrences with that match vote for each token by what followed
    // them, the latest deciding a tie; those that differ from the winner drop out.
    const ngram_draft & draft(int32_t max_len);

private:
    // of matches of one class of lengths and one kind of vote: decayed counts of what came true
    struct outcome {
        double hits = 0.0;
        double trials = 0.0;
    };

    static constexpr int32_t N_KINDS = N_MAX - N_MIN + 1;
    static constexpr int32_t N_CLASSES = 8; // of match lengths
    static constexpr int32_t N_VOTES = 3;   // a single occurrence, several that agree, several that do not

    void append(const int32_t * ids, int32_t n);
    void drop_draft();
    void insert(int32_t pos);
    void find_buckets(int32_t pos, size_t buckets[N_KINDS]) const;
    // fills found with the latest occurrences before the end, latest first, of the longest match; returns its length
    int32_t find_occurrences();
    int32_t match_len(int32_t pos, int32_t limit) const;
    float chance_of(int32_t cell) const;

    // a position stands between tokens: pos means behind tokens[pos - 1]
    std::vector<int32_t> tokens;
    std::vector<int32_t> heads; // [N_KINDS, n_buckets], the latest position of each bucket; 0 = none
    std::vector<int32_t> links; // [capacity, N_KINDS], the position before in its bucket, by position modulo capacity
    int32_t capacity;
    int32_t n_bits;     // of a bucket's number
    int32_t oldest = 0; // positions up to here have no links any more

    std::vector<int32_t> found;
    ngram_draft last;
    std::vector<int32_t> last_cells; // of outcomes, one a token of the last draft
    std::vector<outcome> outcomes;   // [N_CLASSES, N_VOTES]
    chance_bias bias;
};

} // namespace pyssd
