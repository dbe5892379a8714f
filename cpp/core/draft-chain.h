#pragma once

// The draft's copy of the target's sampler chain. It samples at the same positions with the same Gumbel noise, so that
// grammar, penalties and temperature act on drafts as they will on the target; what it accepts is provisional.
//
// Left out: samplers that cannot be cloned (llama_cpp's CustomSampler calls Python, and a logits processor must see
// emitted tokens only), and samplers whose choice draws on state that a draft would advance (mirostat, XTC, adaptive-p).
//
// Copies are expensive for a grammar, so the copy lives across rounds: it is brought up to date by accepting what the
// target emitted, and copied anew only after it accepted a token that the target rejected.

#include <cstdint>
#include <vector>

#include "candidates.h"
#include "llama.h"

namespace pyssd {

struct draft_pick {
    llama_token id = -1; // -1: no candidate is left
    float confidence = 0.0f;
};

class draft_chain {
public:
    draft_chain() = default;
    ~draft_chain();
    draft_chain(const draft_chain &) = delete;
    draft_chain & operator=(const draft_chain &) = delete;

    // bring the copy to the state of the target's chain; null = greedy
    void sync(llama_sampler * target_chain);

    // the draft's token for absolute position pos; does not accept it
    draft_pick pick(const float * logits, int32_t n_vocab, int64_t pos, candidates & cand);

    // advance by a drafted token; false if the grammar cannot go on with it
    bool accept(llama_token id);

    // the target chain accepted this token
    void emitted(llama_token id);

    // the target chain changed in an unknown way, or is another one
    void invalidate();

    // free the copy
    void release();

    int64_t n_copies = 0; // times that a stateful member was copied from the target

private:
    struct member {
        llama_sampler * source;
        llama_sampler * copy;
        bool is_stateful; // its state depends on accepted tokens
        bool is_random;   // every apply draws: a copy has to be taken each round
        bool is_grammar;
    };

    void rebuild(llama_sampler * target_chain);

    std::vector<member> members;
    llama_sampler * source = nullptr;
    bool valid = false;
    bool greedy = false;             // the argmax needs no candidate array
    bool needs_all = false;          // a bias may lift an id that is far from the maximum
    std::vector<llama_token> ahead;  // accepted by the copies since the last sync
    std::vector<llama_token> behind; // emitted by the target since the last sync
};

} // namespace pyssd
