#include "pyssd-access.h"
#include "pyssd-fault.h"
#include "pyssd-hook.h"
#include "pyssd-plan.h"

#include "ggml-backend.h"

#include <algorithm>
#include <utility>

// Graphs kept for the widths that speculation goes back and forth between.
//
// A scheduler holds the placement of one graph, and llama_context has one scheduler: a pass of another width than the one
// before builds and places its graph again, which takes 5 to 10% of a plain step on a small model. So each of the few
// narrow widths in use gets a slot: a scheduler and graph results of its own, which change places with the context's
// members when a pass of that width begins. Upstream's code sees nothing but its own members.
//
// A slot costs what its graph needs to compute, a logit row a token for the most part. They are all dropped wherever
// upstream drops its own graphs.

namespace {

constexpr uint32_t WIDEST    = 16; // tokens; wider passes come up rarely and use the context's own scheduler
constexpr size_t   MAX_SLOTS = 6;

} // namespace

struct pyssd_slot {
    uint32_t                            n_tokens = 0;
    uint64_t                            used     = 0;
    ggml_backend_sched_ptr              sched;
    std::array<llm_graph_result_ptr, 2> results;
    llm_graph_result *                  active = nullptr;
};

struct pyssd_slots {
    std::vector<std::unique_ptr<pyssd_slot>> all;
    pyssd_slot * current = nullptr; // holds what the context's own members held; null = none
    uint64_t     clock   = 0;
};

static void exchange(llama_context & ctx, pyssd_slot & slot) {
    pyssd_access::exchange_graphs(ctx, slot.sched, slot.results, slot.active);
}

static void leave(llama_context & ctx, pyssd_slots & slots) {
    if (slots.current) {
        exchange(ctx, *slots.current);
        slots.current = nullptr;
    }
}

// the slot for passes of this width, or a new one in place of the one that was not used for longest
static pyssd_slot & slot_of(llama_context & ctx, pyssd_slots & slots, uint32_t n_tokens) {
    for (auto & slot : slots.all) {
        if (slot->n_tokens == n_tokens) {
            return *slot;
        }
    }
    auto slot      = std::make_unique<pyssd_slot>();
    slot->n_tokens = n_tokens;
    slot->sched    = pyssd_access::new_sched(ctx);
    if (slots.all.size() < MAX_SLOTS) {
        slots.all.push_back(std::move(slot));
        return *slots.all.back();
    }
    const auto older = [](const auto & a, const auto & b) { return a->used < b->used; };
    auto       place = std::min_element(slots.all.begin(), slots.all.end(), older);
    ctx.synchronize(); // a device may still compute in its buffers
    *place = std::move(slot);
    return **place;
}

void pyssd_slots_choose(llama_context & ctx, uint32_t n_tokens) {
    pyssd_slots * slots = pyssd_access::state(ctx).slots.get();
    if (!slots || pyssd_fault("kept-graphs") || (slots->current && slots->current->n_tokens == n_tokens)) {
        return;
    }
    leave(ctx, *slots);
    if (n_tokens <= WIDEST) {
        pyssd_slot & slot = slot_of(ctx, *slots, n_tokens);
        slot.used         = ++slots->clock;
        exchange(ctx, slot);
        slots->current = &slot;
    }
}

void pyssd_slots_drop(llama_context & ctx) {
    pyssd_slots * slots = pyssd_access::state(ctx).slots.get();
    if (slots && !slots->all.empty()) {
        ctx.synchronize();
        leave(ctx, *slots);
        slots->all.clear();
    }
}

void pyssd_slots_set(llama_context * ctx, bool value) {
    pyssd_state & state = pyssd_access::state(*ctx);
    if (!value) {
        pyssd_slots_drop(*ctx);
        state.slots.reset();
    } else if (!state.slots && !state.owner && !pyssd_access::cparams(*ctx).pipeline_parallel) {
        // with pipeline parallelism a pass may begin before the one before has read its inputs
        state.slots = std::make_shared<pyssd_slots>();
    }
}

size_t pyssd_slots_nbytes(const llama_context & ctx, ggml_backend_t backend) {
    const pyssd_slots * slots = pyssd_access::state(ctx).slots.get();
    size_t              sum   = 0;
    for (size_t i = 0; slots && i < slots->all.size(); ++i) {
        sum += ggml_backend_sched_get_buffer_size(slots->all[i]->sched.get(), backend);
    }
    return sum;
}
