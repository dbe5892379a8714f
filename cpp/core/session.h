#pragma once

// One sequence over three contexts (target, draft, scout) and one KV memory: the only place that touches KV.
//
// Invariant: between calls, KV holds exactly the target's own cells for positions < n_past, and nothing else. The last
// emitted token is not in KV yet: it is the first token of the next verify.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "batch.h"
#include "candidates.h"
#include "draft-chain.h"
#include "error.h"
#include "pyssd-hook.h"

namespace pyssd {

// seconds and calls since the session was made
struct session_counters {
    double draft_seconds = 0.0;           // whole draft calls
    double draft_sampling_seconds = 0.0;  // of which: sampling, copies of the chain included
    double verify_seconds = 0.0;          // whole verify calls
    double verify_sampling_seconds = 0.0; // of which: the target's own sampling, which plain decoding has too
    double tops_seconds = 0.0;            // finding the highest ranked ids of rows, in verify and apart
    int64_t draft_steps = 0;              // tokens decoded on the draft context
    int64_t verify_calls = 0;
    int64_t chain_copies = 0;   // stateful samplers copied for drafting
    int64_t guard_rows = 0;     // near-ties that were settled
    int64_t guard_passes = 0;   // passes of one token for that
    double guard_seconds = 0.0; // part of verify_seconds
};

struct draft_result {
    std::vector<llama_token> tokens;
    std::vector<float> confidences;
};

// when a draft goes on; reach = chance that all its tokens so far are accepted
struct draft_rule {
    float min_confidence = 0.0f;         // ends before a token below it
    const float * edges = nullptr;       // [n_bins - 1] ascending bounds of the bins of confidence
    const float * chances = nullptr;     // [n_bins] of a token of that confidence to be accepted
    const float * draft_reach = nullptr; // [n_steps] reach below which token i is not drafted any more
    const float * keep_reach = nullptr;  // [n_steps] reach, token i included, below which it is left out
    int32_t n_bins = 0;                  // 0 = no table: the confidence alone decides
    int32_t n_steps = 0;
};

class session {
public:
    static constexpr int32_t DRAFT_BATCH = 8; // tokens of a draft pass; the compute buffer stays near 1 MB

    // reference: ggml-cpu's slow width-invariant kernels; invariant: attention of pyssd's own
    // single_rows: verify passes by upstream's kernels, each row as if it were alone
    session(llama_context * target, bool reference, bool invariant, bool single_rows = false);
    ~session();
    session(const session &) = delete;
    session & operator=(const session &) = delete;

    // free the borrowers; idempotent; before llama_free(target)
    void close();

    // any thread: the running call throws CANCELLED within one pass, the next ones at once, until cleared
    void cancel();
    void clear_cancel();

    int32_t n_past() const {
        return past;
    }

    // adopt cells that someone else wrote (a loaded state)
    void set_n_past(int32_t n_past);

    // verify passes by upstream's kernels, each row as if it were alone
    bool computes_rows_singly() const {
        return single_rows;
    }

    void set_rows_singly(bool value);

    // why speculation is impossible here; "" if it is possible
    std::string refusal();
    std::vector<pyssd_block> blocks();

    // the weights of all matrix products and the buffers they lie in
    std::vector<pyssd_weight> weights();

    // passes of the draft context since the session was made
    int64_t draft_steps() const {
        return count.draft_steps;
    }

    // the plan of the draft: skip [n_blocks], 1 = skipped, or null
    void set_skip(const uint8_t * skip, int32_t n_blocks, int32_t head_rows);

    // target (target.cpp)
    // chunks of n_ubatch at n_past; only the last row has logits, or all of them, copied to rows [n, n_vocab]
    // a failure keeps the chunks before it
    void prefill(const llama_token * tokens, int32_t n, float * rows);
    void rewind(int32_t n_past);
    bool rewindable(int32_t n_past);
    float * logits(int32_t row);
    llama_token sample(llama_sampler * chain, int32_t row, int64_t pos);
    void synchronize();

    // a round (draft.cpp, verify.cpp)
    int32_t max_draft(int32_t n_ctx);
    // prefix [n_prefix]: a draft by others that this one goes on behind; max_len does not count it
    draft_result draft(llama_sampler * chain, llama_token last_token, int32_t max_len, const draft_rule & rule,
                       const llama_token * prefix = nullptr, int32_t n_prefix = 0);
    // tops: where to put the id that the target ranks highest in each row, or null; of rows behind rejected tokens only if
    // they are among the first n_drafted of the draft (the others fill up a width)
    // margin: a row nearer to a tie than this is settled (guard.cpp), which ends the round; 0 = none is
    // rewrite: first write again, singly, the cells that wide passes have written since the prompt
    std::vector<llama_token> verify(llama_sampler * chain, llama_token last_token, const llama_token * draft,
                                    int32_t n_draft, std::vector<llama_token> * tops = nullptr,
                                    int32_t n_drafted = INT32_MAX, float margin = 0.0f, bool rewrite = true);
    void verify_begin(llama_token last_token, const llama_token * draft, int32_t n_draft);
    void verify_end(int32_t n_emitted);

