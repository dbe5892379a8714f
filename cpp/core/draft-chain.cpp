#include "draft-chain.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>

#include "api.h"
#include "gumbel.h"
#include "pyssd-fault.h"
#include "sampling.h"

namespace pyssd {

static constexpr size_t MAX_CATCH_UP = 16;

static bool is_one_of(const std::string & name, std::initializer_list<const char *> names) {
    return std::any_of(names.begin(), names.end(), [&](const char * other) { return name == other; });
}

draft_chain::~draft_chain() {
    release();
}

void draft_chain::release() {
    for (const member & m : members) {
        api().llama_sampler_free(m.copy);
    }
    members.clear();
    source = nullptr;
    valid = false;
}

void draft_chain::invalidate() {
    valid = false;
}

void draft_chain::emitted(llama_token id) {
    if (valid) {
        behind.push_back(id);
    }
}

void draft_chain::rebuild(llama_sampler * target_chain) {
    release();
    greedy = chain_is_greedy(target_chain);
    needs_all = false;
    const int32_t n = greedy ? 0 : chain_size(target_chain);
    for (int32_t i = 0; i < n; i++) {
        llama_sampler * from = chain_member(target_chain, i);
        const std::string name = sampler_name(from);
        const bool is_left_out = is_one_of(name, {"mirostat", "mirostat-v2", "xtc", "adaptive-p"});
        if (from->iface->clone == nullptr || is_left_out || name.empty() || name[0] == '?') {
            continue;
        }
        const bool is_stateless = is_one_of(name, {"greedy", "gumbel", "logit-bias", "min-p", "temp", "temp-ext",
                                                   "top-k", "top-n-sigma", "top-p", "typical"});
        needs_all = needs_all || name == "logit-bias";
        members.push_back({from, api().llama_sampler_clone(from), !is_stateless, name == "dist", name == "grammar"});
        n_copies += is_stateless ? 0 : 1;
    }
    source = target_chain;
    valid = true;
}

void draft_chain::sync(llama_sampler * target_chain) {
    if (!valid || source != target_chain) {
        rebuild(target_chain);
    } else {
        // a copy costs about as much as accepting some tokens: after a stretch without drafts it is the cheaper way
        const bool is_near = ahead.size() <= behind.size() && behind.size() - ahead.size() <= MAX_CATCH_UP;
        const bool is_prefix = is_near && std::equal(ahead.begin(), ahead.end(), behind.begin());
        for (const member & m : members) {
            if (!m.is_stateful) {
                continue;
            }
            if (m.is_random || !is_prefix) {
                api().llama_sampler_copy(m.source, m.copy);
                n_copies++;
                continue;
            }
            for (size_t i = ahead.size(); i < behind.size(); i++) {
                api().llama_sampler_accept(m.copy, behind[i]);
            }
        }
    }
    ahead.clear();
    behind.clear();
}

bool draft_chain::accept(llama_token id) {
    ahead.push_back(id);
    try {
        for (const member & m : members) {
            if (m.is_stateful) {
                api().llama_sampler_accept(m.copy, id);
            }
        }
    } catch (const std::exception &) {
        invalidate(); // llama.cpp's grammar throws when no rule goes on; the copy is half advanced
        return false;
    }
    return true;
}

draft_pick draft_chain::pick(const float * logits, int32_t n_vocab, int64_t pos, candidates & cand) {
    row_stats stats = row_stats_of(logits, n_vocab);
    if (stats.argmax < 0) {
        return {};
    }
    if (greedy) {
        return {stats.argmax, row_probability(stats, logits, stats.argmax)};
    }
    llama_token_data_array cur = needs_all ? cand.all(logits) : cand.near_max(logits, stats);
    for (const member & m : members) {
        if (gumbel_is(m.copy)) {
            gumbel_set_pos(m.copy, pyssd_fault("noise-index") ? pos + 1 : pos);
        }
        api().llama_sampler_apply(m.copy, &cur);
        if (m.is_grammar) {
            candidates_compact(&cur);
            // among what the grammar allows: a forced token is a safe draft however unlikely the model finds it
            stats.sum = 0.0;
            for (size_t i = 0; i < cur.size; i++) {
                stats.sum += std::exp(logits[cur.data[i].id] - stats.max);
            }
        }
        if (cur.size == 0) {
            return {};
        }
    }
    if (cur.selected < 0 || cur.selected >= (int64_t) cur.size) {
        // what picks was left out of the copy
        cur.selected = 0;
        for (size_t i = 1; i < cur.size; i++) {
            if (cur.data[i].logit > cur.data[cur.selected].logit) {
                cur.selected = (int64_t) i;
            }
        }
    }
    const llama_token_data & picked = cur.data[cur.selected];
    if (!(picked.logit > -INFINITY)) {
        return {};
    }
    return {picked.id, row_probability(stats, logits, picked.id)};
}

} // namespace pyssd
