#include "gumbel.h"

#include <array>
#include <cmath>

#include "api.h"

namespace pyssd {

struct gumbel {
    uint64_t seed;
    int64_t pos;
};

// finaliser of SplitMix64 (public domain, Vigna): every input bit changes every output bit with chance ~1/2
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull; // 2^64 / golden ratio, odd

// the words are mixed one after the other: a sum of multiples would make (seed, pos, id) triples collide in lines
static uint64_t key_of(uint64_t seed, int64_t pos) {
    return mix(mix(seed + GOLDEN) ^ ((uint64_t) pos * 0xD1B54A32D192ED03ull + GOLDEN));
}

static uint64_t bits_of(uint64_t key, llama_token id) {
    return mix(key + ((uint64_t) (uint32_t) id + 1) * GOLDEN) >> 12;
}

static double uniform_of(uint64_t bits) {
    return ((double) bits + 0.5) * 0x1p-52; // 52 bits: exact, never 0 or 1
}

uint64_t gumbel_bits(uint64_t seed, int64_t pos, llama_token id) {
    return bits_of(key_of(seed, pos), id);
}

double gumbel_noise(uint64_t bits) {
    return -std::log(-std::log(uniform_of(bits)));
}

// A candidate d below the best score so far wins only with noise > d, that is u > exp(-exp(-d)). Comparing u against
// this bound at floor(d), slightly lowered, spares two logarithms for nearly every id of a large vocabulary.
static constexpr int N_BOUNDS = 40; // noise from 52 bits stays below 37

static const std::array<double, N_BOUNDS> & uniform_bounds() {
    static const std::array<double, N_BOUNDS> bounds = [] {
        std::array<double, N_BOUNDS> b{};
        for (int d = 0; d < N_BOUNDS; d++) {
            b[d] = std::exp(-std::exp(-(double) d)) * (1.0 - 1e-12);
        }
        return b;
    }();
    return bounds;
}

int64_t gumbel_pick(const llama_token_data * data, size_t size, uint64_t seed, int64_t pos) {
    int64_t top = -1;
    for (size_t i = 0; i < size; i++) {
        if (data[i].logit > -INFINITY && (top < 0 || data[i].logit > data[top].logit)) {
            top = (int64_t) i;
        }
    }
    if (top < 0) {
        return -1;
    }
    const auto & bounds = uniform_bounds();
    const uint64_t key = key_of(seed, pos);
    // below this a candidate cannot win: the noise of the top one is above -3.7
    const float hopeless = data[top].logit - (N_BOUNDS + 4);

    int64_t best = top;
    double best_score = data[top].logit + gumbel_noise(bits_of(key, data[top].id));
    for (size_t i = 0; i < size; i++) {
        if (!(data[i].logit >= hopeless) || (int64_t) i == top) {
            continue;
        }
        const uint64_t bits = bits_of(key, data[i].id);
        const double behind = best_score - data[i].logit;
        if (behind >= N_BOUNDS || (behind > 0 && uniform_of(bits) < bounds[(int) behind])) {
            continue;
        }
        const double score = data[i].logit + gumbel_noise(bits);
        if (score > best_score || (score == best_score && data[i].id < data[best].id)) {
            best = (int64_t) i;
            best_score = score;
        }
    }
    return best;
}

static const char * gumbel_name(const llama_sampler *) {
    return "gumbel";
}

static void gumbel_apply(llama_sampler * sampler, llama_token_data_array * cur) {
    const auto * self = static_cast<const gumbel *>(sampler->ctx);
    cur->selected = gumbel_pick(cur->data, cur->size, self->seed, self->pos);
    if (cur->selected < 0 && cur->size > 0) {
        cur->selected = 0; // like llama.cpp's dist: a selection is made; the session sees that its logit is -inf
    }
}

static llama_sampler * gumbel_clone(const llama_sampler * sampler) {
    const auto * self = static_cast<const gumbel *>(sampler->ctx);
    llama_sampler * copy = gumbel_init(self->seed);
    static_cast<gumbel *>(copy->ctx)->pos = self->pos;
    return copy;
}

static void gumbel_free(llama_sampler * sampler) {
    delete static_cast<gumbel *>(sampler->ctx);
}

static void gumbel_copy_state(const llama_sampler * src, llama_sampler * dst) {
    *static_cast<gumbel *>(dst->ctx) = *static_cast<const gumbel *>(src->ctx);
}

// accept and reset do nothing: the noise has no state
static llama_sampler_i gumbel_i = {
    /* .name              = */ gumbel_name,
    /* .accept            = */ nullptr,
    /* .apply             = */ gumbel_apply,
    /* .reset             = */ nullptr,
    /* .clone             = */ gumbel_clone,
    /* .free              = */ gumbel_free,
    /* .backend_init      = */ nullptr,
    /* .backend_accept    = */ nullptr,
    /* .backend_apply     = */ nullptr,
    /* .backend_set_input = */ nullptr,
    /* .backend_reset     = */ nullptr,
    /* .copy_state        = */ gumbel_copy_state,
};

llama_sampler * gumbel_init(uint64_t seed) {
    return api().llama_sampler_init(&gumbel_i, new gumbel{seed, 0});
}

double gumbel_noise_at(const llama_sampler * sampler, llama_token id) {
    const auto * self = static_cast<const gumbel *>(sampler->ctx);
    return gumbel_noise(gumbel_bits(self->seed, self->pos, id));
}

bool gumbel_is(const llama_sampler * sampler) {
    return sampler != nullptr && sampler->iface == &gumbel_i;
}

void gumbel_set_pos(llama_sampler * sampler, int64_t pos) {
    if (gumbel_is(sampler)) {
        static_cast<gumbel *>(sampler->ctx)->pos = pos;
        return;
    }
    if (sampler == nullptr || api().llama_sampler_chain_get(sampler, -1) == nullptr) {
        return;
    }
    const int32_t n = api().llama_sampler_chain_n(sampler);
    for (int32_t i = 0; i < n; i++) {
        gumbel_set_pos(api().llama_sampler_chain_get(sampler, i), pos);
    }
}

} // namespace pyssd
