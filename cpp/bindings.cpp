// pybind11 only: checks of arguments, release of the GIL, translation of errors. Everything else is in cpp/core.
// Pointers travel as integers (ctypes addresses); nothing here keeps a Python object alive.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>

#include "core/api.h"
#include "core/error.h"
#include "core/gumbel.h"
#include "core/ngram.h"
#include "core/recycle.h"
#include "core/sampling.h"
#include "core/session.h"

namespace py = pybind11;

using pyssd::error;
using pyssd::error_kind;
using pyssd::ngram_index;
using pyssd::recycle_table;
using pyssd::session;

using tokens_in = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using bits_in = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;
using rows_out = py::array_t<float, py::array::c_style>;

static const char * class_of(error_kind kind) {
    switch (kind) {
    case error_kind::LIBRARY_NOT_FOUND:
        return "LibraryNotFoundError";
    case error_kind::LIBRARY_CONFLICT:
        return "LibraryConflictError";
    case error_kind::UNSUPPORTED_MODEL:
        return "UnsupportedModelError";
    case error_kind::SKIP_SET:
        return "SkipSetError";
    case error_kind::CONTEXT_OVERFLOW:
        return "ContextOverflowError";
    case error_kind::DECODE:
        return "DecodeError";
    case error_kind::BUSY:
        return "BusyError";
    case error_kind::CLOSED:
        return "ClosedError";
    case error_kind::CANCELLED:
        return "Cancelled";
    case error_kind::ARGUMENT:
        return nullptr; // ValueError
    }
    return nullptr;
}

static void raise_translated(const error & e) {
    const char * name = class_of(e.kind);
    if (name == nullptr) {
        PyErr_SetString(PyExc_ValueError, e.what());
        return;
    }
    try {
        // at the time of the error: pyssd.errors imports nothing, but this module must not depend on import order
        const py::object cls = py::module_::import("pyssd.errors").attr(name);
        const bool has_code = e.kind == error_kind::DECODE && e.code != 0;
        const py::object value = has_code ? cls(e.what(), e.code) : cls(e.what());
        PyErr_SetObject(cls.ptr(), value.ptr());
    } catch (py::error_already_set & failed) {
        failed.restore();
    }
}

static const int32_t * data_of(const tokens_in & array, const char * name, int32_t & n) {
    if (array.ndim() != 1) {
        throw error(error_kind::ARGUMENT,
                    std::string(name) + " has " + std::to_string(array.ndim()) + " dimensions; pass a 1-D int32 array");
    }
    if (array.size() > INT32_MAX) {
        throw error(error_kind::ARGUMENT, std::string(name) + " is too long");
    }
    n = (int32_t) array.size();
    return array.data();
}

static const uint8_t * data_of(const std::optional<bits_in> & array, int32_t & n) {
    n = 0;
    if (!array) {
        return nullptr;
    }
    if (array->ndim() != 1) {
        throw error(error_kind::SKIP_SET, "the skip set has " + std::to_string(array->ndim()) +
                                              " dimensions; pass a 1-D uint8 array of one entry per block");
    }
    n = (int32_t) array->size();
    return array->data();
}

static llama_sampler * sampler_of(uintptr_t address) {
    return reinterpret_cast<llama_sampler *>(address); // 0 = greedy
}

static py::dict dict_of(const session::per_context & value) {
    py::dict result;
    result["target"] = value.target;
    result["draft"] = value.draft;
    result["scout"] = value.scout;
    return result;
}

static std::unique_ptr<session> session_init(uintptr_t ctx, bool exact, bool invariant, bool single_rows) {
    if (ctx == 0) {
        throw error(error_kind::ARGUMENT, "ctx is null; pass the address of a llama_context");
    }
    return std::make_unique<session>(reinterpret_cast<llama_context *>(ctx), exact, invariant, single_rows);
}

static py::list session_blocks(session & self) {
    py::list result;
    for (const pyssd_block & block : self.blocks()) {
        result.append(py::make_tuple(block.index, block.layer, block.kind, block.nbytes, std::string(block.device)));
    }
    return result;
}

static py::list session_weights(session & self) {
    py::list result;
    for (const pyssd_weight & w : self.weights()) {
        result.append(py::make_tuple(std::string(w.name), std::string(w.type), std::string(w.buffer), w.nbytes));
    }
    return result;
}

