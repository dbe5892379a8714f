#include "pyssd-kernels.h"

#include "attention.h"
#include "rows.h"
#include "isa.h"
#include "matmul.h"
#include "pack.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "traits.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

// The buffer type that packs weights as they are loaded, and the table that sends its operations to our kernels.

namespace {

thread_local bool tl_offer = false;
thread_local bool tl_tied = false;

bool is_ours(const ggml_tensor * t) {
    const ggml_tensor * root = t && t->view_src ? t->view_src : t;
    return root && root->buffer && root->buffer->buft == pyssd_kernels_buffer_type();
}

// llama.cpp asks with an empty buffer when it chooses where a weight goes; later questions are about weights we hold
bool is_question(const ggml_tensor * weight) {
    return weight->buffer->size == 0;
}

bool is_matrix(const ggml_tensor * w, int n_dims) {
    return pyssd::tile_block_size(w->type) > 0 && w->ne[1] > 1 && (n_dims == 3 || w->ne[2] == 1) && w->ne[3] == 1 &&
           w->nb[0] == ggml_type_size(w->type) && w->nb[1] == ggml_row_size(w->type, w->ne[0]);
}

// a view must start at a tile and span whole rows
bool is_tile_aligned(const ggml_tensor * w) {
    return !w->view_src || (w->ne[0] == w->view_src->ne[0] && w->nb[1] == w->view_src->nb[1] && w->ne[2] == 1 &&
                            w->view_offs % (w->view_src->nb[1] * pyssd::tile_rows) == 0 &&
                            w->view_offs < w->view_src->nb[1] * (size_t) w->view_src->ne[1]);
}

bool is_host_floats(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) &&
           (!t->buffer || ggml_backend_buft_is_host(t->buffer->buft));
}

struct kernel_traits : ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        switch (op->op) {
        case GGML_OP_MUL_MAT:
            size = pyssd::mul_mat_work_size(op);
            return true;
        case GGML_OP_MUL_MAT_ID:
            size = pyssd::mul_mat_id_work_size(op);
            return true;
        case GGML_OP_FLASH_ATTN_EXT:
            size = pyssd::attention_work_size(n_threads, op);
            return true;
        default:
            size = 0;
            return true;
        }
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        switch (op->op) {
        case GGML_OP_MUL_MAT:
            pyssd::mul_mat(params, op);
            return true;
        case GGML_OP_MUL_MAT_ID:
            pyssd::mul_mat_id(params, op);
            return true;
        case GGML_OP_GET_ROWS:
            pyssd::get_rows(params, op);
            return true;
        case GGML_OP_FLASH_ATTN_EXT:
            pyssd::attention(params, op);
            return true;
        default:
            return false;
        }
    }
};

// upstream's attention, row by row; its scratch is upstream's
struct row_traits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override {
        return false;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        pyssd::attention_by_row(params, op);
        return true;
    }
};

struct packed_buffer_type : ggml::cpu::extra_buffer_type {
    kernel_traits traits;
    row_traits by_row;

    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        const ggml_tensor * w = op->src[0];
        if (!w || !w->buffer || !is_ours(w) || (is_question(w) && !tl_offer)) {
            return false;
        }
        switch (op->op) {
        case GGML_OP_MUL_MAT:
            return is_matrix(w, 2) && is_tile_aligned(w) && is_host_floats(op->src[1]) && op->type == GGML_TYPE_F32;
        case GGML_OP_MUL_MAT_ID:
            return is_matrix(w, 3) && !w->view_src && is_host_floats(op->src[1]) && op->type == GGML_TYPE_F32;
        case GGML_OP_GET_ROWS:
            return (tl_tied || !is_question(w)) && is_matrix(w, 2) && is_tile_aligned(w) &&
                   op->src[1]->type == GGML_TYPE_I32 && op->type == GGML_TYPE_F32;
        default:
            return false;
        }
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            if (pyssd::attention_is_by_row(op)) {
                return &by_row;
            }
            return pyssd::attention_is_marked(op) ? &traits : nullptr;
        }
        const bool known = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID || op->op == GGML_OP_GET_ROWS;
        return known && is_ours(op->src[0]) ? &traits : nullptr;
    }
};

void set_tensor(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(t) && "packed weights are written whole");
    const int64_t n_matrices = t->ne[2];
    const int64_t n_tiles = (t->ne[1] + pyssd::tile_rows - 1) / pyssd::tile_rows;
    const size_t packed = pyssd::packed_size(t->type, t->ne[0], t->ne[1]);
    const int64_t total = n_matrices * n_tiles;

    const auto pack = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t m = i / n_tiles;
            pyssd::pack_rows(t->type, (char *) t->data + m * packed, (const char *) data + m * t->nb[2], t->ne[0],
                             t->ne[1], i % n_tiles * pyssd::tile_rows, pyssd::tile_rows);
        }
    };
    const int64_t n_threads = size < 1024 * 1024 ? 1 : std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 8);
    std::vector<std::thread> threads;
    for (int64_t k = 1; k < n_threads; ++k) {
        threads.emplace_back(pack, total * k / n_threads, total * (k + 1) / n_threads);
    }
    pack(0, total / n_threads);
    for (std::thread & thread : threads) {
        thread.join();
    }
}

const char * get_name(ggml_backend_buffer_type_t) {
    return "CPU_PYSSD";
}

size_t get_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    return pyssd::tile_block_size(t->type) ? pyssd::packed_size(t->type, t->ne[0], t->ne[1]) * t->ne[2] * t->ne[3]
                                           : ggml_nbytes(t);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer) {
        buffer->buft = buft;
        buffer->iface.set_tensor = set_tensor;
        buffer->iface.get_tensor = nullptr;
        buffer->iface.cpy_tensor = nullptr;
    }
    return buffer;
}

} // namespace

void pyssd_kernels_offer(bool on, bool tied) {
    tl_offer = on;
    tl_tied = tied;
}

const char * pyssd_kernels_isa(void) {
    return pyssd::isa_native::name;
}

ggml_backend_buffer_type_t pyssd_kernels_buffer_type(void) {
    static ggml_backend_buffer_type type = {
        {get_name, alloc_buffer, get_alignment, /* get_max_size */ nullptr, get_alloc_size, /* is_host */ nullptr},
        ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        new packed_buffer_type(),
    };
    return &type;
}
