#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "api.h"
#include "error.h"
#include "gumbel.h"

namespace pyssd {

std::string sampler_name(const llama_sampler * sampler) {
    if (sampler == nullptr || sampler->iface == nullptr || sampler->iface->name == nullptr) {
        return "";
    }
    const char * name = sampler->iface->name(sampler);
    if (name == nullptr) {
        return "";
    }
    return name[0] == '+' || name[0] == '-' ? name + 1 : name;
}

static bool is_chain(const llama_sampler * sampler) {
    return api().llama_sampler_chain_get(const_cast<llama_sampler *>(sampler), -1) != nullptr;
}

int32_t chain_size(const llama_sampler * chain) {
    return is_chain(chain) ? api().llama_sampler_chain_n(chain) : 1;
}

llama_sampler * chain_member(llama_sampler * chain, int32_t i) {
    return is_chain(chain) ? api().llama_sampler_chain_get(chain, i) : chain;
}

bool chain_has(llama_sampler * chain, const std::string & name) {
    const int32_t n = chain_size(chain);
    for (int32_t i = 0; i < n; i++) {
        if (sampler_name(chain_member(chain, i)) == name) {
            return true;
        }
    }
    return false;
}

bool chain_is_greedy(llama_sampler * chain) {
    if (chain == nullptr) {
        return true;
    }
    bool greedy = false;
    const int32_t n = chain_size(chain);
    for (int32_t i = 0; i < n; i++) {
        const std::string name = sampler_name(chain_member(chain, i));
        if (name == "greedy") {
            greedy = true;
        } else if (name.empty() || name[0] != '?') { // '?' marks a sampler that does nothing with its settings
            return false;
        }
    }
    return greedy;
}

bool chain_ends_greedy(llama_sampler * chain) {
    return chain == nullptr || sampler_name(chain_member(chain, chain_size(chain) - 1)) == "greedy";
}

static bool is_one_of(const std::string & name, std::initializer_list<const char *> names) {
    return std::any_of(names.begin(), names.end(), [&](const char * other) { return name == other; });
}

// llama.cpp's grammar checks every id of the vocabulary, 11 ms a token at 152k ids, for the few that the rest of the
// chain looks at. With [penalties, bias] grammar [greedy | top-k ... gumbel] the largest logits decide: if the grammar
// leaves as many of them as the next sampler keeps, what it says about smaller ones cannot matter. Not for dist: its
// pick depends on the order of the candidates, and with it the text of llama_cpp.Llama.
// false: cur is undefined, apply the whole chain
static bool apply_to_largest(llama_sampler * chain, const float * logits, candidates & cand,
                             llama_token_data_array * cur) {
    const int32_t n = chain_size(chain);
    int32_t grammar = -1;
    int32_t next = -1; // the first sampler after it that does something
    for (int32_t i = 0; i < n; i++) {
        const std::string name = sampler_name(chain_member(chain, i));
        if (name.empty()) {
            return false;
        }
        if (name[0] == '?') {
            continue;
        }
        if (grammar < 0) {
            if (name == "grammar") {
                grammar = i;
            } else if (!is_one_of(name, {"penalties", "logit-bias"})) {
                return false;
            }
        } else if (next < 0) {
            if (!is_one_of(name, {"greedy", "top-k"})) {
                return false;
            }
            next = i;
        } else if (!is_one_of(name, {"greedy", "gumbel", "min-p", "temp", "temp-ext", "top-p", "typical"})) {
            return false;
        }
    }
    if (next < 0) {
        return false;
    }
    size_t n_needed = 1;
    if (sampler_name(chain_member(chain, next)) == "top-k") {
        llama_token_data_array asked = cand.flat(candidates::DRAFT_MAX);
        const size_t n_asked = asked.size;
        api().llama_sampler_apply(chain_member(chain, next), &asked);
        if (asked.size == n_asked) {
            return false; // keeps as many as the draft has, or more
        }
        n_needed = asked.size;
    }
    *cur = cand.all(logits);
    for (int32_t i = 0; i < n; i++) {
        if (i == grammar) {
            cand.narrow(cur);
        }
        api().llama_sampler_apply(chain_member(chain, i), cur);
        if (i == grammar) {
            candidates_compact(cur);
            if (cur->size < n_needed) {
                return false;
            }
        }
    }
    return true;
}

static llama_token no_token() {
    throw error(error_kind::DECODE,
                "no token is left to sample: every logit is -inf or NaN after the grammar, bias and filters");
}

llama_token chain_sample(llama_sampler * chain, const float * logits, int32_t n_vocab, int64_t pos, candidates & cand) {
    if (chain_is_greedy(chain)) {
        const llama_token id = row_argmax(logits, n_vocab);
        return id >= 0 ? id : no_token();
    }
    gumbel_set_pos(chain, pos);
    llama_token_data_array cur;
    if (!apply_to_largest(chain, logits, cand, &cur)) {
        cur = cand.all(logits);
        api().llama_sampler_apply(chain, &cur);
    }
    if (cur.selected < 0 || cur.selected >= (int64_t) cur.size) {
        throw error(error_kind::ARGUMENT, "the sampler chain selects no token; end it with greedy, dist or gumbel");
    }
    const llama_token_data & picked = cur.data[cur.selected];
    // accepting a token that the grammar has ruled out aborts the process when it is an end of generation
    if (!(picked.logit > -INFINITY)) {
        return no_token();
    }
    api().llama_sampler_accept(chain, picked.id);
    return picked.id;
}

} // namespace pyssd