static void session_set_skip(session & self, const std::optional<bits_in> & skip, int32_t head_rows) {
    int32_t n_blocks;
    const uint8_t * bits = data_of(skip, n_blocks);
    py::gil_scoped_release release;
    self.set_skip(bits, n_blocks, head_rows);
}

static void session_prefill(session & self, const tokens_in & tokens, std::optional<rows_out> rows) {
    int32_t n;
    const int32_t * ids = data_of(tokens, "tokens", n);
    float * out = nullptr;
    if (rows) {
        if (rows->ndim() != 2 || rows->shape(0) != n || rows->shape(1) != self.n_vocab()) {
            throw error(error_kind::ARGUMENT,
                        "rows must have the shape [" + std::to_string(n) + ", " + std::to_string(self.n_vocab()) + "]");
        }
        out = rows->mutable_data(); // throws ValueError if not writeable
    }
    py::gil_scoped_release release;
    self.prefill(ids, n, out);
}

static py::array session_logits(const py::object & self, int32_t row) {
    session & s = self.cast<session &>();
    float * logits;
    {
        py::gil_scoped_release release;
        logits = s.logits(row);
    }
    // the base only tells numpy that the memory is not its own; llama.cpp reuses it at the next decode
    return py::array_t<float>({(py::ssize_t) s.n_vocab()}, {(py::ssize_t) sizeof(float)}, logits, self);
}

static int32_t session_sample(session & self, uintptr_t chain, int32_t row, int64_t pos) {
    py::gil_scoped_release release;
    return self.sample(sampler_of(chain), row, pos);
}

// pyssd.propose.skip.DraftRule: arrays that live while the call runs, checked to fit together
struct rule_arrays {
    explicit rule_arrays(const py::object & from)
        : edges(from.attr("edges")), chances(from.attr("chances")), draft_reach(from.attr("draft_reach")),
          keep_reach(from.attr("keep_reach")) {
        if (chances.size() < 1 || edges.size() != chances.size() - 1 || draft_reach.size() != keep_reach.size()) {
            throw error(error_kind::ARGUMENT,
                        "a draft rule has " + std::to_string(edges.size()) + " edges, " +
                            std::to_string(chances.size()) + " chances, " + std::to_string(draft_reach.size()) +
                            " and " + std::to_string(keep_reach.size()) + " reaches; pass n - 1, n, m and m of them");
        }
    }

    pyssd::draft_rule view(float min_confidence) const {
        return {min_confidence,
                edges.data(),
                chances.data(),
                draft_reach.data(),
                keep_reach.data(),
                (int32_t) chances.size(),
                (int32_t) keep_reach.size()};
    }

    const py::array_t<float, py::array::c_style | py::array::forcecast> edges, chances, draft_reach, keep_reach;
};

static py::tuple session_draft(session & self, uintptr_t chain, int32_t last_token, int32_t max_len,
                               float min_confidence, const py::object & rule, const std::optional<tokens_in> & prefix) {
    std::optional<rule_arrays> arrays;
    pyssd::draft_rule limits;
    limits.min_confidence = min_confidence;
    if (!rule.is_none()) {
        arrays.emplace(rule);
        limits = arrays->view(min_confidence);
    }
    int32_t n_prefix = 0;
    const int32_t * ahead = prefix ? data_of(*prefix, "prefix", n_prefix) : nullptr;
    pyssd::draft_result drafted;
    {
        py::gil_scoped_release release;
        drafted = self.draft(sampler_of(chain), last_token, max_len, limits, ahead, n_prefix);
    }
    const auto n = (py::ssize_t) drafted.tokens.size();
    return py::make_tuple(py::array_t<int32_t>(n, drafted.tokens.data()),
                          py::array_t<float>(n, drafted.confidences.data()));
}

static py::array_t<int32_t> session_verify(session & self, uintptr_t chain, int32_t last_token, const tokens_in & draft,
                                           recycle_table * recycle, int32_t before, float margin, bool rewrite,
                                           std::optional<int32_t> n_drafted) {
    int32_t n;
    const int32_t * ids = data_of(draft, "draft", n);
    std::vector<llama_token> emitted;
    std::vector<llama_token> tops;
    {
        py::gil_scoped_release release;
        emitted = self.verify(sampler_of(chain), last_token, ids, n, recycle != nullptr ? &tops : nullptr,
                              n_drafted.value_or(n), margin, rewrite);
    }
    if (recycle != nullptr && !tops.empty()) {
        // with the GIL, which guards the table
        std::vector<llama_token> tokens(1, last_token);
        tokens.insert(tokens.end(), ids, ids + n);
        recycle->learn(before, tokens.data(), tops.data(), (int32_t) tops.size(), (int32_t) emitted.size());
    }
    return py::array_t<int32_t>((py::ssize_t) emitted.size(), emitted.data());
}

