#include "api.h"

#include "error.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace pyssd {

// process-wide like the library it describes
static api_table table;
static bool attached = false;

static void * symbol_find(void * handle, const char * name) {
#ifdef _WIN32
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(handle), name));
#else
    return dlsym(handle, name);
#endif
}

static std::map<std::string, size_t> library_sizes(const api_table & from) {
    std::map<std::string, size_t> sizes;
    for (const auto & [name, size] : api_struct_sizes()) {
        (void) size;
        sizes[name] = from.pyssd_sizeof(name.c_str());
    }
    return sizes;
}

void api_attach(void * handle) {
    if (handle == nullptr) {
        throw error(error_kind::LIBRARY_NOT_FOUND, "the handle of libllama is null; load the library first");
    }
    api_table found;
#define PYSSD_API_FIND(name)                                                                                           \
    found.name = reinterpret_cast<decltype(found.name)>(symbol_find(handle, #name));                                   \
    if (found.name == nullptr) {                                                                                       \
        throw error(error_kind::LIBRARY_NOT_FOUND,                                                                     \
                    "the loaded libllama has no " #name "; import pyssd before llama_cpp so that its own is used");    \
    }
    PYSSD_API_FUNCTIONS(PYSSD_API_FIND)
#undef PYSSD_API_FIND

    if (attached) {
        if (found.llama_decode != table.llama_decode) {
            throw error(error_kind::LIBRARY_CONFLICT,
                        "the core already uses another libllama; one process can use only one");
        }
        return;
    }
    const uint32_t version = found.pyssd_abi_version();
    if (version != PYSSD_ABI_VERSION) {
        throw error(error_kind::LIBRARY_CONFLICT, "libllama has pyssd ABI " + std::to_string(version) +
                                                      ", this core needs " + std::to_string(PYSSD_ABI_VERSION) +
                                                      "; reinstall pyssd");
    }
    const auto theirs = library_sizes(found);
    for (const auto & [name, ours] : api_struct_sizes()) {
        if (theirs.at(name) != ours) {
            throw error(error_kind::LIBRARY_CONFLICT, "struct " + name + " has " + std::to_string(theirs.at(name)) +
                                                          " bytes in libllama and " + std::to_string(ours) +
                                                          " in this core; reinstall pyssd");
        }
    }
    api_set(found);
}

void api_set(const api_table & value) {
    table = value;
    attached = true;
}

const api_table & api() {
    if (!attached) {
        throw error(error_kind::LIBRARY_NOT_FOUND, "no libllama is attached; import pyssd, which loads it");
    }
    return table;
}

std::map<std::string, size_t> api_struct_sizes() {
    return {
        {"llama_model_params", sizeof(llama_model_params)},
        {"llama_context_params", sizeof(llama_context_params)},
        {"llama_batch", sizeof(llama_batch)},
        {"llama_sampler_i", sizeof(llama_sampler_i)},
        {"llama_token_data", sizeof(llama_token_data)},
        {"llama_token_data_array", sizeof(llama_token_data_array)},
    };
}

std::map<std::string, size_t> api_library_sizes() {
    return library_sizes(api());
}

} // namespace pyssd