    // the likeliest id of each of the last n rows of the last target pass
    std::vector<llama_token> tops(int32_t n);

    // fresh passes over scratch cells (scout.cpp); out: [n, n_vocab], [n], [n_taps, n, n_embd]
    void skip_logits(const llama_token * tokens, int32_t n, const uint8_t * skip, int32_t n_blocks, int32_t head_rows,
                     float * out);
    void skip_argmax(const llama_token * tokens, int32_t n, const uint8_t * skip, int32_t n_blocks, int32_t * out);
    void hidden(const llama_token * tokens, int32_t n, const int32_t * taps, int32_t n_taps, float * out);
    void free_scout();

    // measuring (measure.cpp): behind the user's cells, which stay as they are
    // seconds of one target pass for each of the widths, in this order, with n_cells more cells in front; fewer if that
    // takes longer than max_seconds
    std::vector<double> time_verify(const int32_t * widths, int32_t n, int32_t n_cells, double max_seconds);
    // seconds of draft steps under a plan
    std::vector<double> time_draft(const uint8_t * skip, int32_t n_blocks, int32_t head_rows, int32_t n_steps,
                                   double max_seconds);

    int32_t n_vocab() const {
        return vocab_size;
    }

    int32_t n_embd() const {
        return embd_size;
    }

    struct per_context {
        int64_t target = 0;
        int64_t draft = 0;
        int64_t scout = 0;
    };

    per_context graphs_built();
    per_context graph_nodes();
    per_context context_nbytes();
    session_counters counters();

private:
    // one call at a time: the contexts are not thread-safe, and a second caller gets BUSY instead of a crash
    struct call {
        explicit call(session & s);
        ~call();
        session & owner;
    };

    void check_cancel() const;
    void check_tokens(const llama_token * tokens, int32_t n) const;
    void check_room(int32_t n) const;
    void check_memory(); // nobody else changed the cells
    // the plan of these bits; throws SKIP_SET if they do not fit the model
    pyssd_plan plan_of(const uint8_t * skip, int32_t n_blocks, int32_t head_rows);
    const std::string & find_refusal(); // refusal and block_list, found at the first call
    void require_speculation();

    void make_current(llama_context * ctx);
    void decode(llama_context * ctx, batch & b);
    void remove_from(llama_seq_id seq, int32_t pos);
    bool reaches(int32_t n_past) const; // the cells that position n_past attends to are still there
    void close_round();
    float * logits_row(int32_t row);
    void ensure_draft();
    void read_ahead(llama_token last_token, const llama_token * prefix, int32_t n_prefix);
    void decode_round(llama_token last_token, const llama_token * draft, int32_t n_draft);
    void end_round(int32_t n_emitted);
    int32_t clean_cells();
    void take_as_clean();
    void settle(int32_t row, bool rewrite);
    void compute_rows_singly(bool value);
    void restore_cells(int32_t from, const std::vector<llama_token> & tokens);
    void find_tops(llama_sampler * chain, const std::vector<llama_token> & emitted, int32_t n_drafted,
                   std::vector<llama_token> & tops);

    int32_t draft_limit(int32_t n_ctx); // max_draft without taking the call
    struct scratch;
    void begin_measuring();
    void fill_cells(int32_t n);
    int32_t apply_skip(); // the plan of skip_bits and skip_head_rows on the draft context
    // read(first, count) is called after each chunk: batch rows 0 .. count hold tokens first .. first + count
    void scout_pass(const llama_token * tokens, int32_t n, const pyssd_plan & plan,
                    const std::function<void(int32_t, int32_t)> & read);
    void ensure_scout(int32_t n);
    void release_scout();

    llama_context * target;
    llama_context * draft_ctx = nullptr;
    llama_context * scout_ctx = nullptr;
    llama_context * current;
    llama_memory_t memory;
    const llama_vocab * vocab;
    int32_t vocab_size;
    int32_t embd_size;

    std::atomic<int32_t> past{0};
    std::atomic<bool> cancelled{false};
    std::atomic<bool> busy{false};
    bool single_rows = false;
    bool closed = false;

    bool refusal_known = false;
    std::string refusal_text;
    bool can_rewind = false;
    std::vector<pyssd_block> block_list;
    int32_t swa_window = 0; // 0 = none
    int32_t swa_chunked = 0;
    int32_t swa_reach = 0;

    std::vector<uint8_t> skip_bits; // the draft's plan; empty = nothing skipped
    int32_t skip_head_rows = 0;

    batch target_batch;
    batch draft_batch;
    std::unique_ptr<batch> scout_batch;
    candidates cand;
    draft_chain chain_copy;
    int32_t round_size = 0;                // rows of a verify that has begun and not ended; 0 = none
    std::vector<llama_token> round_tokens; // the tokens of its rows
    bool round_is_clean = false;           // its cells come from passes of one token
    std::vector<float> settled_rows;       // [n, n_vocab] rows of a round that was settled; empty = read the context's
    int32_t clean = 0;                     // cells that plain decoding would have written bit by bit the same
    std::vector<llama_token> dirty;        // [n_past - clean] the tokens behind them
    uint64_t scout_graphs_before = 0;
    session_counters count;
};

} // namespace pyssd