static void session_verify_begin(session & self, int32_t last_token, const tokens_in & draft) {
    int32_t n;
    const int32_t * ids = data_of(draft, "draft", n);
    py::gil_scoped_release release;
    self.verify_begin(last_token, ids, n);
}

static void session_recycle(session & self, recycle_table & table, int32_t before, const tokens_in & tokens,
                            std::optional<int32_t> n_right) {
    int32_t n;
    const int32_t * ids = data_of(tokens, "tokens", n);
    std::vector<llama_token> tops;
    {
        py::gil_scoped_release release;
        tops = self.tops(n);
    }
    table.learn(before, ids, tops.data(), n, n_right.value_or(n));
}

static py::array_t<float> session_skip_logits(session & self, const tokens_in & tokens,
                                              const std::optional<bits_in> & skip, int32_t head_rows) {
    int32_t n;
    int32_t n_blocks;
    const int32_t * ids = data_of(tokens, "tokens", n);
    const uint8_t * bits = data_of(skip, n_blocks);
    py::array_t<float> result({(py::ssize_t) n, (py::ssize_t) self.n_vocab()});
    float * out = result.mutable_data();
    py::gil_scoped_release release;
    self.skip_logits(ids, n, bits, n_blocks, head_rows, out);
    return result;
}

static py::array_t<int32_t> session_skip_argmax(session & self, const tokens_in & tokens,
                                                const std::optional<bits_in> & skip) {
    int32_t n;
    int32_t n_blocks;
    const int32_t * ids = data_of(tokens, "tokens", n);
    const uint8_t * bits = data_of(skip, n_blocks);
    py::array_t<int32_t> result((py::ssize_t) n);
    int32_t * out = result.mutable_data();
    py::gil_scoped_release release;
    self.skip_argmax(ids, n, bits, n_blocks, out);
    return result;
}

static py::array_t<float> session_hidden(session & self, const tokens_in & tokens, const tokens_in & taps) {
    int32_t n;
    int32_t n_taps;
    const int32_t * ids = data_of(tokens, "tokens", n);
    const int32_t * tap_ids = data_of(taps, "taps", n_taps);
    py::array_t<float> result({(py::ssize_t) n_taps, (py::ssize_t) n, (py::ssize_t) self.n_embd()});
    float * out = result.mutable_data();
    py::gil_scoped_release release;
    self.hidden(ids, n, tap_ids, n_taps, out);
    return result;
}

static py::array_t<double> seconds_of(const std::vector<double> & seconds) {
    return py::array_t<double>((py::ssize_t) seconds.size(), seconds.data());
}

static py::array_t<double> session_time_verify(session & self, const tokens_in & widths, int32_t n_cells,
                                               double max_seconds) {
    int32_t n;
    const int32_t * list = data_of(widths, "widths", n);
    std::vector<double> seconds;
    {
        py::gil_scoped_release release;
        seconds = self.time_verify(list, n, n_cells, max_seconds);
    }
    return seconds_of(seconds);
}

static py::array_t<double> session_time_draft(session & self, const std::optional<bits_in> & skip, int32_t head_rows,
                                              int32_t n_steps, double max_seconds) {
    int32_t n_blocks;
    const uint8_t * bits = data_of(skip, n_blocks);
    std::vector<double> seconds;
    {
        py::gil_scoped_release release;
        seconds = self.time_draft(bits, n_blocks, head_rows, n_steps, max_seconds);
    }
    return seconds_of(seconds);
}

