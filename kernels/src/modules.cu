#include "modules.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <vector>

namespace expertd {
namespace {

// Sources register before main, in any order, so the list must not need a constructor.
const Module* first_module = nullptr;

// A function of the driver, which is not linked.
template <typename Function> cudaError_t find(const char* name, Function*& function) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &address, 12040, cudaEnableDefault, &found);
    if (code != cudaSuccess) return code;
    if (found != cudaDriverEntryPointSuccess || address == nullptr) return cudaErrorCallRequiresNewerDriver;
    function = reinterpret_cast<Function*>(address);
    return cudaSuccess;
}

}  // namespace

Module::Module(const void* kernel) : kernel_(kernel), next_(first_module) { first_module = this; }

int load_modules() {
    decltype(cuFuncGetModule)* module_of = nullptr;
    decltype(cuModuleGetFunctionCount)* count_of = nullptr;
    decltype(cuModuleEnumerateFunctions)* functions_of = nullptr;
    decltype(cuFuncLoad)* load = nullptr;
    cudaError_t code = find("cuFuncGetModule", module_of);
    if (code == cudaSuccess) code = find("cuModuleGetFunctionCount", count_of);
    if (code == cudaSuccess) code = find("cuModuleEnumerateFunctions", functions_of);
    if (code == cudaSuccess) code = find("cuFuncLoad", load);
    for (const Module* at = first_module; at != nullptr && code == cudaSuccess; at = at->next_) {
        cudaFunction_t function = nullptr;
        code = cudaGetFuncBySymbol(&function, at->kernel_);
        if (code != cudaSuccess) return code;
        CUmodule module = nullptr;
        unsigned count = 0;
        if (module_of(&module, function) != CUDA_SUCCESS || count_of(&count, module) != CUDA_SUCCESS) return cudaErrorSharedObjectInitFailed;
        std::vector<CUfunction> all(count);
        if (functions_of(all.data(), count, module) != CUDA_SUCCESS) return cudaErrorSharedObjectInitFailed;
        for (CUfunction each : all) {
            if (load(each) != CUDA_SUCCESS) return cudaErrorSharedObjectInitFailed;
        }
    }
    return code;
}

}  // namespace expertd

extern "C" int expertd_load_modules(void) { return expertd::load_modules(); }