static py::dict session_counters(session & self) {
    const pyssd::session_counters count = self.counters();
    py::dict result;
    result["draft_seconds"] = count.draft_seconds;
    result["draft_sampling_seconds"] = count.draft_sampling_seconds;
    result["verify_seconds"] = count.verify_seconds;
    result["verify_sampling_seconds"] = count.verify_sampling_seconds;
    result["tops_seconds"] = count.tops_seconds;
    result["draft_steps"] = (double) count.draft_steps;
    result["verify_calls"] = (double) count.verify_calls;
    result["chain_copies"] = (double) count.chain_copies;
    result["guard_rows"] = (double) count.guard_rows;
    result["guard_passes"] = (double) count.guard_passes;
    result["guard_seconds"] = count.guard_seconds;
    return result;
}

static int32_t ngram_sync(ngram_index & self, const tokens_in & tokens) {
    int32_t n;
    const int32_t * ids = data_of(tokens, "tokens", n);
    return self.sync(ids, n);
}

static void ngram_extend(ngram_index & self, const tokens_in & tokens) {
    int32_t n;
    const int32_t * ids = data_of(tokens, "tokens", n);
    self.extend(ids, n);
}

static py::tuple ngram_draft(ngram_index & self, int32_t max_len) {
    const pyssd::ngram_draft & drafted = self.draft(max_len);
    const auto n = (py::ssize_t) drafted.tokens.size();
    return py::make_tuple(py::array_t<int32_t>(n, drafted.tokens.data()), py::array_t<float>(n, drafted.chances.data()),
                          drafted.match_len);
}

static py::tuple recycle_draft(recycle_table & self, int32_t before, int32_t last, int32_t max_len) {
    const pyssd::recycle_draft & drafted = self.draft(before, last, max_len);
    const auto n = (py::ssize_t) drafted.tokens.size();
    return py::make_tuple(py::array_t<int32_t>(n, drafted.tokens.data()),
                          py::array_t<float>(n, drafted.chances.data()));
}

static void recycle_begin(recycle_table & self, const tokens_in & tokens) {
    int32_t n;
    const int32_t * ids = data_of(tokens, "tokens", n);
    self.begin(ids, n);
}

static void recycle_learn(recycle_table & self, int32_t before, const tokens_in & tokens, const tokens_in & tops) {
    int32_t n;
    int32_t n_tops;
    const int32_t * ids = data_of(tokens, "tokens", n);
    const int32_t * top_ids = data_of(tops, "tops", n_tops);
    if (n_tops != n) {
        throw error(error_kind::ARGUMENT, "tops has " + std::to_string(n_tops) + " entries for " + std::to_string(n) +
                                              " tokens; pass one for each");
    }
    self.learn(before, ids, top_ids, n, n);
}

static void recycle_extend(recycle_table & self, const tokens_in & tokens) {
    int32_t n;
    const int32_t * ids = data_of(tokens, "tokens", n);
    self.extend(ids, n);
}

PYBIND11_MODULE(_core, m) {
    m.doc() = "The C++ core of pyssd; _core.pyi documents it";

    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) {
                std::rethrow_exception(thrown);
            }
        } catch (const error & e) {
            raise_translated(e);
        }
    });

    m.def("attach", [](uintptr_t handle) { pyssd::api_attach(reinterpret_cast<void *>(handle)); }, py::arg("handle"));
    m.def("struct_sizes", &pyssd::api_struct_sizes);
    m.def("library_sizes", &pyssd::api_library_sizes);
    m.def(
        "gumbel_sampler",
        [](const py::int_ & seed) {
            // any integer is a seed: only its low 64 bits count
            return reinterpret_cast<uintptr_t>(pyssd::gumbel_init(PyLong_AsUnsignedLongLongMask(seed.ptr())));
        },
        py::arg("seed"));
    m.def(
        "gumbel_set_pos", [](uintptr_t chain, int64_t pos) { pyssd::gumbel_set_pos(sampler_of(chain), pos); },
        py::arg("chain"), py::arg("pos"));
    m.def(
        "chain_has",
        [](uintptr_t chain, const std::string & name) {
            return chain != 0 && pyssd::chain_has(sampler_of(chain), name);
        },
        py::arg("chain"), py::arg("name"));

    // calls that may wait for the device or build a graph release the GIL
    using release = py::call_guard<py::gil_scoped_release>;
    py::class_<session>(m, "Session")
        .def(py::init(&session_init), py::arg("ctx"), py::kw_only(), py::arg("exact") = false,
             py::arg("invariant") = false, py::arg("single_rows") = false)
        .def("close", &session::close, release())
        .def_property("n_past", &session::n_past, &session::set_n_past)
        .def_property("single_rows", &session::computes_rows_singly, &session::set_rows_singly)
        .def_property_readonly("refusal",
                               [](session & self) -> std::optional<std::string> {
                                   const std::string text = self.refusal();
                                   return text.empty() ? std::nullopt : std::optional<std::string>(text);
                               })
        .def("blocks", &session_blocks)
        .def("weights", &session_weights)
        .def("set_skip", &session_set_skip, py::arg("skip").none(true), py::arg("head_rows") = 0)
        .def("prefill", &session_prefill, py::arg("tokens"), py::arg("rows").noconvert() = py::none())
        .def("rewind", &session::rewind, release(), py::arg("n_past"))
        .def("rewindable", &session::rewindable, release(), py::arg("n_past"))
        .def("logits", &session_logits, py::arg("row") = -1)
        .def("sample", &session_sample, py::arg("chain"), py::arg("row") = -1, py::arg("pos") = -1)
        .def("synchronize", &session::synchronize, release())
        .def("max_draft", &session::max_draft, release(), py::arg("n_ctx"))
        .def("draft", &session_draft, py::arg("chain"), py::arg("last_token"), py::arg("max_len"),
             py::arg("min_confidence") = 0.0f, py::arg("rule") = py::none(), py::arg("prefix") = py::none())
        .def_property_readonly("draft_steps", &session::draft_steps)
        .def("verify", &session_verify, py::arg("chain"), py::arg("last_token"), py::arg("draft"),
             py::arg("recycle").none(true) = nullptr, py::arg("before") = -1, py::arg("guard") = 0.0f,
             py::arg("rewrite") = true, py::arg("drafted") = py::none())
        .def("verify_begin", &session_verify_begin, py::arg("last_token"), py::arg("draft"))
        .def("verify_end", &session::verify_end, release(), py::arg("n_emitted"))
        .def("recycle", &session_recycle, py::arg("table"), py::arg("before"), py::arg("tokens"),
             py::arg("right") = py::none())
        .def("skip_logits", &session_skip_logits, py::arg("tokens"), py::arg("skip").none(true),
             py::arg("head_rows") = 0)
        .def("skip_argmax", &session_skip_argmax, py::arg("tokens"), py::arg("skip").none(true))
        .def("hidden", &session_hidden, py::arg("tokens"), py::arg("taps"))
        .def("free_scout", &session::free_scout, release())
        .def("time_verify", &session_time_verify, py::arg("widths"), py::arg("n_cells") = 0,
             py::arg("max_seconds") = std::numeric_limits<double>::infinity())
        .def("time_draft", &session_time_draft, py::arg("skip").none(true), py::arg("head_rows"), py::arg("n_steps"),
             py::arg("max_seconds") = std::numeric_limits<double>::infinity())
        .def("cancel", &session::cancel)
        .def("clear_cancel", &session::clear_cancel)
        .def("graphs_built", [](session & self) { return dict_of(self.graphs_built()); })
        .def("graph_nodes", [](session & self) { return dict_of(self.graph_nodes()); })
        .def("context_nbytes", [](session & self) { return dict_of(self.context_nbytes()); })
        .def("counters", &session_counters);

    // microseconds each: not worth releasing the GIL
    py::class_<ngram_index>(m, "NgramIndex")
        .def(py::init<int32_t>(), py::arg("capacity"))
        .def("__len__", &ngram_index::size)
        .def("sync", &ngram_sync, py::arg("tokens"))
        .def("extend", &ngram_extend, py::arg("tokens"))
        .def("rewind", &ngram_index::rewind, py::arg("n"))
        .def("draft", &ngram_draft, py::arg("max_len"));

    py::class_<recycle_table>(m, "RecycleTable")
        .def(py::init<int32_t>(), py::arg("n_vocab"))
        .def("begin", &recycle_begin, py::arg("tokens"))
        .def("learn", &recycle_learn, py::arg("before"), py::arg("tokens"), py::arg("tops"))
        .def("draft", &recycle_draft, py::arg("before"), py::arg("last"), py::arg("max_len"))
        .def("extend", &recycle_extend, py::arg("tokens"))
        .def("clear", &recycle_table::clear)
        .def("copy", [](const recycle_table & self) { return recycle_table(self); })
        .def_property_readonly("nbytes", &recycle_table::nbytes);
}
